"""`understudy events`: the events of every part of a pod, those kept so far or those to come.

A part that exits or returns is reported once each, and following continues. One that returns says
again what it has kept: what is older than the last record, on the machine's one clock, is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError
from plumbing.pod.cli import events_of
from plumbing.pod.messages import EventMsg, WatchMsg
from plumbing.pod.observers import PeerWatch
from plumbing.service.clock import Clock, SystemClock, rfc3339
from plumbing.wire.messages import Message
from understudy.status.gather import PodPart, pod_parts, unreachable

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


def past_events(directory: Path) -> list[Record]:
    """The events kept by every part that answers, in the order in which they happened.

    Raises:
        UnreachableError: `pod.unreachable`, there is no pod in `directory`.
    """
    parts = pod_parts(directory)
    if not parts:
        raise unreachable(directory)

    def kept(part: PodPart) -> list[Record]:
        found: list[Record] = []
        with contextlib.suppress(UnderstudyError):  # one that hangs does not hide the others'
            found.extend(events_of(part.path, part.catalogue))
        return found

    with ThreadPoolExecutor(len(parts)) as threads:
        records = [record for each in threads.map(kept, parts) for record in each]
    return sorted(records, key=lambda record: float(record["mono_ms"]))


async def follow_events(directory: Path) -> AsyncGenerator[Record]:
    """Every event of every part from now on.

    Raises:
        UnreachableError: `pod.unreachable`, there is no pod in `directory`.
    """
    loop, clock, heard = asyncio.get_running_loop(), SystemClock(), asyncio.Queue[Record]()
    watches: dict[str, PeerWatch] = {}
    since_ms = clock.now_ms()
    try:
        while True:
            for part in pod_parts(directory):
                if part.path not in watches:
                    name = f"gms-{part.name}" if part.is_memory else part.name
                    followed = FollowedPart(name, heard.put_nowait, clock, since_ms)
                    watches[part.path] = PeerWatch(
                        part.path, part.catalogue, WatchMsg(0), followed.received, followed.lost
                    )
            if not watches:
                raise unreachable(directory)
            rescan_s = loop.time() + RESCAN_S
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout_at(rescan_s):
                        record = await heard.get()
                    yield record
    finally:
        for watch in watches.values():
            await watch.close()
