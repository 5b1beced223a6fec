# Two commands matter: `make train` and `make test`. Both build the environment they need.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: train test test-all lint format clean

train: $(VENV)/.installed
	$(BIN)/gangline train --network lenet --dataset digits --cpus 2 --kv-store device

test: lint
	$(BIN)/pytest -m "not slow"

test-all: lint
	$(BIN)/pytest --hypothesis-profile=explore

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test,bench]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
