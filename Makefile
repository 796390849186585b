# `make` alone says what there is. Every target makes .venv by itself when it is missing or older than the lock files.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
LOCKS := requirements/cpu.lock requirements/dev.lock
TORCH := $(shell sed -n 's/^torch==//p' requirements/cpu.lock)
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile --no-build-isolation --use-pep517
PYTEST := $(BIN)/python -m pytest

# Images often set this. Nothing is compiled at installation, so each of a run's processes would compile all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all lint bench invariants clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

venv: $(VENV)/.installed ## .venv, as the lock files say

demo: venv ## a real language model learns arithmetic on two CPU cores
	@$(BIN)/megarl train configs/demo.yaml

test: lint ## lint, then every test but the slow ones
	@$(PYTEST) -m "not slow"

test-all: lint ## lint, then every test
	@$(PYTEST)

lint: venv ## ruff, the rules of the rooms, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/mypy

invariants: venv ## what must hold, as a table; also build/invariants.json
	@$(PYTEST) tests/invariants --json build/invariants.json

bench: venv ## the benchmarks, each as a table; also build/NAME.json
	@set -e; for file in $(filter-out benchmarks/table.py,$(wildcard benchmarks/*.py)); do \
		name=$$(basename $$file .py); $(BIN)/python -m benchmarks.$$name --json build/$$name.json; done

clean: ## remove .venv, build/ and caches; runs/ stays
	@rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache *.egg-info
	@find megarl tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Only what is imported gets compiled, when it is: --no-compile halves the time of installation.
# Two stamps, so that a change of pyproject.toml does not install everything again.
$(VENV)/.installed: $(VENV)/.locked pyproject.toml
	@$(PIP) --no-index --editable .
	@touch $@

$(VENV)/.locked: $(LOCKS)
	@test -n "$(PYTHON)" || { echo "megarl needs Python 3.11, and there is no python3.11, python3 or python of that version on PATH (or say: make PYTHON=/path/to/python3.11)." >&2; exit 1; }
	@$(PYTHON) requirements/check.py
	@echo "Making $(VENV) with $$($(PYTHON) --version): about 1.5 GB, one to three minutes ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) $$(grep '^setuptools==' requirements/dev.lock)
	@$(PIP) torch==$(TORCH)+cpu 2>/dev/null || $(PIP) torch==$(TORCH)
	@$(PIP) $(addprefix -r ,$(LOCKS))
	@$(BIN)/python -c 'import torch' || { echo "This torch does not load: pip found no build for machines without CUDA. Name PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL (pytorch.org says where it is) and run make again." >&2; exit 1; }
	@touch $@
