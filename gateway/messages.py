"""The messages on a gateway's control socket, `gateway.sock`, for users and for a drill."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from plumbing.pod.messages import EventMsg as EventMsg
from plumbing.pod.messages import StatusMsg as StatusMsg
from plumbing.pod.messages import StatusReplyMsg as StatusReplyMsg
from plumbing.pod.messages import WatchMsg as WatchMsg
from plumbing.wire.messages import Catalogue, Message

INT64_MAX = 2**63 - 1
Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
ModelName = Annotated[str, Meta(max_length=64)]


class ExpectDeathMsg(Message, frozen=True, tag="expect_death"):
    """The sender is about to end the engine that holds this token: no request is suspected
    for its death. Repeated as the answer."""

    engine: Name
    token: Count
    model: ModelName = ""


class ReplaceMsg(Message, frozen=True, tag="replace"):
    """Have the init start a successor, which reads the files anew and takes this socket over. The
    gateway answers `replacing` once it has signalled its init, or refuses with an error."""


class ReplacingMsg(Message, frozen=True, tag="replacing"):
    pid: Count  # the gateway that is replaced, and finishes its requests
    in_flight: Count  # how many these are


class LeaveFleetMsg(Message, frozen=True, tag="leave_fleet"):
    """The pod leaves its fleet within this time, so fronts move their streams to other pods. Sent
    again, the earliest end counts. The answer is `leaving_fleet`."""

    within_ms: Count


class LeavingFleetMsg(Message, frozen=True, tag="leaving_fleet"):
    left_ms: Count
    in_flight: Count  # requests that the pod still has


CONTROL = Catalogue(
    *(StatusMsg, StatusReplyMsg, WatchMsg, EventMsg, ReplaceMsg, ReplacingMsg),
    *(ExpectDeathMsg, LeaveFleetMsg, LeavingFleetMsg),
)
