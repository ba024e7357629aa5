"""The messages of those who only look: every service answers them alike, in every state.

An observer asks once (`status`) or stays (`watch`: a `status_reply`, then one `event` for each
record from there on, unasked). It never queues and never holds anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from understudy.wire.messages import Message


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


@dataclass(frozen=True, slots=True)
class EventRecord(Message):
    TYPE: ClassVar[str] = "event"
    record: dict[str, Any]
