# Everything runs in .venv, which `make install` builds from requirements.lock. `make up ARGS="--decode 2"` passes flags.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= smollm2-135m
ARGS ?=

.PHONY: help install up pull test test-all lint format bench clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Build .venv with the pinned packages; quick when nothing changed

$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $$(grep -c == requirements.lock) pinned packages into $(VENV)"
	$(BIN)/python -m pip install --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	touch $@

pull: install ## Download and verify the weights that `make up` and the tests use
	$(BIN)/phaseplane pull $(MODEL)

up: install ## Start a fleet on this machine: one prefill and one decode instance, real weights
	$(BIN)/phaseplane up $(ARGS)

test: pull ## Run the tests that need neither a GPU nor much time
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: pull ## Run every test; those that need a GPU skip where there is none
	$(BIN)/python -m pytest $(ARGS)

lint: install ## Lint, format check, types, and which folder may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## Format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: pull ## Measure engine, transfer and gateway beside their peers; JSON lines in benchmarks/results/
	$(BIN)/python benchmarks/run.py $(ARGS)

clean: ## Remove caches and results, not .venv
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis benchmarks/results dist build
