# make demo   train one small model of each family on the embedded digits, and compare them
# make test   every check: ruff, pyrefly, pytest
# make docs   the site, into build/site
# make zoo    write src/allmlp/models/zoo.json anew after a change to the models

PYTHON ?= python3
WORKERS ?= auto
BIN := .venv/bin
CODE := src tests examples benchmarks docs
CONSTRAINTS := $(if $(shell command -v nvidia-smi),constraints.txt,constraints-cpu.txt)
PINS := pyproject.toml constraints.txt constraints-cpu.txt

.PHONY: demo test docs zoo clean

demo: .venv/.run
	$(BIN)/python examples/demo.py

test: .venv/.dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/pyrefly check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

zoo: .venv/.dev
	ALLMLP_WRITE_ZOO=1 $(BIN)/pytest tests/test_cli.py -k test_list_is_the_zoo

.venv/.run: $(PINS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[train,analysis]'
	touch $@

.venv/.dev: $(PINS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	touch .venv/.run $@

clean:
	rm -rf .venv dist build .pytest_cache .ruff_cache .hypothesis
