# `make` lists the targets. Pass flags to a script with ARGS: make eval ARGS="--help"
PYTHON ?= python3
# For another build of torch: make setup TORCH="torch==2.13.0 --index-url <the CPU wheel index named on pytorch.org>"
TORCH ?= torch==2.13.0
SEED ?= 0
ARGS ?=
PY := .venv/bin/python
STAMP := .venv/.setup-done
SCRIPTS := train_sft train_igpo rollout eval

.DEFAULT_GOAL := help
.PHONY: help setup demo smoke test soak lint format bench $(SCRIPTS) FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z_]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned torch (TORCH=...) and the package; quick when done

# Torch goes first: left to the package's `torch>=2.11`, pip would take the newest build, on Linux with GBs of CUDA.
$(STAMP): pyproject.toml
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(PY) -m pip install $(TORCH)
	$(PY) -m pip install -e '.[dev]'
	@touch $@

# A TORCH given by hand is installed even when the stamp is fresh.
ifneq ($(origin TORCH),file)
$(STAMP): FORCE
endif

demo: setup ## world -> SFT -> eval -> IGPO -> eval, about 15 minutes on 2 cores (SEED=0)
	$(PY) -m venus.demo --seed $(SEED) $(ARGS)

smoke: setup ## the demo's path with tiny budgets, under 3 minutes
	$(PY) -m venus.demo --smoke $(ARGS)

test: setup ## every test but the soak tests
	$(PY) -m pytest $(ARGS)

soak: setup ## the long tests
	$(PY) -m pytest -m soak $(ARGS)

lint: setup ## ruff's rules and format, check only: edits no file
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: setup ## lay the code out: ruff, 100 columns
	$(PY) -m ruff format .

bench: setup ## time info-gain scoring, decoding and the kernels against their references
	$(PY) -m venus.bench ig
	$(PY) -m venus.bench decode
	$(PY) -m kernels.bench all

train_sft: setup ## supervised fine-tuning on trajectories
	$(PY) train_sft.py $(ARGS)

train_igpo: setup ## reinforcement learning with information gain
	$(PY) train_igpo.py $(ARGS)

rollout: setup ## questions.jsonl -> trajectories.jsonl
	$(PY) rollout.py $(ARGS)

eval: setup ## trajectories -> verdicts, accuracy with CI, tool use
	$(PY) eval.py $(ARGS)
