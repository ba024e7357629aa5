"""The messages on the pool's socket, `pool.sock`: with the gateway, with leases, with operators.

`demand` and `doors` are level-triggered: each carries all that its sender has to say, is sent first
on every connection and again at every change, and may be repeated. Times are CLOCK_MONOTONIC, which
the processes of one machine share. Must not know what follows from a message: that is `pool/core`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from plumbing.pod.messages import EventMsg as EventMsg
from plumbing.pod.messages import StatusMsg as StatusMsg
from plumbing.pod.messages import StatusReplyMsg as StatusReplyMsg
from plumbing.pod.messages import Tier
from plumbing.pod.messages import WatchMsg as WatchMsg
from plumbing.wire.messages import Catalogue, Message, messages_in
from pool.core.events import DemandCame, Door, LeaseAsked, Ordered
from pool.core.states import (
    BYTES_MAX,
    MODELS_MAX,
    Count,
    HexId,
    Millis,
    ModelName,
    ModelState,
    PooledRules,
)

DEVICES_MAX = 64
# The status of a hundred models has 200 KiB; 512 tickets have 50.
FRAME_BYTES_MAX = 1024 * 1024

DeviceName = Annotated[str, Meta(min_length=1, max_length=64)]
PoolBytes = Annotated[int, Meta(ge=0, le=BYTES_MAX)]
Sentence = Annotated[str, Meta(max_length=4096)]


# ---------------------------------------------------------------- the gateway


class DemandMsg(Message, DemandCame, frozen=True, tag="demand"):
    """Gateway → pool."""


class PooledModel(Struct, frozen=True, forbid_unknown_fields=True):
    """One model: what the gateway may do with its requests (`SetModelDoor`), and what its users may
    know. `number` is that of the door; `since_ms`: of the state; `memory`: booked bytes by device.

    `door` None: the pool has just started, and does not know yet. What it said before counts.
    `rules` None: as in the gateway's own file.
    """

    number: Count
    door: Door | None
    state: ModelState
    since_ms: Millis = 0.0
    reason: Sentence = ""
    tier: Tier = Tier.COLD
    memory: Annotated[  # of each device, and of host memory
        dict[DeviceName, PoolBytes], Meta(max_length=DEVICES_MAX + 1)
    ] = field(default_factory=dict)
    rules: PooledRules | None = None


class DoorsMsg(Message, frozen=True, tag="doors"):
    """Pool → gateway: all models. One that is not named does not exist."""

    models: Annotated[dict[ModelName, PooledModel], Meta(max_length=MODELS_MAX)]


# ---------------------------------------------------------------- a lease → pool, and back


class LeaseMsg(Message, LeaseAsked, frozen=True, tag="lease"):
    """Book memory for a neighbour: first on its connection, and again after the pool has restarted.
    Every process of the neighbour holds a shared flock on the file `lease_<lease>` in the pod's
    directory, from before this is sent until it is dead. `program`: its name alone, because status
    and file are read by others than its user, and arguments hold secrets."""

    program: Annotated[str, Meta(max_length=256)] = ""


class LeaseGrantedMsg(Message, frozen=True, tag="lease_granted"):
    """The memory is booked until the witness is free. A refusal is an error instead."""

    lease: HexId


# ---------------------------------------------------------------- operators → pool, and back


class OrderMsg(Message, Ordered, frozen=True, tag="order"):
    """Answered by `ordered` at once: what follows takes its time."""


class SetMsg(Message, frozen=True, tag="set"):
    """Change a setting of a running pool: `value` as in the pool file; None: back to what the file
    says. `model` None: of the whole pool. Kept over restarts of the pool. Answered by `ordered`."""

    setting: Annotated[str, Meta(min_length=1, max_length=64)]
    value: Annotated[str, Meta(max_length=64)] | None
    model: ModelName | None = None


class OrderedMsg(Message, frozen=True, tag="ordered"):
    """The order was taken."""

    state: ModelState | None  # of the model, now
    sentence: str


CATALOGUE = Catalogue(*messages_in(globals()), frame_bytes_max=FRAME_BYTES_MAX)
