"""What a drill writes down: requests, kills, findings. Times are CLOCK_MONOTONIC milliseconds.

Only data, shared by the parts that measure and by the verdict that judges. Every process of the
pod stamps its events with the same clock, so differences between their times mean something.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine import messages as engine_messages

SUPERVISOR = "supervisor"
# Not the active engine's: their deaths must change nothing for anybody else.
LOCKSERVER = "lockserver"
GMS = "gms"  # a device's server of the memory service
GMS_SUPERVISOR = "gms-supervisor"  # whose servers end with it
PARTS = (LOCKSERVER, GMS, GMS_SUPERVISOR)
PHASES = ("detect", "fence", "grant", "wake", "serve")  # DESIGN §8, in the order they happen

LOCK = "lock active"  # the part whose moments are those of the right to serve
GONE = "gone"  # the state of a part that cannot be reached
MOMENTS_MAX = 100_000  # a kill brings some ten; the oldest of several thousand kills are forgotten

# What is killed in an engine of one rank, by backend. vLLM's processes go by their plain names.
TARGETS = ("backend-http", "backend-model", SUPERVISOR)
VLLM_TARGETS = ("api", "core", "worker", SUPERVISOR)
BACKEND = "backend-"  # what engines call each process of a backend's, whichever it is
STOP = "stop:"  # of a process of an engine: SIGSTOP, so that it hangs and has to be found out


def check_target(text: str) -> str:
    """`text`, if it can be killed in a drill. Which ranks there are, the engine says.

    Raises:
        ValueError: with what it may be.
    """
    if text.startswith(STOP):
        process = check_target(text.removeprefix(STOP))
        if process in PARTS or process.startswith(STOP):
            raise ValueError(f"{STOP} is for processes of an engine, and {process} is none")
        return STOP + process
    if text in (*TARGETS, *PARTS) or re.fullmatch(r"backend-model-[1-9]\d?", text):
        return text
    plain = text.removeprefix(BACKEND)
    if re.fullmatch(r"api|core|worker(-[1-9]\d?)?", plain):
        return plain
    ranks = "backend-model-1, backend-model-2, … of a tensor-parallel engine"
    vllm = "api, core, worker, worker-1, … of vLLM"
    raise ValueError(
        f"it takes {', '.join(TARGETS)}, {ranks}, {vllm}, or {', '.join(PARTS)}; {STOP}NAME stops a"
        " process of an engine, as if it hung, where NAME kills it"
    )


def base_targets(backend: str | None) -> tuple[str, ...]:
    """What every engine with `backend` has, whatever its number of ranks."""
    return VLLM_TARGETS if backend == "vllm" else TARGETS


def targets_of(backend: str | None, processes: Iterable[str]) -> tuple[str, ...]:
    """What is killed in turn in an engine that has `processes`: all of them, rank after rank."""
    *base, last = base_targets(backend)
    ranks = sorted(
        (int(number), name.removeprefix(BACKEND))
        for name in processes
        for number in re.findall(r"-(\d+)$", name)
    )
    prefix = BACKEND if base[-1].startswith(BACKEND) else ""
    return (*base, *(f"{prefix}{name}" for _, name in ranks), last)


def asked_of_engine(target: str) -> engine_messages.KillMsg:
    """What an engine is asked for `target`."""
    process = target.removeprefix(STOP)
    if process != SUPERVISOR:
        process = BACKEND + process.removeprefix(BACKEND)
    return engine_messages.KillMsg(process, is_stop=target.startswith(STOP))


class End(StrEnum):
    """How one exchange ended, as the client's socket saw it."""

    DONE = "done"  # the stream's own end mark came
    CUT = "cut"  # accepted, then the connection ended before the end mark
    REFUSED = "refused"  # ECONNREFUSED
    GARBLED = "garbled"  # what came is no answer of an inference server
    HUNG = "hung"  # nothing came for so long that the client gave up


class Outcome(StrEnum):
    """What an exchange counts as."""

    OK = "ok"
    LOST = "lost_in_flight"
    REFUSED = "refused"
    WRONG = "wrong"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of the drill: where it goes and its body (greedy, streamed)."""

    key: str
    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Exchange:
    """One request and what came back.

    `first_turn` and `last_turn` number the turns of the client's event loop in which the first and
    the last text came. All clients share the loop, and what is readable in one turn is read in it:
    text in a later turn really came later, which no pair of timestamps taken by a busy process
    can promise.
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


@dataclass(slots=True)
class EngineKill:
    """One kill and the moments after it that were observed; None: nobody reported it.

    `deaths_ms`: when each process of the old engine was seen to have ended; None: it was not.
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
    deaths_ms: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moment:
    """`part`, an engine or `LOCK`, was heard to be in `state` from `at_ms` on."""

    at_ms: float
    part: str
    state: str
    note: str = ""


@dataclass(slots=True)
class MemoryKill:
    """The death of a device's memory server: what it had, and when the next one had it again."""

    device: str
    tag: str
    pid: int
    epoch: str
    readers: frozenset[str]
    killed_ms: float
    recovered_ms: float | None = None


@dataclass(slots=True)
class PartKill:
    """The death of a part that is no engine, and when another process did its work again."""

    target: str
    killed_ms: float
    back_ms: float | None = None


@dataclass(slots=True)
class Upgrade:
    """An upgrade of both engines: what they were to run, whether each does, and the switchover in
    the middle of it. `switchover_ms` is from the request to the grant, None until it was made."""

    setting: str
    engines: dict[str, bool] = field(default_factory=dict)
    source: str | None = None
    target: str | None = None
    old_token: int = 0
    new_token: int = 0
    switchover_ms: float | None = None


@dataclass(slots=True)
class MemoryUse:
    """Physical memory of the weights: what was committed, and the most that was ever seen."""

    committed_bytes: int
    device_bytes_min: int  # the smallest device's part: less than a second copy of anything
    peak_bytes: int = 0


@dataclass(slots=True)
class Records:
    """Everything one drill observed.

    `overlaps`: each a grant made over a living process; `disturbed`: each something that the death
    of a part changed. `memory` is there once such a server was killed, `upgrade` if that is what
    was drilled. `targets`: what every engine of this pod has, which is counted even where none was
    killed.
    """

    exchanges: list[Exchange] = field(default_factory=list)
    kills: list[EngineKill] = field(default_factory=list)
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=MOMENTS_MAX))
    expected: dict[str, Exchange] = field(default_factory=dict)
    overlaps: list[str] = field(default_factory=list)
    grants_checked: int = 0
    memory_kills: list[MemoryKill] = field(default_factory=list)
    part_kills: list[PartKill] = field(default_factory=list)
    memory: MemoryUse | None = None
    disturbed: list[str] = field(default_factory=list)
    upgrade: Upgrade | None = None
    targets: Sequence[str] = TARGETS
