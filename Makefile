# Everything runs from .venv, which `setup` makes once and again whenever pyproject.toml changes.
# ARGS= is handed to the command, e.g.  make drill ARGS="--kills 5 --json"
VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=
SEED ?= 1
RUNS ?= 10000
export PYTHONDONTWRITEBYTECODE ?=

.DEFAULT_GOAL := help
.PHONY: help setup style types test test-core fuzz sim drill bench device-check docs clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.stamp ## make .venv and install the project into it

$(VENV)/.stamp: pyproject.toml
	python3 -c 'import sys; sys.exit("understudy needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

style: setup ## ruff
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup ## mypy --strict
	$(VENV)/bin/mypy

test: setup ## every test that needs no GPU
	PYTHONDEVMODE=1 $(PY) -m pytest $(ARGS)

test-core: setup ## the pure cores only: tables, properties, simulations
	$(PY) -m pytest tests/lockserver/core tests/gms/core tests/engine/core tests/sim $(ARGS)

fuzz: setup ## random input for the decoder, the sessions and real servers; keeps what it finds
	FUZZ_EXAMPLES=20000 FUZZ_KEEP=1 $(PY) -m pytest tests/fuzz -o faulthandler_timeout=0 $(ARGS)

sim: setup ## random schedules of the memory service: RUNS= of them from SEED= on
	SEED=$(SEED) RUNS=$(RUNS) $(PY) -m pytest -q tests/sim/test_crash_recovery.py tests/sim/test_tensor_parallel.py -k simulation -o faulthandler_timeout=0 $(ARGS)

drill: setup ## start a pod, kill the active engine 20 times, print the report
	@$(VENV)/bin/understudy drill $(ARGS)

bench: setup ## measure; JSON with ARGS=--json
	@$(PY) -m hack.bench $(ARGS)

device-check: setup ## ask a GPU what the design relies on; without one it says so (ARGS=--stand-in rehearses)
	@$(PY) -m hack.device_check $(ARGS)

docs: setup ## write the generated pages again
	$(PY) -m hack.gen_states

clean: ## remove what the targets above made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build
