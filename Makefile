# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CONFIG := configs/quickstart.yaml
RUN := runs/quickstart
DEMO := data/demo
DEMO_FULL := data/demo_full
GRPO_RUNS := $(foreach seed,0 1 2,$(foreach saved,32 45 55 65,demo$(saved)_seed$(seed)))

.DEFAULT_GOAL := help
.PHONY: help setup quickstart data data-full train evaluate export compare compare-final ste claims figures bench test \
  test-fast lint format docs demo-model

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

data-full: $(DEMO_FULL)/.composed ## Compose the larger pools that configs/ste.yaml and configs/demo_full.yaml read
$(DEMO_FULL)/.composed: | $(VENV)/.installed
	$(BIN)/rlcompute data demo --out $(DEMO_FULL) --train 1000 --test 2000 --final 2000
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

compare-final: $(GRPO_RUNS:%=runs/%/export/gate_config.json) ## Gates of three seeds at four savings against the best rules, final pool (about two hours)
	$(BIN)/rlcompute compare --config configs/compare_final.yaml

# Of a name such as demo45_seed0: 45 % to save, seed 0.
SAVED = $(patsubst demo%,%,$(firstword $(subst _seed, ,$*)))
SEED = $(lastword $(subst _seed, ,$*))
RESUME = $(if $(wildcard runs/$*/checkpoints/latest),--resume)
$(GRPO_RUNS:%=runs/%/export/gate_config.json): runs/%/export/gate_config.json: | $(DEMO_FULL)/.composed
	$(BIN)/rlcompute train --config configs/demo_full.yaml $(RESUME) run.name=$* run.seed=$(SEED) \
	  reward.target_flops_saved=0.$(SAVED) grpo.iterations=300 \
	  $(if $(filter 32 45,$(SAVED)),reward.distill_weight=1.0 grpo.advantage_normalization=batch)

# Straight-through gates: a run and what it adds to configs/ste.yaml.
THREE := ste.actions=[token_pruner,expert_skip,layer_skip]
BUDGETS := ste.skip_target=0.3 ste.layer_weight=10
ste_pruner := ste.actions=[token_pruner] ste.prune_keep=0.3
ste_pruner25 := ste.actions=[token_pruner] ste.prune_keep=0.25
ste_skip := ste.actions=[expert_skip]
ste_layers := ste.actions=[layer_skip] ste.layer_target=0.2
ste_nulls := ste.actions=[null_experts] ste.distill_weight=0.0
ste_simultaneous := $(THREE) $(BUDGETS)
ste_alternating := $(THREE) $(BUDGETS) ste.combination=alternating
ste_sequential := $(THREE) $(BUDGETS) ste.combination=sequential
ste_shared30 := $(THREE) ste.combination=shared ste.flops_saved=0.30 ste.ramp_share=0.5
ste_shared45 := $(THREE) ste.combination=shared ste.flops_saved=0.45
ste_shared55 := $(THREE) ste.combination=shared ste.flops_saved=0.55
ste_shared65 := $(THREE) ste.combination=shared ste.flops_saved=0.65 ste.flops_weight=8 ste.ramp_share=0.5 ste.prune_layer=1
halt_avit := ste.actions=[halt_avit]
halt_cumulative := ste.actions=[halt_cumulative]
halt_beta := ste.actions=[halt_beta] ste.iterations=120
early_exit := ste.actions=[early_exit] ste.iterations=120
STE_RUNS := ste_pruner ste_pruner25 ste_skip ste_layers ste_nulls ste_simultaneous ste_alternating ste_sequential ste_shared30 ste_shared45 \
  ste_shared55 ste_shared65 halt_avit halt_cumulative halt_beta early_exit

$(STE_RUNS:%=runs/%/export/gate_config.json): runs/%/export/gate_config.json: | $(DEMO_FULL)/.composed
	$(BIN)/rlcompute train --config configs/ste.yaml $(RESUME) run.name=$* $(foreach option,$($*),'$(option)')

ste: $(STE_RUNS:%=runs/%/export/gate_config.json) $(GRPO_RUNS:%=runs/%/export/gate_config.json) ## Straight-through gates of every kind beside GRPO and rules, final pool, and the claims about them (hours)
	$(BIN)/rlcompute compare --config configs/compare_ste.yaml
	$(BIN)/rlcompute claims --config configs/compare_ste.yaml

claims: $(RUN)/.exported ## Published claims about adaptive computation, checked on the demo
	$(BIN)/rlcompute claims --config configs/compare_demo.yaml

figures: $(DEMO_FULL)/.composed ## The tables of "What it reaches on the demo" in the README (about 25 minutes on two cores)
	for seed in 0 1 2; do \
	  options="run.name=quickstart_seed$$seed run.seed=$$seed data.train=data/demo_full/train.parquet \
	    data.pairs_per_task=500 data.test=data/demo_full/test.parquet evaluation.pairs_per_modality=2000"; \
	  resume=$$(test ! -e runs/quickstart_seed$$seed/checkpoints/latest || echo --resume); \
	  $(BIN)/rlcompute train --config $(CONFIG) $$resume $$options && \
	  $(BIN)/rlcompute evaluate --config $(CONFIG) $$options || exit 1; \
	done
	$(BIN)/rlcompute train --config configs/demo_full.yaml $(if $(wildcard runs/demo_full/checkpoints/latest),--resume)
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
