# make demo       train one small model of each family on embedded data, and compare them
# make test       lint, types, and the tests without the slow ones
# make test-all   everything
# make test-peers our models in other people's code: timm, transformers, Lightning ..., in an environment of its own
# make fuzz      damaged files, HTTP and hostile settings for MINUTES=2, from SEED=0; stops with 1 if there are faults
# make docs       the site, into build/site
# make lock       write requirements/*.txt anew after a change to pyproject.toml or constraints.txt (needs uv)
# make zoo        write src/allmlp/models/zoo.json anew after a change to the models
# make results    write the tables of README.md, docs/results.md and benchmarks/README.md anew from the records
# make tables     write report/tables.json and plan/speeds.json anew after a change to models or measurements

PYTHON ?= python3
WORKERS ?= auto
MINUTES ?= 2
SEED ?= 0
BIN := .venv/bin
CODE := src tests examples benchmarks docs
CONSTRAINTS := $(if $(shell command -v nvidia-smi),constraints.txt,constraints-cpu.txt)
, := ,
CPU_WHEELS := https://download.pytorch.org/whl/cpu
PINS := pyproject.toml constraints.txt constraints-cpu.txt requirements/run.txt requirements/dev.txt
RUN := train,analysis,serve
# The commands that tests start read the bytecode that the first of them has written.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

.PHONY: demo lint test test-all test-peers fuzz docs lock zoo results tables clean

demo: .venv/.run
	$(BIN)/python examples/demo.py

lint: .venv/.dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/pyrefly check

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

test-peers: BIN := .venv-peers/bin
test-peers: .venv-peers/.done
	ALLMLP_PEERS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline $(PYTEST) tests/peers

fuzz: .venv/.dev
	PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) --seed $(SEED)

docs: .venv/.dev
	$(BIN)/sphinx-build --fail-on-warning --quiet docs build/site

# Without torch, whose CPU wheel has another hash than the plain one, and the CUDA libraries that the plain one asks for;
# with the other packages that torch asks for, and with what builds this one.
UV ?= uv
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
--no-emit-index-url -c constraints.txt --overrides build/without.txt pyproject.toml build/also.txt
lock:
	mkdir -p build
	printf "%s; python_version < '3'\\n" torch torchvision triton > build/without.txt
	printf '%s\n' editables filelock fsspec hatchling jinja2 networkx setuptools sympy typing-extensions > build/also.txt
	$(COMPILE) $(foreach extra,$(subst $(,), ,$(RUN)),--extra $(extra)) -o requirements/run.txt
	$(COMPILE) --extra dev -o requirements/dev.txt

zoo: .venv/.dev
	ALLMLP_WRITE_ZOO=1 $(BIN)/pytest tests/test_counts.py -k test_list_is_the_zoo

results: .venv/.dev
	PYTHONPATH=docs/tools $(BIN)/python -m results

tables: .venv/.dev
	PYTHONPATH=docs/tools $(BIN)/python -m paper_tables

# $(call install,FOLDER,EXTRAS,TORCH,LOCK): on Linux the plain index serves torch with gigabytes of CUDA libraries. Without a
# GPU the packages TORCH come from PyTorch's index of CPU wheels, if it can be reached, and all others from the plain one,
# those of requirements/LOCK.txt only if their hashes agree.
PIP = $1/bin/pip install --quiet --disable-pip-version-check
define install
$(PYTHON) -m venv $1
if [ $(CONSTRAINTS) = constraints-cpu.txt ] && [ "$$(uname)" = Linux ] && $(PYTHON) -c \
"from urllib.request import urlopen; urlopen('$(CPU_WHEELS)/torch/', timeout=10)" 2>/dev/null; then \
$(PIP) --no-deps -c $(CONSTRAINTS) --index-url $(CPU_WHEELS) $3; fi
$(if $4,$(PIP) --no-deps --require-hashes -r requirements/$4.txt)
$(PIP) -c $(CONSTRAINTS) $(if $4,--no-build-isolation) -e '.[$2]'
endef

.venv/.run: $(PINS)
	$(call install,.venv,$(RUN),torch,run)
	touch $@

.venv/.dev: $(PINS)
	$(call install,.venv,dev,torch torchvision,dev)
	touch .venv/.run $@

.venv-peers/.done: $(PINS)
	$(call install,.venv-peers,peers,torch torchvision)
	touch $@

clean:
	rm -rf .venv .venv-peers dist build .pytest_cache .ruff_cache .hypothesis
