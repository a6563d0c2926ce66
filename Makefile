# `make help` lists the targets. Everything built is cached outside the repository, keyed by its pins.
SHELL := /bin/bash
RUN = PYTHONPATH=$(CURDIR)/operator/src $(PYTHON)
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PYTHONDONTWRITEBYTECODE ?= 1
# One arena, as in the agent's image: what is resident is what is in use.
export MALLOC_ARENA_MAX ?= 1

ifndef PYTHON
PYTHON := $(shell [ "$(MAKECMDGOALS)" = help -o -z "$(MAKECMDGOALS)" ] || tools/setup.sh | tail -n 1)
endif

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}'

.PHONY: setup
setup: ## packages, Python environment, CRIU, init, training root file system
	@echo $(PYTHON)

.PHONY: lint
lint: ## ruff, mypy strict, import-linter
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -c 'from importlinter.cli import lint_imports_command as c; c()'

.PHONY: format
format: ## format the Python code
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

.PHONY: crds
crds: ## the CustomResourceDefinitions and docs/api.md, from the types
	$(RUN) -m stasis.api.generate .
	$(PYTHON) tools/api_reference.py

.PHONY: test
test: lint ## everything once, as CI runs it; T=PATH for one area
	$(RUN) -m pytest -q -m 'not slow' $(or $(T),tests e2e)

.PHONY: test-all
test-all: lint ## the full matrices (hours)
	$(RUN) -m pytest -q tests e2e

.PHONY: e2e
e2e: ## a TrainJob on a real cluster: suspended, resumed, killed at; ALL=1 for the full matrix
	$(RUN) -m pytest -v $(if $(ALL),,-m 'not slow') e2e

.PHONY: test-gpu
test-gpu: ## GPU jobs on simulated GPUs, every fault at every step; no GPU is needed
	$(RUN) -m pytest -q tests/gpusim

SCHEDULES ?= 100000
.PHONY: sim
sim: ## simulate the gang protocol: SCHEDULES=100000 [SEED=N]
	$(RUN) -m tests.sim.run --schedules $(SCHEDULES) $(if $(SEED),--seed $(SEED))

.PHONY: demo
demo: ## a gang suspended and resumed, proved undisturbed
	$(RUN) -m stasis demo

DIR ?= ../shared/cases
.PHONY: cases
cases: ## programs that break checkpointing: DIR=FOLDER; CLUSTER=e2e: as TrainJobs in the e2e cluster
ifeq ($(CLUSTER),e2e)
	@$(RUN) -m e2e.installation
	eval "$$(e2e/cluster/env.sh)"
	$(RUN) -m stasis cases $(DIR) --cluster $$STASIS_E2E_REGISTRY/stasis-trainer:e2e $(if $(ONLY),--only $(ONLY))
else
	@if (( ! (0x$$(sed -n 's/^CapEff:\s*//p' /proc/self/status) >> 24 & 1) )); then # no CAP_SYS_RESOURCE
		export STASIS_CRIU_PRELOAD=$$(tools/prlimit_shim.sh)
	fi
	$(RUN) -m stasis cases $(DIR) $(if $(ONLY),--only $(ONLY))
endif

.PHONY: cluster-up
cluster-up: ## the e2e cluster (kind, JobSet, Trainer, a registry); prints its kubeconfig
	@e2e/cluster/up.sh

.PHONY: cluster-down
cluster-down: ## take it down again, whole or half
	@e2e/cluster/down.sh

.PHONY: scale
scale: ## the controller beside many TrainJobs: JOBS=5000 RANKS=4
	$(RUN) -m bench.scale $(if $(JOBS),--jobs $(JOBS)) $(if $(RANKS),--ranks $(RANKS))

SIZES ?= 1
.PHONY: bench
bench: ## the data path beside what people would use: SIZES=1,4 [ONLY=P1,P6] [RUNS=5]
	$(RUN) -m bench.run --sizes $(SIZES) $(if $(ONLY),--only $(ONLY)) $(if $(RUNS),--runs $(RUNS))

.PHONY: shell
shell: ## a shell in which `stasis` runs
	@dir=$$(mktemp -d); printf '#!/bin/sh\nPYTHONPATH=%s exec %s -m stasis "$$@"\n' $(CURDIR)/operator/src $(PYTHON) >$$dir/stasis
	chmod +x $$dir/stasis; PATH=$$dir:$$PATH $${SHELL:-bash}; rm -r $$dir
