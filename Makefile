# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CONFIG := configs/quickstart.yaml
RUN := runs/quickstart

.DEFAULT_GOAL := help
.PHONY: help setup quickstart data train evaluate export test test-fast lint format docs demo-model

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(BIN)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	touch $@

setup: $(BIN)/.installed ## Create .venv with the exact versions of constraints.txt

quickstart: export ## Set-up, data, training, evaluation and export on this machine

data: data/demo/.complete
data/demo/.complete: $(BIN)/.installed
	$(BIN)/rlcompute data demo --out data/demo
	touch $@

test: setup ## Set-up and the whole test suite
	$(BIN)/python -m pytest

test-fast: setup ## The tests that take seconds
	$(BIN)/python -m pytest -m 'not slow'

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## Regenerate the configuration reference
	$(BIN)/python -c 'from rlcompute.config_loading import reference; print(reference(), end="")' > docs/configuration.md
