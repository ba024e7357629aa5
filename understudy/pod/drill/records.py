"""What a drill writes down: requests, kills, findings. Times are CLOCK_MONOTONIC milliseconds.

Only data, shared by the parts that measure and by the verdict that judges. Every process of the
pod stamps its events with the same clock, so differences between their times mean something.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

TARGETS = ("backend-http", "backend-model", "supervisor")
GMS = "gms"  # not the active engine's: a device's server of the memory service
PHASES = ("detect", "fence", "grant", "wake", "serve")  # DESIGN §8, in the order they happen


def check_target(text: str) -> str:
    """`text`, if it can be killed in a drill. Which ranks there are, the engine says.

    Raises:
        ValueError: with what it may be.
    """
    if text in (*TARGETS, GMS) or re.fullmatch(r"backend-model-[1-9]\d?", text):
        return text
    ranks = "backend-model-1, backend-model-2, … of a tensor-parallel engine"
    raise ValueError(f"it takes {', '.join(TARGETS)}, {ranks}, or {GMS}")


def targets_of(processes: Iterable[str]) -> tuple[str, ...]:
    """What is killed in turn in an engine that has `processes`: the three, and every other rank."""
    ranks = sorted(name for name in processes if re.fullmatch(r"model-\d+", name))
    http, model, supervisor = TARGETS
    return (http, model, *(f"backend-{name}" for name in ranks), supervisor)


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
class Kill:
    """One kill and the moments after it that were observed; None: nobody reported it."""

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
class MemoryUse:
    """Physical memory of the weights: what was committed, and the most that was ever seen."""

    committed_bytes: int
    device_bytes_min: int  # the smallest device's part: less than a second copy of anything
    peak_bytes: int = 0


@dataclass(slots=True)
class Records:
    """Everything one drill observed.

    `overlaps`: each a grant made over a living process; `disturbed`: each something that the death
    of a memory server changed. `memory` is there once such a server was killed.
    """

    exchanges: list[Exchange] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    expected: dict[str, Exchange] = field(default_factory=dict)
    overlaps: list[str] = field(default_factory=list)
    grants_checked: int = 0
    memory_kills: list[MemoryKill] = field(default_factory=list)
    memory: MemoryUse | None = None
    disturbed: list[str] = field(default_factory=list)
