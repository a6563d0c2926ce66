# `make help` lists the targets. Everything built is cached outside the repository, keyed by its pins.
SHELL := /bin/bash
RUN = PYTHONPATH=$(CURDIR)/operator/src $(PYTHON)
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PYTHONDONTWRITEBYTECODE ?= 1

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
