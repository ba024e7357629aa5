"""A place's socket, and what the servers of its weights and of its KV memory have in common: the
machine in front, the driver behind.

A server decides nothing: it tells the machine what happens, and carries out its effects. It maps no
memory, and all that it holds can be lost with it: the processes that map the memory hand it back to
the next server.

Driver calls run on one thread, in order. Closes that free memory run on a second one: a dead
engine's memory delays no newcomer. Descriptors for clients are copied on the loop, which never
blocks: on a machine whose CPUs are all busy, each change of threads may wait for milliseconds, and
an engine that wakes waits for it.

Nothing announces the release of a flock, so `MemoryWatch` polls: every millisecond for the first
second (a killed process is usually gone by then), then every ten. A try costs microseconds.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import resource
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

from msgspec import Struct

from gms import epoch_file, names
from gms import messages as msg
from gms.core import events as ev
from gms.core.region import Machine
from gms.server.driver_thread import FOREIGN, DriverThread, attempt
from gms.server.slab_store import Part, SlabStore
from gms.vmm.interface import DeviceMemory, release_all
from plumbing.errors import ProtocolError, UnderstudyError, explain_shortage, is_shortage
from plumbing.pod.models import device_of, model_at
from plumbing.pod.observers import PartServer
from plumbing.pod.paths import gms_socket
from plumbing.service.clock import SystemClock, rfc3339
from plumbing.service.events import EventLog
from plumbing.service.notify import restarts
from plumbing.service.procfs import holders_of
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message

RETRY_S = 1.0  # of a place that cannot be served
FAST_MS, FAST_FOR_MS = 1.0, 1000.0
SLOW_MS = 10.0
HOLDERS_AFTER_MS = 100.0  # a scan of /proc takes milliseconds: only for those that linger
HOLDERS_EVERY_MS = 1000.0

# How long a writer may make no progress. It reports per tensor; reading one from the slowest
# network file system takes seconds.
STALL_MS = 120_000.0

logger = logging.getLogger(__name__)


class Watched(Struct):
    """A region's file. `ends`: it is removed once it is free."""

    ends: bool
    since_ms: float
    scan_ms: float  # when /proc is searched for its holders
    problem: str | None = None  # why the last try failed


class MemoryWatch:
    """Watches the files of a server's regions: each that is free is reported once, and its holders
    while it is not. A file that cannot be opened counts as held, and is reported as a problem."""

    def __init__(self, server: MemoryServer[Any], thread: DriverThread) -> None:
        self._server, self._clock, self._thread = server, server.clock, thread
        self._watched: dict[str, Watched] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def problem(self) -> str | None:
        """Why it is unknown whether one of them is still mapped."""
        return next((each.problem for each in self._watched.values() if each.problem), None)

    def watch(self, region: str, *, ends: bool | None) -> None:
        if ends is None:
            self._watched.pop(region, None)
            return
        now_ms = self._clock.now_ms()
        self._watched[region] = Watched(ends, now_ms, now_ms + HOLDERS_AFTER_MS)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(0, self._try)

    def close(self) -> None:
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _try(self) -> None:
        self._timer = None
        now_ms = self._clock.now_ms()
        freed = [region for region, each in self._watched.items() if self._is_gone(region, each)]
        for region in freed:
            del self._watched[region]
        for region, each in self._watched.items():
            if each.scan_ms <= now_ms:
                each.scan_ms = now_ms + HOLDERS_EVERY_MS
                self._find_holders(region)
        if self._watched:
            is_fresh = any(now_ms - e.since_ms < FAST_FOR_MS for e in self._watched.values())
            delay_s = (FAST_MS if is_fresh else SLOW_MS) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._try)
        for region in freed:
            self._server.is_free(region)

    def _is_gone(self, region: str, watched: Watched) -> bool:
        server, path = self._server, self._server.path(region)
        try:
            look = epoch_file.remove_if_free if watched.ends else epoch_file.is_free
            is_free = look(path)
        except OSError as error:  # not known is not free
            problem = (
                f"cannot check whether {server.what} {region} is still mapped, so no engine may "
                f"{server.blocked} until {path} can be checked: {explain_shortage(error.errno)}"
            )
            if problem != watched.problem:
                watched.problem = problem
                server.warn(problem)
            return False
        watched.problem = None
        return is_free

    def _find_holders(self, region: str) -> None:
        path = self._server.path(region)

        def find() -> tuple[int, ...]:
            # Not ourselves: this watch may be trying the lock on the loop.
            return tuple(pid for pid in holders(path) if pid != os.getpid())

        self._thread.submit(
            find,
            lambda pids: self._server.handle(self._server.machine.holders_seen, region, pids),
            lambda error: logger.debug("could not find the holders of %s: %s", region, error),
        )


def holders(path: str) -> tuple[int, ...]:
    """The processes that have the file open, where visible; none if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return tuple(holders_of(found.st_dev, found.st_ino))


# How long `close` waits for calls under way. Freeing continues in the kernel when we exit.
CLOSE_TIMEOUT_S = 5.0

M = TypeVar("M", bound=Machine[Any])
P = ParamSpec("P")


OF_KV = (msg.BorrowPoolMsg, msg.TakeMsg, msg.MarkMsg, msg.DiscardMsg, msg.GiveUpMsg)


class MemoryPlace(Handler):
    """Serves the memory of one place in `directory` until it is closed: one socket, status and
    events for its weights and its KV memory."""

    def __init__(
        self,
        directory: str,
        device: str,
        memory: DeviceMemory,
        capacity_bytes: int,
        kinds: Sequence[type[MemoryServer[Any]]],
        *,
        is_bounded: bool = True,
        stall_ms: float = STALL_MS,
    ) -> None:
        """`kinds`: weights first, then KV memory if it has any. `is_bounded`: `capacity_bytes` is
        the limit of both together."""
        self.directory, self.device, self.memory = directory, device, memory
        self.capacity_bytes, self.is_bounded = capacity_bytes, is_bounded
        self.stall_ms = stall_ms
        self.clock = SystemClock()
        self.log = EventLog(f"gms-{device}", self.clock)
        self.conns: dict[int, Connection] = {}
        # What this process serves of the device.
        self.beside: Sequence[MemoryPlace] = (self,)
        self.is_serving = False
        self._started = self.clock.wall()
        where = gms_socket(directory, device), msg.CATALOGUE, self
        self._server = PartServer(*where, self.log, self.status, service="gms")
        self.parts = [kind(self) for kind in kinds]

    async def serve(self) -> None:
        """Start, and try again until that succeeds."""
        said = ""
        while not self.is_serving:
            try:
                await self.start()
            except (UnderstudyError, *FOREIGN) as error:
                if str(error) != said:
                    said = str(error)
                    logger.error("the memory of %s is not served: %s", self.device, said)
                await asyncio.sleep(RETRY_S)

    async def start(self) -> None:
        """Take the path, find what an earlier server left, serve. May be repeated if it fails."""
        await self._server.start()
        # The path is ours; no client is read before this function yields to the loop.
        try:
            for part in self.parts:
                part.start()
        except BaseException:
            await self._server.close()
            raise
        self.is_serving = True
        for part in self.parts:
            state = part.status()["state"]
            part.record("gms.serving", f"serving the {part.tag} of {self.device}: {state}")

    async def close(self) -> None:
        """Stop serving; sessions end, and memory lives on where a process maps it."""
        await self._server.close()
        for part in self.parts:
            await part.close()

    def status(self) -> dict[str, Any]:
        """What `gms status` shows of this place."""
        weights, *kv = (self._status(part) for part in self.parts)
        return {**weights, "kv": kv[0] if kv else None}

    def _status(self, part: MemoryServer[Any]) -> dict[str, Any]:
        state = part.status()
        return {
            "device_uuid": self.device,
            "tag": part.tag,
            "online": True,
            "device": device_of(self.device),
            "model": model_at(self.device) or None,
            "memory": self.memory.kind,
            "driver": self.memory.facts(),
            "pid": os.getpid(),
            "since": rfc3339(self._started),
            "restarts_total": restarts(),
            **self.log.newest(),
            **state,
            "problem": state.get("problem") or part.watch.problem or self._server.problem,
            "protocol_errors_total": part.protocol_errors_total,
            "open_fds": open_fds(),
        }

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self.conns[conn.id] = conn

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        part = self._about(conn, message)
        try:
            part.feed(conn, ev.Received(conn.id, request_id, message, conn.peer.pid), fds)
        except UnderstudyError as error:  # the wire answers with it and closes the connection
            part.protocol_errors_total += isinstance(error, ProtocolError)
            part.forget_offer(conn.id)
            if not isinstance(message, msg.DropMsg):
                raise
            conn.fault(error, request_id, close=False)  # a pool watches here, and asks again
        except OSError as error:  # a file could not be opened to look at it
            part.forget_offer(conn.id)
            raise exhausted(error) from error
        finally:
            close_all(fds)

    def _about(self, conn: Connection, message: Message) -> MemoryServer[Any]:
        """Whose message it is."""
        match message:
            case msg.HandBackMsg():
                is_kv = message.pool is not None
            case msg.DropMsg():
                is_kv = message.is_kv
            case _:
                is_kv = isinstance(message, OF_KV)
        return self.parts[-1 if is_kv else 0]

    def closed(self, conn: Connection, reason: str) -> None:
        if conn.state is not None:
            asyncio.get_running_loop().remove_reader(conn.state)
        del self.conns[conn.id]
        for part in self.parts:
            part.forget_offer(conn.id)
            part.handle(part.machine.closed, conn.id, reason)


class MemoryServer(abc.ABC, Generic[M]):
    """Serves one kind of memory of a place; a subclass sets its machine in `_begin`."""

    tag: ClassVar[str]
    what: ClassVar[str]  # what a region is called
    blocked: ClassVar[str]  # what no engine may do while it is unknown who maps one
    is_lent_writable: ClassVar[bool]
    machine: M
    is_begun = False

    def __init__(self, place: MemoryPlace) -> None:
        self.place, self.clock = place, place.clock
        self.directory, self.device, self.memory = place.directory, place.device, place.memory
        self.protocol_errors_total = 0
        self._store = SlabStore(is_writable=self.is_lent_writable)
        # What survivors have handed back, by session, until it is checked.
        self._offers: dict[int, list[OwnedFd]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Find what an earlier server left. May be repeated if it fails, or another part has."""
        if self.is_begun:
            return
        name = f"gms-{self.tag}-{{}}-{self.device}"
        self._driver = DriverThread(name.format("driver"))
        self._closer = DriverThread(name.format("closer"))
        self.watch = MemoryWatch(self, self._driver)
        self._begin()
        self.is_begun = True
        self.handle(self.machine.deadline_passed)  # watches what is there

    async def close(self) -> None:
        for thread in (self._driver, self._closer):  # the closer frees what the driver gives up
            await thread.close(CLOSE_TIMEOUT_S)
        self.watch.close()
        if self._timer is not None:
            self._timer.cancel()
        for offered in self._offers.values():
            close_all(offered)
        self._store.close()

    @abc.abstractmethod
    def _begin(self) -> None:
        """Set up the machine on what an earlier server left."""

    def path(self, region: str) -> str:
        """The file that every process which maps the region holds."""
        return names.region_path(self.directory, self.device, self.tag, region)

    def files(self) -> dict[str, bool]:
        """What an earlier server has left: the regions that have files, each with whether it is out
        of service."""
        found = names.regions_on_disk(self.directory, self.device, self.tag)
        return {region: epoch_file.is_retired(self.path(region)) for region in found}

    def is_free(self, region: str) -> None:
        self.handle(self.machine.region_free, region)

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """What the neighbours count as used: neither what is being loaded nor what is on its way
        out; of those the pool knows, or the driver says."""

    @property
    def bytes_beside(self) -> int:
        """What else is used of the device."""
        mine = device_of(self.device)
        beside = [each for each in self.place.beside if each.is_serving]
        parts = [part for each in beside if device_of(each.device) == mine for part in each.parts]
        return sum(part.held_bytes for part in parts if part is not self)

    @abc.abstractmethod
    def status(self) -> dict[str, Any]:
        """The machine's part of the place's."""

    # ------------------------------------------------------------------ what clients send

    def feed(self, conn: Connection, event: ev.Received, fds: Sequence[OwnedFd]) -> None:
        """Check what only the kernel knows, then hand the message to the machine; takes those `fds`
        that are needed."""
        match event.message:
            case msg.AttachMsg() | msg.BorrowPoolMsg():
                self._watch_process(conn)
            case msg.AllocateMsg() | msg.TakeMsg():
                session = self.machine.sessions.get(conn.id)
                if session is not None and session.region is not None:
                    self._check_held(session.region)
            case msg.HandBackMsg():
                self._take_offer(conn, event.message, fds)
        self.handle(self.machine.received, self._with_facts(event))

    @abc.abstractmethod
    def _with_facts(self, event: ev.Received) -> ev.Received:
        """`event`, with what the kernel and the neighbours know."""

    def _watch_process(self, conn: Connection) -> None:
        """A session ends with the process that opened it, even if a forked child has its socket."""
        if conn.peer.pidfd is not None and conn.state is None:
            conn.state = conn.peer.pidfd.fileno()
            asyncio.get_running_loop().add_reader(conn.state, conn.close, "its process is gone")

    def _check_held(self, region: str) -> None:
        """No memory before the flock: without it, nothing would show that the memory is in use."""
        if not epoch_file.is_held(self.path(region)):
            text = f"hold a shared flock on the {self.what}'s file first"
            raise ProtocolError("gms.not_held", text)

    def _take_offer(
        self, conn: Connection, message: msg.HandBackMsg, fds: Sequence[OwnedFd]
    ) -> None:
        """Check that a survivor may hand the region back, and keep the memory if that is wanted. It
        must hold the region's file, unless that was removed under all its holders.
        """
        if not names.is_region_id(message.region):
            raise ProtocolError("gms.bad_offer", f"{message.region[:64]!r} is not an id")
        self._watch_process(conn)
        if os.path.exists(self.path(message.region)):
            self._check_held(message.region)
        if not self.machine.is_awaited(message.region):
            return
        if len(fds) != len(message.slab_sizes) + (message.pool is not None):
            raise ProtocolError(
                "gms.bad_offer",
                f"{len(fds)} descriptors came for a region of {len(message.slab_sizes)} slabs",
            )
        self.forget_offer(conn.id)
        self._offers[conn.id] = [OwnedFd(fd.detach()) for fd in fds]

    def forget_offer(self, session: int) -> None:
        """Close what the session has handed back: it has ended, or it is not needed."""
        fds = self._offers.pop(session, [])
        if fds:
            self._closer.submit(lambda: close_all(fds))

    # ------------------------------------------------------------------ the machine

    def handle(self, event: Callable[P, None], *said: P.args, **named: P.kwargs) -> None:
        """Carry out every effect of `event`, a method of the machine: one that fails costs the
        session that it answers, and never the effects behind it."""
        for effect in self.machine.handle(self.clock.now_ms(), event, *said, **named):
            try:
                self._perform(effect)
            except (UnderstudyError, OSError) as error:
                what = type(effect).__name__
                self.record("gms.effect", f"{what} failed: {error}", "error")
                if isinstance(effect, ev.Respond):
                    self._refuse(effect, exhausted(error) if isinstance(error, OSError) else error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self.machine.next_deadline_ms()
        if due_ms is not None:
            delay_s = max(0.0, due_ms - self.clock.now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(
                delay_s, self.handle, self.machine.deadline_passed
            )

    def _at(self, instant_ms: float) -> str:
        ago = timedelta(milliseconds=self.clock.now_ms() - instant_ms)
        return rfc3339(self.clock.wall() - ago)

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: ev.Effect) -> None:
        """A subclass carries out the effects of its owner rule."""
        match effect:
            case ev.SendMessage(session, _, message):
                if isinstance(message, msg.KeptMsg):
                    self.forget_offer(session)  # what it sent was not needed, or is ours by now
                self._respond(effect, message)
            case ev.RefuseRequest(_, _, error):
                self._refuse(effect, error)
            case ev.SendRegion():
                self._send_region(effect)
            case ev.Watch(region, ends):
                self.watch.watch(region, ends=ends)
            case ev.MarkRetired(region):  # best effort: journal and survivors know it, too
                self._driver.submit(
                    lambda: epoch_file.mark_retired(self.path(region)),
                    failed=lambda error: self.warn(
                        f"could not mark {self.what} {region} as out of service: {error.message}"
                    ),
                )
            case ev.Release():
                self._release(effect)
            case ev.TakeBack(region, session, message):
                fds = self._offers.pop(session)
                self._call(effect, lambda: self._taken_back(region, fds, message))
            case ev.RecordEvent():
                self.record(effect.type, effect.message, effect.severity, **effect.data)
            case _:
                raise AssertionError(effect)

    def _call(self, effect: ev.Effect, work: Callable[[], Any]) -> None:
        """Have the driver's thread do it; the machine hears of its end."""
        self._driver.submit(
            work,
            lambda result: self.handle(self.machine.done, effect, result),
            lambda error: self.handle(self.machine.done, effect, error=error),
        )

    def _taken_back(self, region: str, fds: list[OwnedFd], message: msg.HandBackMsg) -> int:
        try:
            tensors, parts = self._parts(message)
        except BaseException:
            close_all(fds)
            raise
        self._store.take_back(region, fds, parts)
        return tensors

    @abc.abstractmethod
    def _parts(self, message: msg.HandBackMsg) -> tuple[int, Sequence[Part]]:
        """The number of tensors of a valid `message`, and what comes with it, in order."""

    def _respond(self, to: ev.Respond, message: Message, fds: Sequence[OwnedFd] = ()) -> None:
        """Send `message` with `fds` (taken), if that session is still there. Closing the last
        copies may free memory, which is not for the loop."""
        conn = self.place.conns.get(to.session)
        if conn is None:
            self._closer.submit(lambda: close_all(fds))
        else:
            conn.send(message, to.request_id, fds)

    def _refuse(self, to: ev.Respond, error: UnderstudyError) -> None:
        # A client's fault that was found late, on the driver's thread: a manifest, an offer.
        self.protocol_errors_total += isinstance(error, ProtocolError)
        conn = self.place.conns.get(to.session)
        if conn is not None:
            conn.fault(error, to.request_id)

    def _release(self, effect: ev.Release) -> None:
        """Memory that the driver does not take back counts as free all the same."""
        region = effect.region

        def failed(error: UnderstudyError) -> None:
            message = f"the driver could not free {self.what} {region}: {error.message}"
            self.record("gms.release", message, "error", **{self.what: region})
            self.handle(self.machine.done, effect)

        self._driver.submit(
            lambda: self._store.take(region, self.path(region)),
            lambda slabs: self._closer.submit(
                lambda: release_all(slabs),
                lambda _: self.handle(self.machine.done, effect),
                failed,
            ),
        )

    def _send_region(self, effect: ev.SendRegion) -> None:
        try:
            fds = attempt(lambda: self._store.export(effect.region))
        except UnderstudyError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and is_shortage(cause):
                error = exhausted(cause)
            self._refuse(effect, error)
            return
        self._respond(effect, effect.message, fds)

    def warn(self, why: str) -> None:
        """Record that a region's file cannot be used."""
        self.record(f"gms.{self.what}_file", why, "warning")

    def record(self, kind: str, message: str, severity: str = "info", **data: Any) -> None:
        about = {"device_uuid": self.device, "tag": self.tag}
        self.place.log.record(kind, message, severity, {**about, **data})


def open_fds() -> int:
    """The number of open descriptors; the limit, if none is left to look with."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # less the listing's own
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def exhausted(error: OSError) -> UnderstudyError:
    """What a client hears that asks for more than there is: clients can use up the descriptors of a
    server whose own need is known."""
    return UnderstudyError(
        "gms.server_exhausted", explain_shortage(error.errno, "the memory service")
    )
