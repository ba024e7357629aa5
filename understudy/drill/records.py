"""What a drill records: requests, kills, findings. Times are CLOCK_MONOTONIC milliseconds.

Only data, shared by the modules that measure and the verdict. All processes of the pod use the same
clock, so their times can be compared.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from engine import messages as engine_messages

SUPERVISOR = "supervisor"
# Parts that are not engines: their deaths must not affect anything else.
LOCKSERVER = "lockserver"
GMS = "gms"  # a device's memory server; in a pool, that of a model's weights
GMS_SUPERVISOR = "gms-supervisor"  # its servers die with it
GATEWAY = "gateway"  # requests in it are lost with it
PARTS = (LOCKSERVER, GMS, GMS_SUPERVISOR, GATEWAY)

# Parts of a pool only.
POOL = "pool"
GMS_KV = "gms-kv"  # the server of a model's KV memory
GMS_COPY = "gms-copy"  # the server of the copy of a model's weights in host memory
GMS_KEEPER = "gms-keeper"  # the process that outlives that server with the copy
POOL_ONLY = (POOL, GMS_KV, GMS_COPY, GMS_KEEPER)
OF_MODEL = (GMS, GMS_KV, GMS_COPY, GMS_KEEPER)  # in a pool, each model has its own
ALL_PARTS = (*PARTS, *POOL_ONLY)

PHASES = ("detect", "fence", "grant", "wake", "serve")  # of a failover, in order

LOCK = "lock active"  # the part whose states are those of the lock
MODEL = "model "  # prefix of a model as a part: an engine may have the same name
GONE = "gone"  # the state of an unreachable part
MOMENTS_MAX = 100_000  # some ten per kill; the oldest are dropped

# The targets in an engine of one rank, by backend; vLLM's have no prefix.
TARGETS = ("backend-model", SUPERVISOR)
OLD_TARGETS = {"backend-http": "backend-model"}  # until November 2026 a process of its own
VLLM_TARGETS = ("api", "core", "worker", SUPERVISOR)
BACKEND = "backend-"  # prefix of all backend processes in an engine's own names
STOP = "stop:"  # SIGSTOP to a process of an engine: a simulated hang
SHADOW = "shadow:"  # in a pool: a process of the engine that does not hold its model's lock


def check_target(text: str) -> str:
    """`text`, if it is a valid target. The engine decides whether the rank exists.

    Raises:
        ValueError: with the valid targets.
    """
    for prefix in (SHADOW, STOP):
        if text.startswith(prefix):
            process = check_target(text.removeprefix(prefix))
            if process in ALL_PARTS or process.startswith((prefix, SHADOW)):
                raise ValueError(f"{prefix} is for processes of an engine: {process} is not one")
            return prefix + process
    if text in OLD_TARGETS:
        return OLD_TARGETS[text]
    if text in (*TARGETS, *ALL_PARTS) or re.fullmatch(r"backend-model-[1-9]\d?", text):
        return text
    plain = text.removeprefix(BACKEND)
    if re.fullmatch(r"api|core|worker(-[1-9]\d?)?", plain):
        return plain
    ranks = "backend-model-1, backend-model-2, … of a tensor-parallel engine"
    vllm = "api, core, worker, worker-1, … of vLLM"
    raise ValueError(
        f"must be one of {', '.join(TARGETS)}, {ranks}, {vllm}, or {', '.join(PARTS)}; {STOP}NAME"
        " stops a process of an engine, to simulate a hang, instead of killing it; with --pool"
        f" also {', '.join(POOL_ONLY)}, {SHADOW}PROCESS"
    )


def is_only_in_pool(target: str) -> bool:
    return target in POOL_ONLY or target.startswith(SHADOW)


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


class End(StrEnum):
    """How one exchange ended, as the client's socket saw it."""

    DONE = "done"  # complete, with the stream's end marker
    CUT = "cut"  # accepted, then closed before the end marker
    REFUSED = "refused"  # ECONNREFUSED
    GARBLED = "garbled"  # not a valid answer
    HUNG = "hung"  # silent until the client gave up


class Outcome(StrEnum):
    """How an exchange is counted."""

    OK = "ok"
    LOST = "lost_in_flight"  # without an answer
    BROKEN = "broken"  # a stream that began, and ended without its end marker or with an error
    LOST_IN_GATEWAY = "lost_in_gateway"  # either, with the gateway
    REFUSED = "refused"
    WRONG = "wrong"
    HUNG = "hung"


class Prompt(Struct, frozen=True):
    """One request of the drill: its path and body. Every engine must answer it the same."""

    key: str
    path: str
    body: dict[str, Any]


class Exchange(Struct):
    """One request and its answer.

    `text_ms`: when each piece of the text came; `piece_ends`: how long the text was after it.
    `tokens`: of the answer, as its usage says. `model`: as the request named it.
    """

    prompt: str
    sent_ms: float
    end: End = End.HUNG
    ended_ms: float = 0.0
    status: int = 0
    engine: str | None = None
    token: int | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    text: str = ""
    finish_reason: str | None = None
    chunks: int = 0
    detail: str = ""
    text_ms: list[float] = []
    piece_ends: list[int] = []
    tokens: int | None = None
    model: str = ""


class Kill(Struct):
    """One kill and the moments observed after it; None: not observed.

    `engine`: whose process was killed; None: a part that is not an engine, then of `device` if it
    is a memory server. `gone_ms`: when all processes of a part had exited; `back_ms`: when the
    victim worked again. `deaths_ms`: when each process of the old engine was seen to have exited.
    `kept_blocks` of KV memory were there for the next engine by the old one's last status, and
    `adopted_blocks` are those that its cache began with. `lock`: the one that the engine may have
    held; `peers`: the engines that may be granted it next, () for all.
    In a pool: the kill was made as `model` entered `phase`, and `result` is how it ended.
    """

    target: str
    engine: str | None = None
    old_token: int = 0
    killed_ms: float = 0.0
    detected_ms: float | None = None
    fenced_ms: float | None = None
    granted_ms: float | None = None
    active_ms: float | None = None
    new_token: int | None = None
    new_engine: str | None = None
    deaths_ms: dict[str, float | None] = {}
    incarnation: str | None = None
    kept_blocks: int = 0
    adopted_blocks: int | None = None
    lock: str = "active"
    peers: tuple[str, ...] = ()
    device: str = ""
    gone_ms: float | None = None
    back_ms: float | None = None
    model: str = ""
    phase: str = ""
    result: str = ""

    @property
    def took_ms(self) -> float | None:
        return None if self.back_ms is None else self.back_ms - self.killed_ms

    @property
    def victim(self) -> str:
        """The engine, the device's server or the part."""
        return self.engine or (f"{self.target} of {self.device}" if self.device else self.target)


class Moment(Struct, frozen=True):
    """From `at_ms` on, `part` was in `state`: an engine, `LOCK`, or `MODEL` and a model's name."""

    at_ms: float
    part: str
    state: str
    note: str = ""


class Switch(Struct, frozen=True):
    """A model is awake for which a request has waited. `length_ms`: of draining, releasing and
    raising, without the wait until the switch could begin."""

    at_ms: float
    model: str
    length_ms: float


class StatedBound(Struct, frozen=True):
    """The bound on a wait for this model that the pool stated at `at_ms`; None: it has none."""

    at_ms: float
    model: str
    bound_ms: float | None


class Upgrade(Struct):
    """An upgrade of both engines: the new setting, whether each has it, and the switchover between
    them. `switchover_ms`: from the request to the grant."""

    setting: str
    engines: dict[str, bool] = {}
    source: str | None = None
    target: str | None = None
    old_token: int = 0
    new_token: int = 0
    switchover_ms: float | None = None


class EngineDeath(Struct, frozen=True):
    """The end of an engine's launch `incarnation`, whoever caused it. `cause`: as in its events."""

    engine: str
    incarnation: str
    cause: str
    message: str


class BurnUse(Struct):
    """Busy loops beside the pod. `ended`: how many ended before they were stopped."""

    per_core: int
    cpus: int
    processes: int = 0
    cpu_s: float = 0.0
    ended: int = 0


class MemoryUse(Struct):
    """Physical memory of the weights: committed bytes and observed peak."""

    committed_bytes: int
    device_bytes_min: int  # of the smallest device: any second copy has at least as much
    peak_bytes: int = 0


class Records(Struct):
    """Everything one drill observed.

    `overlaps`: grants while a process of the old engine was alive; `disturbed`: changes caused by
    the death of a part; `deaths`: of engines, rehearsed or not. `memory` is set if a memory server
    is to be killed, `upgrade` in an upgrade.
    `targets`: those of every engine of this pod, which are counted even if none was killed.
    `url`: the address outside the pod that clients used, if they did.
    The token of an exchange says where the answer began: text that follows may be of any newer
    engine.
    In a pool: `models` with their engines, and `not_reached`: the kills for which no model entered
    the phase in time.
    """

    exchanges: list[Exchange] = []
    kills: list[Kill] = []
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=MOMENTS_MAX))
    expected: dict[str, Exchange] = {}
    overlaps: list[str] = []
    grants_checked: int = 0
    memory: MemoryUse | None = None
    disturbed: list[str] = []
    upgrade: Upgrade | None = None
    deaths: list[EngineDeath] = []
    burn: BurnUse | None = None
    began_ms: float = 0.0
    lasted_s: float = 0.0
    targets: Sequence[str] = TARGETS
    url: str = ""
    models: dict[str, tuple[str, ...]] = {}
    switches: list[Switch] = []
    bounds: list[StatedBound] = []
    not_reached: list[str] = []

    @property
    def mode(self) -> str:
        return "pool" if self.models else "gateway"

    @property
    def engine_kills(self) -> list[Kill]:
        return [kill for kill in self.kills if kill.engine is not None]
