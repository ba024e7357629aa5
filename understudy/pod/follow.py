"""`understudy events`: what happened in a pod, and with `-f` what happens, from all its parts.

Parts die and come back; that is said once each, and following goes on. A device's memory server
that is back replays its record from its start, because what it did first, getting its memory back,
is what people look for. The others tell from the moment on at which they are reached again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from gms.client import messages as gms_messages
from lockserver.client import messages as lock_messages
from understudy.errors import UnreachableError
from understudy.pod.gather import LOCKSERVER_SOCKET, engine_sockets, gms_sockets
from understudy.pod.peers import ASK_TIMEOUT_S, Watch
from understudy.service.clock import Clock, SystemClock, rfc3339
from understudy.wire import observe
from understudy.wire.messages import Catalogue, Message

LOOK_AGAIN_S = 1.0  # for parts that were not there: people start them by hand

Record = dict[str, Any]
Heard = Callable[[Record], None]


class Part:
    """One part that is followed: its records, each once, and once each that it is gone or back.

    `is_new`: it was not there when following began, so all that it has recorded is news.
    """

    def __init__(self, name: str, heard: Heard, clock: Clock, *, is_new: bool) -> None:
        self.name = name
        self._heard, self._clock = heard, clock
        self._is_new = is_new
        self._is_here: bool | None = None  # None: not tried yet
        self._began: str | None = None  # when the process began that told us last
        self._last_id = 0  # the records of that process up to here are no news

    def told(self, message: Message) -> None:
        if isinstance(message, observe.StatusReply):
            self._reached(message.document)
        elif isinstance(message, observe.EventRecord) and message.record["id"] > self._last_id:
            self._last_id = message.record["id"]
            self._heard(message.record)

    def lost(self) -> None:
        if self._is_here is not False:
            self._is_here = False
            self._say("pod.gone", f"{self.name} is gone; it is followed again when it is back")

    def _reached(self, document: Mapping[str, Any]) -> None:
        began, self._began = self._began, document.get("since")
        is_replay = self._began is not None  # memory servers only: the others say it elsewhere
        if not is_replay or (self._is_here is None and not self._is_new):
            self._last_id = document["as_of_event_id"]
        elif self._began != began:
            self._last_id = 0  # another process, which counts from 1
        if self._is_here is False:
            self._say("pod.back", f"{self.name} is back")
        self._is_here = True

    def _say(self, kind: str, message: str) -> None:
        self._heard(
            {
                "id": None,  # it is in nobody's record
                "ts": rfc3339(self._clock.wall()),
                "mono_ms": self._clock.now_ms(),
                "type": kind,
                "severity": "warning" if kind == "pod.gone" else "info",
                "source": self.name,
                "message": message,
                "data": {},
            }
        )


class _Kept:
    """What one part remembers; complete once the newest that its status speaks of is here."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.is_complete = asyncio.Event()
        self._newest_id: int | None = None

    def told(self, message: Message) -> None:
        if isinstance(message, observe.StatusReply):
            self._newest_id = message.document["as_of_event_id"]
        elif isinstance(message, observe.EventRecord):
            self.records.append(message.record)
        last_id = self.records[-1]["id"] if self.records else 0
        if self._newest_id is not None and last_id >= self._newest_id:
            self.is_complete.set()


async def kept_events(directory: Path) -> list[Record]:
    """What every part that answers remembers, in the order in which it happened.

    Raises:
        UnreachableError: `pod.no_sockets`, there is no pod in `directory`.
    """
    parts = _parts(directory, since=0)
    if not parts:
        raise _no_pod(directory)
    kept = [_Kept() for _ in parts]
    watches = [
        Watch(path, catalogue, question, each.told, each.is_complete.set)
        for each, (path, (_, catalogue, question)) in zip(kept, parts.items(), strict=True)
    ]
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            for each in kept:
                await each.is_complete.wait()
    except TimeoutError:
        pass  # one that hangs does not keep the others' from people
    finally:
        for watch in watches:
            await watch.close()
    records = [record for each in kept for record in each.records]
    return sorted(records, key=lambda record: float(record["mono_ms"]))


def _no_pod(directory: Path) -> UnreachableError:
    return UnreachableError(
        "pod.no_sockets", f"there is no pod in {directory}; start one with `understudy up`"
    )


def _parts(directory: Path, since: int | None = None) -> dict[str, tuple[str, Catalogue, Message]]:
    """What there is to follow: its name, by socket, with how to ask for what it kept `since`."""
    found: dict[str, tuple[str, Catalogue, Message]] = {}
    lockserver = directory / LOCKSERVER_SOCKET
    if lockserver.exists():
        found[str(lockserver)] = ("lockserver", lock_messages.CATALOGUE, observe.Watch(since))
    for device, path in gms_sockets(directory).items():
        found[path] = (f"gms-{device}", gms_messages.CATALOGUE, gms_messages.Watch(since=0))
    for engine, path in engine_sockets(directory).items():
        found[path] = (engine, engine_messages.CONTROL, observe.Watch(since))
    return found


async def follow_events(directory: Path, heard: Heard, clock: Clock | None = None) -> None:
    """Call `heard` with every event of lock server, memory service and engines, until cancelled.

    Raises:
        UnreachableError: `pod.no_sockets`, there is no pod in `directory`.
    """
    clock = clock or SystemClock()
    watches: dict[str, Watch] = {}
    is_new = False
    try:
        while True:
            for path, (name, catalogue, question) in _parts(directory).items():
                if path not in watches:
                    part = Part(name, heard, clock, is_new=is_new)
                    watches[path] = Watch(path, catalogue, question, part.told, part.lost)
            if not watches:
                raise _no_pod(directory)
            is_new = True
            await asyncio.sleep(LOOK_AGAIN_S)
    finally:
        for watch in watches.values():
            await watch.close()
