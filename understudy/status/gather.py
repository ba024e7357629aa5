"""Collects the status and the events of every part of a pod through the sockets in its directory.

Decides nothing: `view.py` says what the answers mean. The directory is the list of parts, so a pod
looks the same whatever started it.

Events are those kept so far or those to come. A part that exits or returns is reported once each,
and following continues. One that returns says again what it has kept: what is older than the last
record, on the machine's one clock, is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from gateway import messages as gateway_messages
from gms.client import messages as gms_messages
from lockserver.client import messages as lock_messages
from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.pod.cli import events_of
from plumbing.pod.messages import EventMsg, StatusMsg, StatusReplyMsg, WatchMsg
from plumbing.pod.models import device_of
from plumbing.pod.observers import ASK_TIMEOUT_S, PeerWatch, ask
from plumbing.pod.paths import (
    engine_sockets,
    engine_states,
    gateway_socket,
    gms_socket,
    gms_sockets,
    lockserver_socket,
    pool_socket,
    read_device_names,
    up_guard,
)
from plumbing.service.clock import Clock, SystemClock, rfc3339
from plumbing.service.files import read_json
from plumbing.wire.messages import Catalogue, Message
from plumbing.wire.server import guard_holder
from pool import messages as pool_messages
from understudy.status.view import is_reachable, pod_view

NO_SOCKET = "it has no socket; is its process running, and with this --dir?"
DRAINED = "drained"  # the reason in the state file of an engine that was asked to end


def unreachable(directory: Path, reason: str = "") -> UnreachableError:
    """The error where no part of a pod answers in `directory`."""
    why, hint = f" ({reason})" if reason else "", "start one with `understudy up`"
    if holder := guard_holder(up_guard(str(directory))):
        hint = f"`understudy up` ({holder}) is starting or stopping one there: see its output"
    return UnreachableError(
        "pod.unreachable",
        f"no part of a pod answers in {directory}{why}; {hint}",
        dir=str(directory),
    )


def states_on_file(directory: Path) -> list[dict[str, Any]]:
    """The document in each engine's state file that can be read."""
    found = []
    for path in engine_states(directory):
        with contextlib.suppress(UnderstudyError, OSError):  # `engine status` reports why
            found.append(read_json(str(path)))
    return [document for document in found if document is not None]


def ended_engines(directory: Path) -> list[dict[str, Any]]:
    """The engines that have ended by themselves and were not started again, each with the cause
    from its state file: in a crash loop nothing else is left of them."""
    running = engine_sockets(directory)
    engines = [each.get("engine") or {} for each in states_on_file(directory)]
    return [
        {"name": str(each.get("id")), "error": f"not running: {each.get('reason')}"}
        for each in engines
        if each.get("state") == "dead"
        and each.get("reason") != DRAINED
        and each.get("id") not in running
    ]


@dataclass(frozen=True, slots=True)
class PodPart:
    """A part of a pod by its socket. `name`: `lockserver`, `gateway`, a device, an engine's id."""

    name: str
    path: str
    catalogue: Catalogue

    @property
    def kind(self) -> str:
        """Its name, or `gms` of a device's memory server, or `engine`."""
        if self.name in SINGLE:
            return self.name
        return "gms" if self.catalogue is gms_messages.CATALOGUE else "engine"


# Parts of which there is one at most: with a lock over TCP there is no gateway, and only the pod of
# a pool file has a pool.
SINGLE: dict[str, tuple[Callable[[str], str], Catalogue]] = {
    "lockserver": (lockserver_socket, lock_messages.CATALOGUE),
    "gateway": (gateway_socket, gateway_messages.CONTROL),
    "pool": (pool_socket, pool_messages.CATALOGUE),
}


def part_of(directory: Path, name: str) -> PodPart:
    """One of `SINGLE`, whether or not it has a socket."""
    socket_of, catalogue = SINGLE[name]
    return PodPart(name, socket_of(str(directory)), catalogue)


def memory_parts(directory: Path) -> list[PodPart]:
    """The devices' memory servers that have a socket, and devices that have none yet."""
    found = gms_sockets(directory)
    served = {device_of(place) for place in found}
    for device in read_device_names(str(directory)):
        if device not in served:
            found[device] = gms_socket(str(directory), device)
    return [PodPart(device, path, gms_messages.CATALOGUE) for device, path in found.items()]


def engine_parts(directory: Path) -> list[PodPart]:
    """The engines that have a socket."""
    found = engine_sockets(directory).items()
    return [PodPart(engine, path, engine_messages.CONTROL) for engine, path in found]


def pod_parts(directory: Path) -> list[PodPart]:
    """Every part that has a socket in `directory`."""
    single = (part_of(directory, name) for name in SINGLE)
    found = [part for part in single if os.path.exists(part.path)]
    return [*found, *memory_parts(directory), *engine_parts(directory)]


async def said_by(part: PodPart, timeout_s: float = ASK_TIMEOUT_S) -> tuple[int, dict[str, Any]]:
    """The pid of the part as this process sees it, 0 if it does not; and its status document, or
    `{"name", "error"}` with the reason for its absence. A part knows its pid in its own PID
    namespace only."""
    try:
        answered = await ask(part.path, part.catalogue, StatusMsg(), timeout_s)
    except UnderstudyError as error:
        return 0, {"name": part.name, "error": error.message}
    assert isinstance(answered.message, StatusReplyMsg)
    return answered.pid, answered.message.document


async def status_of(part: PodPart, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    return (await said_by(part, timeout_s))[1]


async def pids_of(parts: Sequence[PodPart]) -> dict[str, int]:
    """The pids of those parts that answer and are visible here, by name."""
    found = await asyncio.gather(*map(said_by, parts))
    return {part.name: pid for part, (pid, _) in zip(parts, found, strict=True) if pid}


async def gather(directory: Path, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    """The whole pod's view (`view.pod_view`): every part is asked once, all at the same time."""
    return view_of(directory, await said_of(pod_parts(directory), timeout_s))


async def said_of(parts: Sequence[PodPart], timeout_s: float) -> dict[PodPart, dict[str, Any]]:
    """Each part's answer, as of `status_of`."""
    answers = await asyncio.gather(*(status_of(part, timeout_s) for part in parts))
    return dict(zip(parts, answers, strict=True))


def view_of(directory: Path, said: Mapping[PodPart, dict[str, Any]]) -> dict[str, Any]:
    """The view of what all parts have said."""
    named = {part.name: document for part, document in said.items()}
    lock, gateway, pool = (named.get(name) or {"name": name, "error": NO_SOCKET} for name in SINGLE)
    # With a lock over TCP there is no gateway, and without a pool file no pool. Whether there is
    # to be one says the lock server, or a socket that is there.
    has_gateway = lock.get("service") or os.path.exists(gateway_socket(str(directory)))
    has_pool = lock.get("models") or os.path.exists(pool_socket(str(directory)))
    return pod_view(
        str(directory),
        lock,
        [document for part, document in said.items() if part.kind == "gms"],
        [
            *(document for part, document in said.items() if part.kind == "engine"),
            *ended_engines(directory),
        ],
        gateway if has_gateway else None,
        pool if has_pool else None,
    )


async def require_pod(directory: Path) -> None:
    """Raise unless a part of a pod answers in `directory`.

    Raises:
        UnreachableError: `pod.unreachable`.
    """
    if not is_reachable(await gather(directory)):
        raise unreachable(directory)


# ------------------------------------------------------------------ events

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
        UnreachableError: `pod.unreachable`, no part answers in `directory`.
    """

    def kept(part: PodPart) -> list[Record]:
        found: list[Record] = []
        with contextlib.suppress(UnderstudyError):  # one that hangs does not hide the others'
            found.extend(events_of(part.path, part.catalogue))
        return found

    parts = pod_parts(directory)
    with ThreadPoolExecutor(len(parts) or 1) as threads:
        records = [record for each in threads.map(kept, parts) for record in each]
    if not records:  # each part that answers has said at least that it has started
        raise unreachable(directory)
    return sorted(records, key=lambda record: float(record["mono_ms"]))


async def follow_events(directory: Path, since_ms: float) -> AsyncGenerator[Record]:
    """Every event of every part that was made after `since_ms`, for ever."""
    loop, clock, heard = asyncio.get_running_loop(), SystemClock(), asyncio.Queue[Record]()
    watches: dict[str, PeerWatch] = {}
    try:
        while True:
            for part in pod_parts(directory):
                if part.path not in watches:
                    name = f"gms-{part.name}" if part.kind == "gms" else part.name
                    followed = FollowedPart(name, heard.put_nowait, clock, since_ms)
                    watches[part.path] = PeerWatch(
                        part.path, part.catalogue, WatchMsg(0), followed.received, followed.lost
                    )
            rescan_s = loop.time() + RESCAN_S
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout_at(rescan_s):
                        record = await heard.get()
                    yield record
    finally:
        for watch in watches.values():
            await watch.close()
