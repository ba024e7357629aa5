"""What a drill kills: the names of the targets, which of them a pod has, and their order.

Pure. How each is found and killed is in `killer.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from engine import messages as engine_messages
from pool.core.states import ModelState

SUPERVISOR = "supervisor"
# Parts that are not engines: their deaths must not affect anything else.
LOCKSERVER = "lockserver"
GMS = "gms"  # a device's memory server
GMS_SUPERVISOR = "gms-supervisor"  # its servers die with it
GATEWAY = "gateway"  # requests in it are lost with it
PARTS = (LOCKSERVER, GMS, GMS_SUPERVISOR, GATEWAY)

# In a pool only.
POOL = "pool"
ALL_PARTS = (*PARTS, POOL)

STOP = "stop:"  # SIGSTOP to a process of an engine: a simulated hang
SHADOW = "shadow:"  # in a pool: a process of the engine that does not hold its model's lock

# In a fleet only, beside the parts of a pod.
POD, STOPPED_POD = "pod", f"{STOP}pod"  # all its processes at once
LEAVE = "leave"  # a pod that ends in good order, and is started again
FRONT = "front"  # requests in it are lost with it
FLEET_ONLY = (POD, STOPPED_POD, LEAVE, FRONT)

# The targets in an engine of one rank, by backend; vLLM's have no prefix.
TARGETS = ("backend-model", SUPERVISOR)
VLLM_TARGETS = ("api", "core", "worker", SUPERVISOR)
BACKEND = "backend-"  # prefix of all backend processes in an engine's own names


RANK = r"(?:-[1-9]\d?)?"
PROCESS = re.compile(
    rf"((?:{SHADOW})?(?:{STOP})?)"
    rf"(?:({SUPERVISOR}|backend-model{RANK})|(?:{BACKEND})?(api|core|worker{RANK}))"
)


def check_target(text: str) -> str:
    """`text`, if it is a valid target. The engine decides whether the rank exists.

    Raises:
        ValueError: with the valid targets.
    """
    if text in (*ALL_PARTS, *FLEET_ONLY):
        return text
    if (found := PROCESS.fullmatch(text)) is not None:
        return "".join(filter(None, found.groups()))
    ranks = "backend-model-1, backend-model-2, … of a tensor-parallel engine"
    vllm = "api, core, worker, worker-1, … of vLLM"
    raise ValueError(
        f"must be one of {', '.join(TARGETS)}, {ranks}, {vllm}, or {', '.join(PARTS)}; {STOP}NAME"
        " stops a process of an engine, to simulate a hang, instead of killing it; with --pool"
        f" also {POOL}, {SHADOW}PROCESS; with --fleet also {', '.join(FLEET_ONLY)}"
    )


def needed_flag(target: str) -> str | None:
    """The flag of the only kind of drill that has this target."""
    if target == POOL or target.startswith(SHADOW):
        return "--pool"
    return "--fleet" if target in FLEET_ONLY else None


def fleet_targets(backend: str | None) -> tuple[str, ...]:
    """What a fleet's drill kills. A front's death costs its streams, so it must be asked for."""
    *_, model, _ = base_targets(backend)
    return (POD, model, STOPPED_POD, GATEWAY, LEAVE)


def process_of(target: str) -> str:
    """The engine's process in a target: `backend-model` of `shadow:stop:backend-model`."""
    return re.sub(rf"^({SHADOW}|{STOP})+", "", target)


def base_targets(backend: str | None) -> tuple[str, ...]:
    """The targets in every engine with `backend`, whatever its number of ranks."""
    return VLLM_TARGETS if backend == "vllm" else TARGETS


def targets_of(backend: str | None, processes: Iterable[str]) -> tuple[str, ...]:
    """The targets to kill in turn in an engine with `processes`: all, rank after rank."""
    *base, last = base_targets(backend)
    ranks = sorted(
        (int(number), name.removeprefix(BACKEND))
        for name in processes
        for number in re.findall(r"-(\d+)$", name)
    )
    prefix = BACKEND if base[-1].startswith(BACKEND) else ""
    return (*base, *(f"{prefix}{name}" for _, name in ranks), last)


def kill_request(target: str) -> engine_messages.KillMsg:
    """The message that makes an engine kill or stop `target`."""
    process = process_of(target)
    if process != SUPERVISOR:
        process = BACKEND + process.removeprefix(BACKEND)
    return engine_messages.KillMsg(process, is_stop=STOP in target)


# ------------------------------------------------------------------ which kill comes next in a pool

# When to kill in a pool: as a model enters one of these states.
STATES = (
    ModelState.DRAINING,
    ModelState.WAKING,
    ModelState.AWAKE,
    ModelState.RELEASING,
    ModelState.PENDING,
    ModelState.LOADING,
    ModelState.WARM,
    ModelState.UNLOADING,
    ModelState.OFFLOADED,
    ModelState.COLD,
)


def pool_targets(backend: str | None, *, has_shadow: bool) -> tuple[str, ...]:
    """Every part and every process, so that those of one kind are not neighbours."""
    *names, _ = base_targets(backend)
    # The reference backend has one process, vLLM its API server in front of others.
    front, model = ("", names[0]) if len(names) == 1 else names[:2]
    shadows = (f"{SHADOW}{model}", f"{SHADOW}{SUPERVISOR}") if has_shadow else ("", "")
    # Without a shadow no engine takes over for half a minute, which is how long a hang may last.
    hangs = (f"{STOP}{model}", f"{STOP}{SUPERVISOR}") if has_shadow else ("", "")
    found = (
        *(POOL, model, GATEWAY, SUPERVISOR, LOCKSERVER, shadows[0], GMS, front),
        *(hangs[0], shadows[1], GMS_SUPERVISOR, hangs[1]),
    )
    return tuple(each for each in found if each)


def kill_order(targets: Sequence[str]) -> Iterator[tuple[str, ModelState]]:
    """Pairs of a target and a state, without end; no pair comes twice before all have come. The
    first round pairs each target with another state, and each further round shifts the pairs by
    one. A model that is cold has nothing but supervisors."""
    for shift in itertools.count():
        for number, target in enumerate(targets):
            state = STATES[(number + shift) % len(STATES)]
            is_backend = target not in ALL_PARTS and process_of(target) != SUPERVISOR
            if not (is_backend and state is ModelState.COLD):
                yield target, state
