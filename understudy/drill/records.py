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
GMS = "gms"  # a device's memory server
GMS_SUPERVISOR = "gms-supervisor"  # its servers die with it
GATEWAY = "gateway"  # its children die with it
GATEWAY_CHILD = "gateway-child"  # the one that has the clients' connections
GATEWAYS = (GATEWAY, GATEWAY_CHILD)  # streams in them are lost with them
PARTS = (LOCKSERVER, GMS, GMS_SUPERVISOR, *GATEWAYS)
PHASES = ("detect", "fence", "grant", "wake", "serve")  # in the order in which they happen

LOCK = "lock active"  # the part whose states are those of the lock
GONE = "gone"  # the state of an unreachable part
MOMENTS_MAX = 100_000  # some ten per kill; the oldest are dropped

# The targets in an engine of one rank, by backend; vLLM's have no prefix.
TARGETS = ("backend-http", "backend-model", SUPERVISOR)
VLLM_TARGETS = ("api", "core", "worker", SUPERVISOR)
BACKEND = "backend-"  # prefix of all backend processes in an engine's own names
STOP = "stop:"  # SIGSTOP to a process of an engine: a simulated hang


def check_target(text: str) -> str:
    """`text`, if it is a valid target. Whether the rank exists, the engine decides.

    Raises:
        ValueError: with the valid targets.
    """
    if text.startswith(STOP):
        process = check_target(text.removeprefix(STOP))
        if process in PARTS or process.startswith(STOP):
            raise ValueError(f"{STOP} is for processes of an engine, and {process} is not one")
        return STOP + process
    if text in (*TARGETS, *PARTS) or re.fullmatch(r"backend-model-[1-9]\d?", text):
        return text
    plain = text.removeprefix(BACKEND)
    if re.fullmatch(r"api|core|worker(-[1-9]\d?)?", plain):
        return plain
    ranks = "backend-model-1, backend-model-2, … of a tensor-parallel engine"
    vllm = "api, core, worker, worker-1, … of vLLM"
    raise ValueError(
        f"must be one of {', '.join(TARGETS)}, {ranks}, {vllm}, or {', '.join(PARTS)}; {STOP}NAME"
        " stops a process of an engine, to simulate a hang, instead of killing it"
    )


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


def asked_of_engine(target: str) -> engine_messages.KillMsg:
    """The request to an engine that kills `target`."""
    process = target.removeprefix(STOP)
    if process != SUPERVISOR:
        process = BACKEND + process.removeprefix(BACKEND)
    return engine_messages.KillMsg(process, is_stop=target.startswith(STOP))


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
    LOST_IN_GATEWAY = "lost_in_gateway"  # either, with the gateway's own process
    REFUSED = "refused"
    WRONG = "wrong"
    HUNG = "hung"


class Prompt(Struct, frozen=True):
    """One request of the drill: its path and body. The same engine always answers it the same."""

    key: str
    path: str
    body: dict[str, Any]


class Exchange(Struct):
    """One request and its answer.

    `first_turn` and `last_turn`: the iterations of the event loop that received the first and last
    text. All clients share the loop and read whatever is readable in each iteration, so text of a
    later iteration really came later; timestamps of a busy process cannot prove that.
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
    first_turn: int = 0
    last_turn: int = 0
    text: str = ""
    finish_reason: str | None = None
    chunks: int = 0
    detail: str = ""
    text_ms: list[float] = []
    piece_ends: list[int] = []
    tokens: int | None = None
    model: str = ""


class EngineKill(Struct):
    """One kill and the moments observed after it; None: not observed.

    `deaths_ms`: when each process of the old engine was seen to have exited. `kept_blocks` of KV
    memory were there for the next engine, as the old one had said last, and `adopted_blocks` are
    those that its cache began with; `kv_note`: why there are none. `lock`: the one that the engine
    may have held; `peers`: the engines that may be granted it next, () for all of the pod.
    """

    target: str
    engine: str
    old_token: int
    killed_ms: float
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
    kv_note: str = ""
    lock: str = "active"
    peers: tuple[str, ...] = ()


class Moment(Struct, frozen=True):
    """`part`, an engine or `LOCK`, was in `state` from `at_ms` on."""

    at_ms: float
    part: str
    state: str
    note: str = ""


class MemoryKill(Struct):
    """The kill of a device's memory server: what it had, and when its successor had it again."""

    device: str
    tag: str
    pid: int
    epoch: str
    readers: frozenset[str]
    killed_ms: float
    recovered_ms: float | None = None


class PartKill(Struct):
    """The kill of a part that is not an engine, when its processes were gone, and when it was
    back. `child`: the gateway's serving child, by the pid that the gateway knows."""

    target: str
    killed_ms: float
    back_ms: float | None = None
    gone_ms: float | None = None
    child: int | None = None


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
    the death of a part; `deaths`: of engines, rehearsed or not. `memory` is set once a memory
    server was killed, `upgrade` in an upgrade.
    `targets`: those of every engine of this pod, which are counted even if none was killed.
    `url`: the address outside the pod that clients used, if they did.
    `is_direct`: engines answered the clients themselves. Behind a gateway, a token says where an
    answer began, and text that follows it may be of any newer engine.
    """

    exchanges: list[Exchange] = []
    kills: list[EngineKill] = []
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=MOMENTS_MAX))
    expected: dict[str, Exchange] = {}
    overlaps: list[str] = []
    grants_checked: int = 0
    memory_kills: list[MemoryKill] = []
    part_kills: list[PartKill] = []
    memory: MemoryUse | None = None
    disturbed: list[str] = []
    upgrade: Upgrade | None = None
    deaths: list[EngineDeath] = []
    burn: BurnUse | None = None
    lasted_s: float = 0.0
    targets: Sequence[str] = TARGETS
    is_direct: bool = True
    url: str = ""
