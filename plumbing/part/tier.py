"""How much of an engine is resident, and the two messages about it on its control socket.

`shall` and `am` are spoken on `engine_<id>.sock` by whoever decides when an engine rests: the
gateway's parent and the command line. Both are level-triggered: each says all that its sender has
to say, and may be repeated. Must not know what follows from a goal: that is `engine/core`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from plumbing.wire.messages import Catalogue, Message

INT64_MAX = 2**63 - 1

Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
ShortText = Annotated[str, Meta(max_length=96)]
Reason = Annotated[str, Meta(max_length=4096)]


class Tier(StrEnum):
    """What is resident, from least to most."""

    COLD = "cold"  # the supervisor alone
    OFFLOADED = "offloaded"  # all processes; the weights are in host memory
    WARM = "warm"  # the weights too, but no KV memory
    AWAKE = "awake"  # all, if the engine holds the lock


class ShallMsg(Message, frozen=True, tag="shall"):
    """Be at this tier, whenever the lock lets you; the last one counts, whoever sent it.

    Answered by `am` at once, and by another `am` on the same connection at every change. Without a
    goal the goal stays: the sender only looks on. `by`: who wants it, for status and events.
    """

    goal: Tier | None = None
    by: ShortText = ""


class AmMsg(Message, frozen=True, tag="am"):
    """What an engine is now. Sent when `state`, `tier`, `goal`, `can_rest` or `fault` changes.

    `goal_seen` counts the goals that this supervisor was given. The answer to `shall` has counted
    that one already, so what a smaller count says is from before it. `since_ms`: how long it has
    been in `state`. `can_rest`: whether it can rest and wake without a relaunch. `fault`: why it is
    not at its goal, in one sentence; "" while it is, or is on its way.
    """

    engine: ShortText
    incarnation: ShortText  # "" between two of them
    token: Count  # of its grant of `active`; 0: it has none
    state: ShortText  # of `engine.core.lifecycle`
    tier: Tier
    goal: Tier
    goal_by: ShortText
    goal_seen: Count
    since_ms: Count
    kv_bytes: Count
    in_flight: Count
    can_rest: bool
    fault: Reason = ""


CATALOGUE = Catalogue(ShallMsg, AmMsg)  # for those who ask nothing else of an engine
