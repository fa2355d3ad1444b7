# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CONFIG := configs/quickstart.yaml
RUN := runs/quickstart
DEMO := data/demo

.DEFAULT_GOAL := help
.PHONY: help setup quickstart data train evaluate export compare compare-final claims figures bench test test-fast \
  lint format docs demo-model

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed ## Create .venv with the exact versions of constraints.txt
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	touch $@

quickstart: export ## Set-up, data, training, evaluation and export on this machine

data: $(DEMO)/.composed ## Compose the demo's pairs
$(DEMO)/.composed: | $(VENV)/.installed
	$(BIN)/rlcompute data demo --out $(DEMO)
	touch $@

train: $(RUN)/.trained ## Train the quick start's gates; continues an interrupted run
$(RUN)/.trained: $(DEMO)/.composed | $(VENV)/.installed
	$(BIN)/rlcompute train --config $(CONFIG) $(if $(wildcard $(RUN)/checkpoints/latest),--resume)
	touch $@

evaluate: $(RUN)/.evaluated ## Measure the quick start's gates on held-out pairs
$(RUN)/.evaluated: $(RUN)/.trained
	$(BIN)/rlcompute evaluate --config $(CONFIG)
	touch $@

export: $(RUN)/.exported ## Write the quick start's gates with their model card
$(RUN)/.exported: $(RUN)/.evaluated
	$(BIN)/rlcompute export --config $(CONFIG)
	touch $@

compare: $(RUN)/.exported ## The quick start's gates against rules that need no training (under 20 minutes)
	$(BIN)/rlcompute compare --config configs/compare_demo.yaml

compare-final: setup ## Gates of three seeds at four savings against the best rules, final pool (about two hours)
	$(BIN)/rlcompute data demo --out data/demo_full --train 1000 --test 2000 --final 2000
	for seed in 0 1 2; do for saved in 32 45 55 65; do \
	  run=demo$${saved}_seed$$seed; test -d runs/$$run/export && continue; \
	  options="run.name=$$run run.seed=$$seed reward.target_flops_saved=0.$$saved grpo.iterations=300"; \
	  test $$saved -gt 45 || options="$$options reward.distill_weight=1.0 grpo.advantage_normalization=batch"; \
	  $(BIN)/rlcompute train --config configs/demo_full.yaml $$options || exit 1; \
	done; done
	$(BIN)/rlcompute compare --config configs/compare_final.yaml

claims: $(RUN)/.exported ## Published claims about adaptive computation, checked on the demo
	$(BIN)/rlcompute claims --config configs/compare_demo.yaml

figures: setup ## Every accuracy and compute figure of the README (about 25 minutes on two cores)
	$(BIN)/rlcompute data demo --out data/demo_full --train 1000 --test 2000 --final 2000
	for seed in 0 1 2; do \
	  options="run.name=quickstart_seed$$seed run.seed=$$seed data.train=data/demo_full/train.parquet \
	    data.pairs_per_task=500 data.test=data/demo_full/test.parquet evaluation.pairs_per_modality=2000"; \
	  $(BIN)/rlcompute train --config $(CONFIG) $$options && \
	  $(BIN)/rlcompute evaluate --config $(CONFIG) $$options || exit 1; \
	done
	$(BIN)/rlcompute train --config configs/demo_full.yaml
	$(BIN)/rlcompute evaluate --config configs/demo_full.yaml

bench: setup ## Every speed figure of the README (about 20 minutes on two idle cores)
	$(BIN)/rlcompute benchmark --geometry bench --threads 2 --budget-s 750 --out benchmarks/results/bench
	$(BIN)/rlcompute benchmark --geometry demo --tables iv,v,vi --threads 2 --budget-s 180 --out benchmarks/results/demo

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

demo-model: setup ## Train the demo embedder again (about an hour on two cores)
	$(BIN)/python -m rlcompute.demo.recipe --out rlcompute/demo/checkpoint
