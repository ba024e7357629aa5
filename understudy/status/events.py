"""`understudy events`: the events of every part of a pod, those kept so far or those to come.

A part that exits or returns is reported once each, and following continues. A device's memory
server that returns replays its events from its start, because recovering its memory is what
readers look for; other parts are followed from the moment they are reached again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from gms.client import messages as gms_messages
from lockserver.client import messages as lock_messages
from plumbing.errors import UnreachableError
from plumbing.part import observe
from plumbing.part.paths import LOCKSERVER_SOCKET, engine_sockets, gms_sockets
from plumbing.part.peers import ASK_TIMEOUT_S, PeerWatch
from plumbing.service.clock import Clock, SystemClock, rfc3339
from plumbing.wire.messages import Catalogue, Message
from understudy.status.gather import start_hint

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
        if isinstance(message, observe.StatusReplyMsg):
            self._reached(message.document)
        elif isinstance(message, observe.EventMsg) and message.record["id"] > self._last_id:
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
        if isinstance(message, observe.StatusReplyMsg):
            self._newest_id = message.document["as_of_event_id"]
        elif isinstance(message, observe.EventMsg):
            self.records.append(message.record)
        last_id = self.records[-1]["id"] if self.records else 0
        if self._newest_id is not None and last_id >= self._newest_id:
            self.is_complete.set()


@dataclass(frozen=True, slots=True)
class EventSource:
    """A part and how to watch it. `is_replayed`: following begins with all events it has kept."""

    name: str
    catalogue: Catalogue
    watch: Callable[[int | None], Message]
    is_replayed: bool = False


def sources(directory: Path) -> dict[str, EventSource]:
    """Every part that has a socket in `directory`, by the socket's path."""
    found: dict[str, EventSource] = {}
    lockserver = directory / LOCKSERVER_SOCKET
    if lockserver.exists():
        found[str(lockserver)] = EventSource(
            "lockserver", lock_messages.CATALOGUE, observe.WatchMsg
        )
    for device, path in gms_sockets(directory).items():
        catalogue, watch = gms_messages.CATALOGUE, gms_messages.WatchMsg
        found[path] = EventSource(f"gms-{device}", catalogue, watch, is_replayed=True)
    for engine, path in engine_sockets(directory).items():
        found[path] = EventSource(engine, engine_messages.CONTROL, observe.WatchMsg)
    return found


def _no_pod(directory: Path) -> UnreachableError:
    return UnreachableError(
        "pod.no_sockets", f"there is no pod in {directory}; {start_hint(directory)}"
    )


async def past_events(directory: Path) -> list[Record]:
    """The events kept by every part that answers, in the order in which they happened.

    Raises:
        UnreachableError: `pod.no_sockets`, there is no pod in `directory`.
    """
    found = sources(directory)
    if not found:
        raise _no_pod(directory)
    parts: list[_KeptEvents] = []
    watches: list[PeerWatch] = []
    for path, source in found.items():
        part = _KeptEvents()
        parts.append(part)
        done = part.is_complete.set
        watches.append(PeerWatch(path, source.catalogue, source.watch(0), part.received, done))
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            for part in parts:
                await part.is_complete.wait()
    except TimeoutError:
        pass  # a part that hangs does not hide the events of the others
    finally:
        for watch in watches:
            await watch.close()
    records = [record for part in parts for record in part.records]
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
            for path, source in sources(directory).items():
                if path not in watches:
                    part = FollowedPart(source.name, on_record, clock, is_new=is_new)
                    question = source.watch(0 if source.is_replayed else None)
                    watches[path] = PeerWatch(
                        path, source.catalogue, question, part.received, part.lost
                    )
            if not watches:
                raise _no_pod(directory)
            is_new = True
            await asyncio.sleep(RESCAN_S)
    finally:
        for watch in watches.values():
            await watch.close()
