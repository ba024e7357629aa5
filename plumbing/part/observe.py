"""The messages of those who only look: every service answers them alike, in every state.

An observer asks once (`status`) or stays (`watch`: a `status_reply`, with `since` the kept events
after that id, then one `event` for each record from there on, unasked). It never queues and never
holds anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from plumbing.wire.messages import Message, Range

EVENT_ID_MAX = 2**63 - 1

# All events that a process keeps, each as long as the longest sentence makes it: they are sent in
# one go to whoever asks for them, and may wait for it to read.
KEPT_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Status(Message):
    TYPE: ClassVar[str] = "status"


@dataclass(frozen=True, slots=True)
class StatusReply(Message):
    TYPE: ClassVar[str] = "status_reply"
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Watch(Message):
    TYPE: ClassVar[str] = "watch"
    since: Annotated[int, Range(0, EVENT_ID_MAX)] | None = None


@dataclass(frozen=True, slots=True)
class EventRecord(Message):
    TYPE: ClassVar[str] = "event"
    record: dict[str, Any]
