"""`understudy events -f`: what happens in a pod, from all its parts, as it happens.

Parts die and come back; that is said once each, and following goes on. A device's memory server
that is back replays its record from its start, because what it did first, getting its memory back,
is what people look for. The others tell from the moment on at which they are reached again.
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
from plumbing.part.peers import Watch
from plumbing.service.clock import Clock, SystemClock, rfc3339
from plumbing.wire.messages import Catalogue, Message
from understudy.status.gather import LOCKSERVER_SOCKET, engine_sockets, gms_sockets, way_out

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
        if isinstance(message, observe.StatusReplyMsg):
            self._reached(message.document)
        elif isinstance(message, observe.EventMsg) and message.record["id"] > self._last_id:
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


@dataclass(frozen=True, slots=True)
class Source:
    """A part and how to ask for its events. `is_replayed`: followers are told all that it kept."""

    name: str
    catalogue: Catalogue
    ask: Callable[[int | None], Message]
    is_replayed: bool = False


def sources(directory: Path) -> dict[str, Source]:
    """Every part that has a socket in `directory`, by the socket's path."""
    found: dict[str, Source] = {}
    lockserver = directory / LOCKSERVER_SOCKET
    if lockserver.exists():
        found[str(lockserver)] = Source("lockserver", lock_messages.CATALOGUE, observe.WatchMsg)
    for device, path in gms_sockets(directory).items():
        catalogue, ask = gms_messages.CATALOGUE, gms_messages.WatchMsg
        found[path] = Source(f"gms-{device}", catalogue, ask, is_replayed=True)
    for engine, path in engine_sockets(directory).items():
        found[path] = Source(engine, engine_messages.CONTROL, observe.WatchMsg)
    return found


def no_pod(directory: Path) -> UnreachableError:
    """Nobody to ask in `directory`."""
    return UnreachableError(
        "pod.no_sockets", f"there is no pod in {directory}; {way_out(directory)}"
    )


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
            for path, source in sources(directory).items():
                if path not in watches:
                    part = Part(source.name, heard, clock, is_new=is_new)
                    question = source.ask(0 if source.is_replayed else None)
                    watches[path] = Watch(path, source.catalogue, question, part.told, part.lost)
            if not watches:
                raise no_pod(directory)
            is_new = True
            await asyncio.sleep(LOOK_AGAIN_S)
    finally:
        for watch in watches.values():
            await watch.close()
