"""What a drill records: requests, kills, findings. Times are CLOCK_MONOTONIC milliseconds.

Only data, shared by the modules that measure and the verdict. All processes of the pod use the same
clock, so their times can be compared.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct

PHASES = ("detect", "fence", "grant", "wake", "serve")  # of a failover, in order


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

    Of a stream, `text_ms`: when each piece of its text came; `piece_ends`: how long it was then.
    `tokens`: of the answer, as its usage says. `model`: as the request named it. `pod`: of a
    fleet, that in which the answer began.
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
    pod: str = ""


class Kill(Struct):
    """One kill and the moments observed after it; None: not observed.

    `engine`: whose process was killed; None: a part that is not an engine, then of `device` if it
    is a memory server. `gone_ms`: when all processes of a part had exited; `back_ms`: when the
    victim worked again. `kept_blocks` of KV memory were there for the next engine by the old one's
    last status, and `adopted_blocks` are those that its cache began with. `peers`: the engines that
    may be granted its lock next, () for all. `holder`: the incarnation that had that lock, None if
    it was the victim: only then nothing of it may be alive at the next grant.
    In a pool: the kill was made as `model` entered `phase`, and `result` is how it ended. In a
    fleet: `pod` was hit, of which the front had this many `streams`.
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
    incarnation: str | None = None
    kept_blocks: int = 0
    adopted_blocks: int | None = None
    peers: tuple[str, ...] = ()
    holder: str | None = None
    device: str = ""
    gone_ms: float | None = None
    back_ms: float | None = None
    model: str = ""
    phase: str = ""
    result: str = ""
    pod: str = ""
    streams: int = 0

    @property
    def took_ms(self) -> float | None:
        return None if self.back_ms is None else self.back_ms - self.killed_ms

    @property
    def victim(self) -> str:
        """The engine, the device's server, the pod's part or the part."""
        place = self.device or self.pod
        return self.engine or (f"{self.target} of {place}" if place else self.target)

    @property
    def name(self) -> str:
        """Of what was killed: `core of engine-0 of pod-1`, `gms of HOST-0`, `pool`."""
        if self.engine is None:
            return self.victim
        return f"{self.target} of {self.engine}" + (f" of {self.pod}" if self.pod else "")


class Moment(Struct, frozen=True):
    """From `at_ms` on, `part` was in `state`: a model, a fleet's pod, or its front."""

    at_ms: float
    part: str
    state: str


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


class EngineDeath(Struct, frozen=True):
    """The end of an engine's launch `incarnation`, for any reason. `cause`: as in its events,
    or the code of the fault that its backend reported."""

    engine: str
    incarnation: str
    cause: str
    message: str


class Records(Struct):
    """Everything one drill observed.

    `overlaps`: grants while a process of the old engine was alive; `deaths`: of engines, rehearsed
    or not.
    `url`: the address outside the pod that clients used, if they did.
    The token of an exchange says where the answer began: text that follows may be of any newer
    engine.
    In a pool: `models` with their engines, and `not_reached`: the kills for which no model entered
    the phase in time. In a fleet: the names of its `pods`.
    """

    exchanges: list[Exchange] = []
    kills: list[Kill] = []
    moments: list[Moment] = []
    expected: dict[str, Exchange] = {}
    overlaps: list[str] = []
    grants_checked: int = 0
    deaths: list[EngineDeath] = []
    began_ms: float = 0.0
    lasted_s: float = 0.0
    url: str = ""
    models: dict[str, tuple[str, ...]] = {}
    switches: list[Switch] = []
    bounds: list[StatedBound] = []
    not_reached: list[str] = []
    pods: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        return "fleet" if self.pods else "pool" if self.models else "gateway"

    @property
    def engine_kills(self) -> list[Kill]:
        """Those after which another engine of the same pod takes over."""
        return [kill for kill in self.kills if kill.engine is not None and not kill.pod]
