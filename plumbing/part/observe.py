"""The messages of observers: every part answers them alike, in every state.

An observer asks once (`status`) or stays (`watch`: a `status_reply`, with `since` the kept events
after that id, then one unsolicited `event` for each new record). It never queues and never holds
anything.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from plumbing.wire.messages import Message

EVENT_ID_MAX = 2**63 - 1


class StatusMsg(Message, frozen=True, tag="status"):
    """Ask for the status document, once."""


class StatusReplyMsg(Message, frozen=True, tag="status_reply"):
    document: dict[str, Any]


class WatchMsg(Message, frozen=True, tag="watch"):
    since: Annotated[int, Meta(ge=0, le=EVENT_ID_MAX)] | None = None


class EventMsg(Message, frozen=True, tag="event"):
    record: dict[str, Any]
