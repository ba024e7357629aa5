"""`understudy events`: the events of every part of a pod, those kept so far or those to come.

A part that exits or returns is reported once each, and following continues. A device's memory
server that returns replays its events from its start, because recovering its memory is what
readers look for; other parts are followed from the moment they are reached again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plumbing.errors import UnreachableError
from plumbing.pod.messages import EventMsg, StatusReplyMsg, WatchMsg
from plumbing.pod.observers import ASK_TIMEOUT_S, PeerWatch
from plumbing.service.clock import Clock, SystemClock, rfc3339
from plumbing.wire.messages import Message
from understudy.status.gather import (
    PodPart,
    engine_parts,
    gateway_part,
    lockserver_part,
    memory_parts,
    pool_part,
    start_hint,
)

RESCAN_S = 1.0  # for parts that were not there: operators start them by hand

Record = dict[str, Any]
OnRecord = Callable[[Record], None]


class FollowedPart:
    """One part that is followed: each of its records once, and once each that it exits or returns.

    `is_new`: it was not there when following began, so everything it has recorded is news.
    """

    def __init__(self, name: str, on_record: OnRecord, clock: Clock, *, is_new: bool) -> None:
        self.name = name
        self._on_record, self._clock = on_record, clock
        self._is_new = is_new
        self._is_here: bool | None = None  # None: not tried yet
        self._process_since: str | None = None  # the start of the process that answered last
        self._last_id = 0  # records of that process up to this id are skipped

    def received(self, message: Message) -> None:
        if isinstance(message, StatusReplyMsg):
            self._reached(message.document)
        elif isinstance(message, EventMsg) and message.record["id"] > self._last_id:
            self._last_id = message.record["id"]
            self._on_record(message.record)

    def lost(self) -> None:
        if self._is_here is not False:
            self._is_here = False
            self._report("pod.gone", f"{self.name} is gone; following resumes when it is back")

    def _reached(self, document: Mapping[str, Any]) -> None:
        earlier, self._process_since = self._process_since, document.get("since")
        is_replay = self._process_since is not None  # only memory servers have it at the top level
        if not is_replay or (self._is_here is None and not self._is_new):
            self._last_id = document["as_of_event_id"]
        elif self._process_since != earlier:
            self._last_id = 0  # another process, which counts from 1
        if self._is_here is False:
            self._report("pod.back", f"{self.name} is back")
        self._is_here = True

    def _report(self, kind: str, message: str) -> None:
        self._on_record(
            {
                "id": None,  # no part has recorded it
                "ts": rfc3339(self._clock.wall()),
                "mono_ms": self._clock.now_ms(),
                "type": kind,
                "severity": "warning" if kind == "pod.gone" else "info",
                "source": self.name,
                "message": message,
                "data": {},
            }
        )


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


def watched_parts(directory: Path) -> list[PodPart]:
    """Every part that has a socket in `directory`."""
    single = (lockserver_part(directory), gateway_part(directory), pool_part(directory))
    found = [part for part in single if Path(part.path).exists()]
    return [*found, *memory_parts(directory), *engine_parts(directory)]


def _no_pod(directory: Path) -> UnreachableError:
    return UnreachableError(
        "pod.no_sockets", f"there is no pod in {directory}; {start_hint(directory)}"
    )


async def past_events(directory: Path) -> list[Record]:
    """The events kept by every part that answers, in the order in which they happened.

    Raises:
        UnreachableError: `pod.no_sockets`, there is no pod in `directory`.
    """
    parts = watched_parts(directory)
    if not parts:
        raise _no_pod(directory)
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
        UnreachableError: `pod.no_sockets`, there is no pod in `directory`.
    """
    clock = clock or SystemClock()
    watches: dict[str, PeerWatch] = {}
    is_new = False
    try:
        while True:
            for part in watched_parts(directory):
                if part.path not in watches:
                    name = f"gms-{part.name}" if part.is_memory else part.name
                    followed = FollowedPart(name, on_record, clock, is_new=is_new)
                    question = WatchMsg(0 if part.is_memory else None)
                    watches[part.path] = PeerWatch(
                        part.path, part.catalogue, question, followed.received, followed.lost
                    )
            if not watches:
                raise _no_pod(directory)
            is_new = True
            await asyncio.sleep(RESCAN_S)
    finally:
        for watch in watches.values():
            await watch.close()
