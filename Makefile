# Everything a developer does, each by one word. Every target sets up what it needs.
SHELL := /bin/bash
PYTHON_BIN := .venv/bin/python
SEEDS ?= 20
JOBS ?= 2

.PHONY: help setup run test check format reference bench sim sim-mutants soak clean

help:           ## show this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup:          ## make .venv with the `penstock` command in it (quick when nothing changed)
	@tools/setup

run: setup      ## run the main job: a broker, sample producers, the risk-tag pipeline; FOR=60s ends it
	@$(PYTHON_BIN) -m penstock.cli showcase $(if $(FOR),--for $(FOR))

test: setup     ## run all tests
	@JOBS=$(JOBS) $(PYTHON_BIN) tools/test

check: setup    ## formatting, lint and strict types
	@.venv/bin/ruff format --check penstock pyspark_penstock tests examples tools/reference
	@.venv/bin/ruff check penstock pyspark_penstock tests examples tools/reference
	@.venv/bin/mypy

format: setup   ## let ruff format and fix
	@.venv/bin/ruff format penstock pyspark_penstock tests examples tools/reference
	@.venv/bin/ruff check --fix penstock pyspark_penstock tests examples tools/reference

reference: setup  ## print the pages of docs/reference that come from the code
	@$(PYTHON_BIN) -m tools.reference

bench: setup    ## run every bench case against its peers
	@tools/bench

sim: setup      ## run the simulator on SEEDS seeds; exits non-zero on a finding
	@$(PYTHON_BIN) -m penstock.testing.simulation --seeds $(SEEDS)

sim-mutants: setup  ## break each guarantee on purpose; fails unless the simulator finds every break
	@$(PYTHON_BIN) -m penstock.testing.simulation --mutants

soak: setup     ## the long campaigns: 500 seeds, all mutants, 200 kills, ten minutes at full rate
	@tools/soak

clean:          ## remove the virtual environment and all caches
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
