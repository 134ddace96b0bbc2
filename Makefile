# Everything sets itself up: `make demo` and `make test` work on a machine that has only Python >= 3.10 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2

.PHONY: setup demo test oldest check format lint types contracts tutorials docs bench clean

setup: $(READY)

$(READY): pyproject.toml
	@echo "Setting up $(VENV): a few minutes, once, while packages are fetched"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python .ci/install_torch.py
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(READY)

demo: setup
	$(BIN)/sightlens demo

test: setup
	$(BIN)/python -m pytest -n $(JOBS)

# the tests of what touches transformers, on the oldest release that is allowed, and beside torchvision, which `setup` leaves out
oldest:
	$(MAKE) setup VENV=.venv-oldest
	.venv-oldest/bin/python -m pip install --quiet 'transformers==5.23.0' 'transformer-lens==4.3.0' torchvision \
		"torch==$$(.venv-oldest/bin/python -c 'import torch; print(torch.__version__.split("+")[0])')"
	.venv-oldest/bin/python -m pytest -n $(JOBS) tests/model tests/families tests/engine tests/experiments tests/zoo tests/test_cli.py

format: setup
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

lint: setup
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks

types: setup
	$(BIN)/pyright

contracts: setup
	$(BIN)/lint-imports

check: lint types contracts test tutorials

tutorials: setup
	$(BIN)/python -m pytest tutorials -n $(JOBS)

docs: setup
	$(BIN)/python -m tests.document

bench: setup
	PYTHONPATH=. $(BIN)/python benchmarks/overhead.py
	PYTHONPATH=. $(BIN)/python benchmarks/sweeps.py

clean:
	rm -rf $(VENV) .venv-oldest build dist .pytest_cache .ruff_cache .hypothesis
