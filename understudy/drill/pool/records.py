"""What a drill of a pool records, beside what every drill does. Only data.

A victim is named as in every drill; in a pool an engine's process may also be one of a model's
shadow (`shadow:backend-model`), and the memory service has servers of several kinds for each model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct, field

from pool.core.states import ModelState
from understudy.drill.records import (
    GATEWAY,
    GATEWAY_CHILD,
    GMS,
    GMS_SUPERVISOR,
    LOCKSERVER,
    PARTS,
    STOP,
    EngineKill,
    Records,
    check_target,
)

POOL = "pool"
GMS_KV = "gms-kv"  # the server of a model's KV memory; `gms` is that of its weights
GMS_COPY = "gms-copy"  # the server of the copy of a model's weights in host memory
GMS_KEEPER = "gms-keeper"  # the process that outlives that server with the copy
SHADOW = "shadow:"  # a process of the engine that does not stand for its model

ONLY_IN_POOL = (POOL, GMS_KV, GMS_COPY, GMS_KEEPER)
OF_MODEL = (GMS, GMS_KV, GMS_COPY, GMS_KEEPER)  # each model has its own
POOL_PARTS = (POOL, LOCKSERVER, GATEWAY_CHILD, GATEWAY, *OF_MODEL, GMS_SUPERVISOR)

# When to kill: as a model enters one of these states.
PHASES_OF_MODEL = (
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


def check_pool_target(text: str) -> str:
    """`text`, if it is a valid target in any drill. Only that of a pool may use all of them.

    Raises:
        ValueError: with the valid targets.
    """
    if text in ONLY_IN_POOL:
        return text
    if text.startswith(SHADOW):
        process = check_target(text.removeprefix(SHADOW))
        if process in PARTS:
            raise ValueError(f"{SHADOW} is for processes of an engine, and {process} is not one")
        return SHADOW + process
    try:
        return check_target(text)
    except ValueError as error:
        pool = f"with --pool also {', '.join(ONLY_IN_POOL)}, {SHADOW}PROCESS"
        raise ValueError(f"{error}; {pool}") from error


def is_only_in_pool(target: str) -> bool:
    return target in ONLY_IN_POOL or target.startswith(SHADOW)


def process_of(target: str) -> str:
    """The engine's process in a target: `backend-model` of `shadow:stop:backend-model`."""
    return re.sub(rf"^({SHADOW}|{STOP})+", "", target)


@dataclass(frozen=True, slots=True)
class PoolDrillPlan:
    """How many kills and switches, of which targets, under how much load."""

    kills: int = 20
    switches: int = 0
    targets: Sequence[str] = ()
    clients: int = 4
    burn: int = 0
    duration_s: float = 0.0

    def stretched_s(self, deadline_s: float) -> float:
        """A deadline on the busy machine: loops of the same priority leave the pod its share."""
        return deadline_s * (1 + self.burn)


class PoolMoment(Struct, frozen=True):
    """A model was in `state` from `at_ms` on, for this reason."""

    at_ms: float
    model: str
    state: str
    reason: str = ""


class PoolSwitch(Struct, frozen=True):
    """A model is awake for which somebody has waited, as the pool reports it."""

    at_ms: float
    model: str
    victims: Sequence[str]
    wait_ms: float
    drain_ms: float
    release_ms: float
    raise_ms: float

    @property
    def length_ms(self) -> float:
        """Without the time for which it had to wait until somebody could be asked."""
        return self.drain_ms + self.release_ms + self.raise_ms


class BoundSeen(Struct, frozen=True):
    """The bound on a wait for this model that the pool stated at `at_ms`; None: it has none."""

    at_ms: float
    model: str
    bound_ms: float | None


class PoolKill(Struct):
    """One kill, of `target`, as `model` entered `phase`; None: not observed.

    `engine` is set where an engine's process was killed, and `failover` has what the lock server
    said then. `back_ms`: when the victim worked again. `outcome`: one sentence.
    """

    target: str
    model: str
    phase: str
    killed_ms: float
    engine: str | None = None
    is_shadow: bool = False
    back_ms: float | None = None
    outcome: str = ""
    failover: EngineKill | None = None

    @property
    def took_ms(self) -> float | None:
        return None if self.back_ms is None else self.back_ms - self.killed_ms


class PoolDrillRecords(Struct):
    """Everything that a drill of a pool observed. `base`: what every drill observes.

    `models`: their engines, by model. `not_reached`: phases that no model entered in time.
    """

    base: Records = field(default_factory=Records)
    models: dict[str, tuple[str, ...]] = {}
    moments: list[PoolMoment] = []
    switches: list[PoolSwitch] = []
    bounds: list[BoundSeen] = []
    kills: list[PoolKill] = []
    not_reached: list[str] = []
    began_ms: float = 0.0
