"""The messages of those who only look: every service answers them alike, in every state.

An observer asks once (`status`) or stays (`watch`: a `status_reply`, with `since` the kept events
after that id, then one `event` for each record from there on, unasked). It never queues and never
holds anything.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from plumbing.wire.messages import Message

EVENT_ID_MAX = 2**63 - 1

# All events that a process keeps, each as long as the longest sentence makes it: they are sent in
# one go to whoever asks for them, and may wait for it to read.
KEPT_BYTES_MAX = 4 * 1024 * 1024


class StatusMsg(Message, frozen=True, tag="status"):
    """Ask for the status document, once."""


class StatusReplyMsg(Message, frozen=True, tag="status_reply"):
    document: dict[str, Any]


class WatchMsg(Message, frozen=True, tag="watch"):
    since: Annotated[int, Meta(ge=0, le=EVENT_ID_MAX)] | None = None


class EventMsg(Message, frozen=True, tag="event"):
    record: dict[str, Any]
