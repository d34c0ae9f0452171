# make demo       train one small model of each family on embedded data, and compare them
# make test       lint, types, and the tests without the slow ones
# make test-all   everything
# make test-peers our models in other people's code: timm, transformers, Lightning ..., in an environment of its own
# make fuzz      damaged files, HTTP and hostile settings for MINUTES=2, from SEED=0; stops with 1 if there are faults
# make docs       the site, into build/site
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
PINS := pyproject.toml constraints.txt constraints-cpu.txt
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

.PHONY: demo lint test test-all test-peers fuzz docs zoo results tables clean

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

zoo: .venv/.dev
	ALLMLP_WRITE_ZOO=1 $(BIN)/pytest tests/test_cli.py -k test_list_is_the_zoo

results: .venv/.dev
	PYTHONPATH=docs/tools $(BIN)/python -m results

tables: .venv/.dev
	PYTHONPATH=docs/tools $(BIN)/python -m paper_tables

# $(call install,FOLDER,EXTRAS,TORCH): on Linux the plain index serves torch with gigabytes of CUDA libraries. Without a
# GPU the packages TORCH come from PyTorch's index of CPU wheels, if it can be reached, and all others from the plain one.
PIP = $1/bin/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
define install
$(PYTHON) -m venv $1
if [ $(CONSTRAINTS) = constraints-cpu.txt ] && [ "$$(uname)" = Linux ] && $(PYTHON) -c \
"from urllib.request import urlopen; urlopen('$(CPU_WHEELS)/torch/', timeout=10)" 2>/dev/null; then \
$(PIP) --no-deps --index-url $(CPU_WHEELS) $3; fi
$(PIP) -e '.[$2]'
endef

.venv/.run: $(PINS)
	$(call install,.venv,train$(,)analysis$(,)serve,torch)
	touch $@

.venv/.dev: $(PINS)
	$(call install,.venv,dev,torch torchvision)
	touch .venv/.run $@

.venv-peers/.done: $(PINS)
	$(call install,.venv-peers,peers,torch torchvision)
	touch $@

clean:
	rm -rf .venv .venv-peers dist build .pytest_cache .ruff_cache .hypothesis
