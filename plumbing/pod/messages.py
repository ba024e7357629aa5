"""Messages that several parts of a pod send: an engine's goal and report, and those of observers.

`SetGoalMsg` and `EngineReportMsg` (`shall` and `am` on the wire) travel on `engine_<id>.sock`. The
pool sends goals; without a pool the gateway and the command line do. Both messages are
level-triggered: each carries all that its sender has to say, and may be repeated. `pool` is only of
a pool. `engine/core` decides what follows from a goal.

Every part answers observers alike, in every state. An observer asks once (`status`) or stays
(`watch`: a `status_reply`, with `since` the kept events after that id, then one unsolicited `event`
for each new record). It never queues and never holds anything.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from plumbing.pod.models import NAME_CHARS_MAX
from plumbing.wire.messages import Catalogue, Message

INT64_MAX = 2**63 - 1

Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
ShortText = Annotated[str, Meta(max_length=96)]
Reason = Annotated[str, Meta(max_length=4096)]
ModelName = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
DeviceName = Annotated[str, Meta(min_length=1, max_length=64)]
DEVICES_MAX = 64  # of one engine
DeviceBytes = Annotated[dict[DeviceName, Count], Meta(max_length=DEVICES_MAX)]


class Tier(StrEnum):
    """What is resident, from least to most."""

    COLD = "cold"  # the supervisor alone
    OFFLOADED = "offloaded"  # all processes; the weights are in host memory
    WARM = "warm"  # the weights too, but no KV memory
    AWAKE = "awake"  # all, if the engine holds the lock


class GoalGeneration(Struct, frozen=True, forbid_unknown_fields=True):
    """Which of two goals is the newer one. `era` is the pool's state file, `start` counts the
    starts of the pool with it, `number` the goals since then."""

    era: Annotated[str, Meta(min_length=1, max_length=32)]
    start: Count
    number: Count

    def is_older(self, other: GoalGeneration) -> bool:
        """Of another era is none older: there the later message counts."""
        mine, theirs = (self.start, self.number), (other.start, other.number)
        return self.era == other.era and mine < theirs


class PoolGoal(Struct, frozen=True, forbid_unknown_fields=True):
    """What a pool says with a goal. A goal that is not newer than the last one of its era is
    dropped; another era replaces what is remembered. `is_kill`, with the goal `cold`: kill all
    processes now, whatever they are doing."""

    model: ModelName
    generation: GoalGeneration
    is_kill: bool = False


class SetGoalMsg(Message, frozen=True, tag="shall"):
    """Be at this tier, whenever the lock lets you; the last one counts, from any sender.

    Answered by `am` at once, and by another `am` on the same connection at every change. Without a
    goal the goal stays: the sender only looks on. `by`: who wants it, for status and events.
    """

    goal: Tier | None = None
    by: ShortText = ""
    pool: PoolGoal | None = None


class EngineReportMsg(Message, frozen=True, tag="am"):
    """What an engine is now. Sent when anything but its counts and times changes.

    `since_ms`: how long it has been in `state`. `can_rest`: whether it can rest and wake without a
    relaunch. `fault`: why it is not at its goal, in one sentence; "" while it is, or is on its way.

    For a pool: `generation`: of the newest goal of a pool that it obeys. Bytes are by device;
    empty: not known yet. `base_bytes`: what its processes take beside weights and KV memory.
    `weights_bytes` are shared with the model's other engines. `kv_bytes`: what it needs awake.
    `can_resume`: whether it can go on with a stream that another engine, or itself before a rest,
    has begun. `is_permanent`: of its fault, which another try would not change. `is_leaving`: it
    was told to stop, so its end is no fault of the model. `is_machine`: its last end was a fault of
    the machine, a disk that is full or fails, and it is tried again each second.
    """

    engine: ShortText
    incarnation: ShortText  # "" between two of them
    token: Count  # of its grant of `active`; 0: it has none
    state: ShortText  # of `engine.core.lifecycle`
    tier: Tier
    goal: Tier
    goal_by: ShortText
    since_ms: Count
    in_flight: Count
    can_rest: bool
    fault: Reason = ""
    model: ModelName = ""  # of a pool; "": it has none
    generation: GoalGeneration | None = None
    base_bytes: DeviceBytes = field(default_factory=dict)
    weights_bytes: DeviceBytes = field(default_factory=dict)
    kv_bytes: DeviceBytes = field(default_factory=dict)
    can_resume: bool = False
    is_permanent: bool = False
    is_leaving: bool = False
    is_machine: bool = False


GOAL_CATALOGUE = Catalogue(
    SetGoalMsg, EngineReportMsg
)  # for those who ask nothing else of an engine

EVENT_ID_MAX = 2**63 - 1


class StatusMsg(Message, frozen=True, tag="status"):
    """Ask for the status document, once."""


class StatusReplyMsg(Message, frozen=True, tag="status_reply"):
    document: dict[str, Any]


class WatchMsg(Message, frozen=True, tag="watch"):
    since: Annotated[int, Meta(ge=0, le=EVENT_ID_MAX)] | None = None


class EventMsg(Message, frozen=True, tag="event"):
    record: dict[str, Any]
