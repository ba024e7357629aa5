"""`understudy events`: the events of every part of a pod, those kept so far or those to come.

A part that exits or returns is reported once each, and following continues. One that returns says
again what it has kept: what is older than the last record, on the machine's one clock, is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plumbing.pod.messages import EventMsg, StatusReplyMsg, WatchMsg
from plumbing.pod.observers import ASK_TIMEOUT_S, PeerWatch
from plumbing.service.clock import Clock, SystemClock, rfc3339
from plumbing.wire.messages import Message
from understudy.status.gather import pod_parts, unreachable

RESCAN_S = 1.0  # for parts that were not there: operators start them by hand

Record = dict[str, Any]
OnRecord = Callable[[Record], None]


class FollowedPart:
    """One part that is followed: each of its records from `since_ms` on once, and once each that it
    exits or returns."""

    def __init__(self, name: str, on_record: OnRecord, clock: Clock, since_ms: float) -> None:
        self.name = name
        self._on_record, self._clock = on_record, clock
        self._is_here: bool | None = None  # None: not tried yet
        self._last = since_ms, 0  # when the last record was made, and its id

    def received(self, message: Message) -> None:
        if isinstance(message, EventMsg):
            made = message.record["mono_ms"], message.record["id"]
            if made > self._last:
                self._last = made
                self._on_record(message.record)
            return
        if self._is_here is False:
            self._report("pod.back", "info", f"{self.name} is back")
        self._is_here = True

    def lost(self) -> None:
        if self._is_here is not False:
            self._is_here = False
            gone = f"{self.name} is gone; following resumes when it is back"
            self._report("pod.gone", "warning", gone)

    def _report(self, kind: str, severity: str, message: str) -> None:
        about = {"type": kind, "severity": severity, "source": self.name, "message": message}
        times = {"ts": rfc3339(self._clock.wall()), "mono_ms": self._clock.now_ms()}
        self._on_record({"id": None, **times, **about, "data": {}})  # no part has recorded it


class _KeptEvents:
    """The events that one part keeps; complete once the newest in its status has arrived."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.is_complete = asyncio.Event()
        self._newest_id: int | None = None

    def received(self, message: Message) -> None:
        if isinstance(message, StatusReplyMsg):
            self._newest_id = message.document["as_of_event_id"]
        elif isinstance(message, EventMsg):
            self.records.append(message.record)
        last_id = self.records[-1]["id"] if self.records else 0
        if self._newest_id is not None and last_id >= self._newest_id:
            self.is_complete.set()


async def past_events(directory: Path) -> list[Record]:
    """The events kept by every part that answers, in the order in which they happened.

    Raises:
        UnreachableError: `pod.unreachable`, there is no pod in `directory`.
    """
    parts = pod_parts(directory)
    if not parts:
        raise unreachable(directory)
    kept = [_KeptEvents() for _ in parts]
    watches = [
        PeerWatch(part.path, part.catalogue, WatchMsg(0), each.received, each.is_complete.set)
        for part, each in zip(parts, kept, strict=True)
    ]
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            for each in kept:
                await each.is_complete.wait()
    except TimeoutError:
        pass  # a part that hangs does not hide the events of the others
    finally:
        for watch in watches:
            await watch.close()
    records = [record for each in kept for record in each.records]
    return sorted(records, key=lambda record: float(record["mono_ms"]))


async def follow_events(directory: Path, on_record: OnRecord, clock: Clock | None = None) -> None:
    """Call `on_record` with every event of every part, until cancelled.

    Raises:
        UnreachableError: `pod.unreachable`, there is no pod in `directory`.
    """
    clock = clock or SystemClock()
    watches: dict[str, PeerWatch] = {}
    since_ms = clock.now_ms()
    try:
        while True:
            for part in pod_parts(directory):
                if part.path not in watches:
                    name = f"gms-{part.name}" if part.is_memory else part.name
                    followed = FollowedPart(name, on_record, clock, since_ms)
                    watches[part.path] = PeerWatch(
                        part.path, part.catalogue, WatchMsg(0), followed.received, followed.lost
                    )
            if not watches:
                raise unreachable(directory)
            await asyncio.sleep(RESCAN_S)
    finally:
        for watch in watches.values():
            await watch.close()
