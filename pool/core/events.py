"""The pool's events and effects: plain values, no behaviour.

The shell hands in events with `Pool.handle` and performs effects in order. What other processes say
is level-triggered: `DemandCame`, `EngineSaid` and `MemoryIs` carry the sender's whole truth of now,
may be repeated, and may come late. Effects are goals of the same kind: the shell says them again on
every new connection, without asking the core.

The proofs come from the kernel: a witness that no process holds (`EngineDead`), and memory that the
memory service has given back to the device (`MemoryIs`). Nothing is booked out on anybody's word.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from plumbing.pod.messages import EngineReportMsg, Tier
from pool.core.states import (
    BYTES_MAX,
    MODELS_MAX,
    TICKETS_MAX,
    Count,
    EntryKind,
    GoalGeneration,
    HexId,
    Millis,
    ModelName,
    ModelRules,
    ModelState,
    PoolRules,
    Priority,
)


class TicketKind(StrEnum):
    """Why a request waits."""

    NEW = "new"
    AGAIN = "again"  # it was sent, nothing came back, and its model had to yield; only once
    PARKED = "parked"  # its stream has begun


class Order(StrEnum):
    """What an operator asks of a model."""

    LOAD = "load"  # raise it, as if a request had come
    SLEEP = "sleep"  # to its resting tier, once no request needs it
    UNLOAD = "unload"  # to cold
    PIN = "pin"
    UNPIN = "unpin"
    RESET = "reset"  # of a model that has failed


# -------------------------------------------------------------------------------------- events


class PoolEvent(Struct, frozen=True):
    """What has happened, for `Pool.handle`."""


class Ticket(Struct, frozen=True, forbid_unknown_fields=True):
    """A request that waits in a gateway, or a stream that is parked there. `since_ms`: on the
    pool's clock, from when its wait counts; for `AGAIN` and `PARKED` that is the drain."""

    id: Count  # unique within its gateway, growing in the order of arrival
    since_ms: Millis
    priority: Priority = 0  # lower is sooner
    kind: TicketKind = TicketKind.NEW


class ModelDemand(Struct, frozen=True, forbid_unknown_fields=True):
    """What one gateway has for one model. `door`: the number of the last `SetModelDoor` that all
    its children obey. `keep_alive_ms`: the longest that recent requests have asked for; None: the
    model's own; inf: for ever."""

    tickets: Annotated[tuple[Ticket, ...], Meta(max_length=TICKETS_MAX)] = ()
    in_flight: Count = 0  # requests that an engine has
    cannot_park: Count = 0  # of these: neither continuable nor to be sent again
    last_request_ms: Millis | None = None  # on the pool's clock
    keep_alive_ms: Millis | None = None
    door: Count = 0
    resuming: Count = 0  # of those in flight: parked streams, until they have their next token


class DemandCame(PoolEvent, frozen=True):
    """All that a gateway has: a model that is not named has nothing. Where a model has more tickets
    than one message may carry, those are left out that would be last in the order of the policy.

    `gateway`: this process; a restarted gateway is another one, and what the old one had is gone.
    """

    gateway: HexId
    models: Annotated[Mapping[ModelName, ModelDemand], Meta(max_length=MODELS_MAX)] = field(
        default_factory=dict
    )


class GatewayGone(PoolEvent, frozen=True):
    """It is not connected; its requests are, as far as anybody knows, where they were. `is_dead`:
    its process has ended, and so have its requests. `is_watched`: that will be told."""

    gateway: str
    is_dead: bool = False
    is_watched: bool = False


class EngineSaid(PoolEvent, frozen=True):
    """An engine of ours is as it reports. What it says of its tier under an older goal than our
    newest counts for nothing."""

    report: EngineReportMsg


class EngineLost(PoolEvent, frozen=True):
    """Its supervisor cannot be heard. That proves nothing about memory."""

    engine: str


class EngineDead(PoolEvent, frozen=True):
    """The witness of this incarnation is free: all its processes are dead. With `asked`, the answer
    to `AskWitness`: so is every witness that this engine has left; the incarnation is ""."""

    engine: str
    incarnation: str
    asked: int = 0


class MemoryIs(PoolEvent, frozen=True):
    """One device: its size, what the memory service holds of it by model, and what is used outside
    the pool. What is not named is free.

    It may be older than what an engine has taken since, so free memory is proven only by what was
    looked at after a question: `asked` has, by model, the number of the newest `AskMemory` that
    this answers, or that an earlier one of this device has answered."""

    device: str
    total_bytes: int
    held: Mapping[tuple[EntryKind, str], int]
    asked: Mapping[str, int] = {}
    outside_bytes: int = 0


class Ordered(PoolEvent, frozen=True):
    """An operator asks this of a model."""

    model: ModelName
    order: Order
    is_forced: bool = False  # unload a pinned model


class LeaseAsked(PoolEvent, frozen=True):
    """A neighbour waits for memory, with a witness that lives as long as it does."""

    lease: HexId
    device: Annotated[str, Meta(min_length=1, max_length=64)]
    bytes: Annotated[int, Meta(ge=1, le=BYTES_MAX)]
    since_ms: Millis
    priority: Priority = 0


class LeaseOver(PoolEvent, frozen=True):
    """Its processes are dead, or it has given the memory back, or it waits no more."""

    lease: str


class RulesChanged(PoolEvent, frozen=True):
    """An operator has changed a setting of a running pool. `model` "": `rules` are the pool's."""

    model: str
    rules: ModelRules | PoolRules


class PoolTick(PoolEvent, frozen=True):
    """Time has passed: not later than `Pool.due_ms`."""


# -------------------------------------------------------------------------------------- effects


class PoolEffect(Struct, frozen=True):
    """What the shell does, in the order given."""


class SaveState(PoolEffect, frozen=True):
    """Write the snapshot before the effects that follow; an order must survive a power cut, too."""

    is_order: bool = False


class Running(StrEnum):
    """What becomes of the requests that a model has while its door is shut."""

    FINISH = "finish"
    PARK = "park"  # those that cannot be parked or sent again still finish
    CUT = "cut"  # the last resort: a marked error for those


class OpenDoor(Struct, frozen=True, tag="open"):
    """Send requests to this engine; a newer grant replaces it without asking anybody."""

    engine: str
    token: int


class ShutDoor(Struct, frozen=True, tag="shut"):
    """Requests wait as tickets. `expected_ms`: until the model is awake, as far as is known."""

    running: Running
    expected_ms: float | None
    reason: str


class RefusedDoor(Struct, frozen=True, tag="refused"):
    """Requests are answered with this error, those that wait too."""

    code: str
    sentence: str
    retry_after_s: int | None


Door = OpenDoor | ShutDoor | RefusedDoor


def binds_alike(one: Door | None, other: Door | None) -> bool:
    """Whether gateways do the same behind both: reasons and times are only told."""
    if isinstance(one, ShutDoor) and isinstance(other, ShutDoor):
        return one.running is other.running
    return one == other


class SetModelDoor(PoolEffect, frozen=True):
    """To every gateway. `number` grows whenever any door no longer binds them as it did."""

    model: str
    number: int
    door: Door | None  # None: nothing was told yet


class TellEngine(PoolEffect, frozen=True):
    """`plumbing.pod.messages.SetGoalMsg`. `kill`, with the goal `cold`: why its supervisor kills
    its processes at once, which have not reached their goal within the budget."""

    engine: str
    goal: Tier
    generation: GoalGeneration
    kill: str = ""


class PoolQuestion(PoolEffect, frozen=True):
    """What a restarted pool asks anew, so that nothing of it is on file."""


class AskMemory(PoolQuestion, frozen=True):
    """Look at what the memory service holds of these kinds for this model, on each of its devices
    and on `HOST`, and answer with `MemoryIs`. With KV memory no engine is to wake, so the memory
    service may free it, which it refuses while a process maps it. `frees_weights`: no engine of it
    runs, so its weights too, and their copy."""

    model: str
    number: int
    kinds: frozenset[EntryKind]
    frees_weights: bool = False


class AskWitness(PoolQuestion, frozen=True):
    """Its supervisor obeys a goal of cold. Answer with `EngineDead` once no process of any of its
    incarnations is alive, however long that takes."""

    engine: str
    number: int


class GrantLease(PoolEffect, frozen=True):
    lease: str


class RefuseLease(PoolEffect, frozen=True):
    lease: str
    why: str


class PoolRecord(PoolEffect, frozen=True):
    """For metrics and the event log; nothing to do."""


class ModelChanged(PoolRecord, frozen=True):
    model: str
    old: ModelState
    new: ModelState
    reason: str


class Switched(PoolRecord, frozen=True):
    """A model is awake for which a request, or an operator, has waited. Times in ms; 0: there was
    no such phase."""

    model: str
    victims: tuple[str, ...]
    wait_ms: float  # of the oldest ticket, in all
    drain_ms: float
    release_ms: float
    raise_ms: float


class Alarm(PoolRecord, frozen=True):
    """Memory does not come back: something that an operator should look at."""

    model: str
    sentence: str
