"""What the two servers of a device have in common: sockets on one side, the machine in the middle,
the driver behind.

A server decides nothing: messages go to the machine as events, and the server carries out its
effects. It maps no memory, and all that it holds can be lost with it: the processes that map the
memory hand it back to the next server.

`MemoryWatch` watches the files of unowned memory until the kernel says that they are free. Nothing
announces the release of a flock, so the watch polls: every millisecond for the first second (a
killed process is usually gone by then), then every ten. A try costs microseconds.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from gms import epoch_file
from gms import messages as msg
from gms.core import events as ev
from gms.core.events import Effects
from gms.server.driver_thread import DriverThread
from gms.shortage import open_fds
from gms.vmm.interface import Allocation, DeviceMemory, release_all
from plumbing.errors import ProtocolError, UnderstudyError, explain_shortage
from plumbing.pod.models import device_of, model_at
from plumbing.pod.observers import Observers
from plumbing.service.clock import Clock, SystemClock, rfc3339
from plumbing.service.events import EventLog
from plumbing.service.procfs import holders_of
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Catalogue, Message
from plumbing.wire.server import Server

FAST_MS, FAST_FOR_MS = 1.0, 1000.0
SLOW_MS = 10.0
HOLDERS_AFTER_MS = 100.0  # a scan of /proc takes milliseconds: only for those that linger
HOLDERS_EVERY_MS = 1000.0

logger = logging.getLogger(__name__)


class MemoryWatch:
    """Watches epochs or KV pools by their ids: calls `free(name)` once for each that is free, and
    `holders(name, pids)` while it waits. `look` says whether a file is free; that of an epoch is
    then removed, while a KV pool outlives its holders.

    A file that cannot be opened counts as held: `failed(name, message)` is called once for each
    error, and `problem` holds it while it lasts.
    """

    def __init__(
        self,
        clock: Clock,
        thread: DriverThread,
        path_of: Callable[[str], str],
        free: Callable[[str], None],
        holders: Callable[[str, tuple[int, ...]], None],
        failed: Callable[[str, str], object],
        *,
        what: str = "epoch",
        blocked: str = "load",
        look: Callable[[str], bool] = epoch_file.remove_if_free,
    ) -> None:
        self._clock, self._thread, self._path_of = clock, thread, path_of
        self._free, self._holders, self._failed = free, holders, failed
        self._what, self._blocked, self._look = what, blocked, look
        self._since_ms: dict[str, float] = {}
        self._scan_ms: dict[str, float] = {}
        self._problems: dict[str, str] = {}  # by name, of the last try
        self._reported: set[tuple[str, str]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def problem(self) -> str | None:
        """Why it is unknown whether one of them is still mapped."""
        return next(iter(self._problems.values()), None)

    def add(self, name: str) -> None:
        """Watch the file of `name` from now on."""
        now_ms = self._clock.now_ms()
        self._since_ms[name] = now_ms
        self._scan_ms[name] = now_ms + HOLDERS_AFTER_MS
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(0, self._try)

    def discard(self, name: str) -> None:
        """Stop watching the file of `name`."""
        self._since_ms.pop(name, None)
        self._scan_ms.pop(name, None)
        self._problems.pop(name, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._since_ms.clear()

    def _try(self) -> None:
        self._timer = None
        now_ms = self._clock.now_ms()
        freed = [name for name in self._since_ms if self._is_gone(name)]
        for name in freed:
            self.discard(name)
        for name in self._since_ms:
            if self._scan_ms[name] <= now_ms:
                self._scan_ms[name] = now_ms + HOLDERS_EVERY_MS
                self._find_holders(name)
        if self._since_ms:
            is_fresh = any(now_ms - since < FAST_FOR_MS for since in self._since_ms.values())
            delay_s = (FAST_MS if is_fresh else SLOW_MS) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._try)
        for name in freed:
            self._free(name)
        for problem in self._problems.items():
            if problem not in self._reported:
                self._reported.add(problem)
                self._failed(*problem)

    def _is_gone(self, name: str) -> bool:
        path = self._path_of(name)
        try:
            is_free = self._look(path)
        except OSError as error:  # out of descriptors, for one: not known is not free
            self._problems[name] = (
                f"cannot check whether {self._what} {name} is still mapped, so no engine may "
                f"{self._blocked} until {path} can be checked: {explain_shortage(error.errno)}"
            )
            return False
        self._problems.pop(name, None)
        return is_free

    def _find_holders(self, name: str) -> None:
        path = self._path_of(name)

        def find() -> tuple[int, ...]:
            try:
                found = os.stat(path)
            except OSError:
                return ()
            # Not ourselves: this watch may be trying the lock on the loop.
            mine = os.getpid()
            return tuple(pid for pid in holders_of(found.st_dev, found.st_ino) if pid != mine)

        def failed(error: UnderstudyError) -> None:
            logger.debug("could not find the holders of %s: %s", name, error)

        self._thread.submit(find, lambda pids: self._holders(name, pids), failed)


# How long `close` waits for calls under way. Freeing continues in the kernel when we exit.
CLOSE_TIMEOUT_S = 5.0


class Machine(Protocol):
    def handle(self, event: ev.DeviceEvent, now_ms: float) -> Effects: ...

    def next_deadline_ms(self) -> float | None: ...


M = TypeVar("M", bound=Machine)


class MemoryServer(Handler, abc.ABC, Generic[M]):
    """Serves one kind of memory of one device in `directory` until it is closed.

    Driver calls run on one thread, in order; closes that free memory run on the closer. A subclass
    sets the members that are declared here, its machine and its watch in `_begin`.
    """

    tag: ClassVar[str]
    service: ClassVar[str]  # in answers to `hello`
    catalogue: ClassVar[Catalogue]
    threads: ClassVar[Sequence[str]]  # in the order in which they are closed
    machine: M
    _watch: MemoryWatch

    def __init__(
        self,
        directory: str,
        device: str,
        memory: DeviceMemory,
        path: str,
        source: str,
        restarts_total: int,
    ) -> None:
        """`path` of its socket; `source` names this server in events."""
        self.directory, self.device, self.memory = directory, device, memory
        self.restarts_total = restarts_total  # of this server, as the supervisor counts
        self.clock = SystemClock()
        self.log = EventLog(source, self.clock)
        self._started = self.clock.wall()
        self._server = Server(path, self.catalogue, self, service=self.service)
        self._conns: dict[int, Connection] = {}
        self._offered: dict[int, list[OwnedFd]] = {}  # by session, until they are adopted
        self._observers = Observers(self.log, self.status)
        self._timer: asyncio.TimerHandle | None = None
        self._protocol_errors_total = 0

    async def start(self) -> None:
        """Take the path, find what an earlier server left, serve.

        Raises:
            UnderstudyError: `wire.address_in_use`, another server has this device here;
                `gms.journal_unwritable`.
        """
        await self._server.start()
        # The path is ours; no client is read before this function yields to the loop.
        loop = asyncio.get_running_loop()
        self._threads = {
            name: DriverThread(f"{self.service}-{name}-{self.device}", loop)
            for name in self.threads
        }
        self._driver, self._closer = self._threads["driver"], self._threads["closer"]
        try:
            state = self._begin()
        except BaseException:  # it may be started again
            await self._server.close()
            for thread in self._threads.values():
                thread.close(0)
            raise
        serving = f"serving the {self.tag} of {self.device}: {state}"
        self.log.record("gms.serving", serving, data={"device_uuid": self.device})
        self._arm()

    async def close(self) -> None:
        """Stop serving; sessions end, and memory lives on where a process maps it."""
        await self._server.close()
        for thread in self._threads.values():
            await asyncio.to_thread(thread.close, CLOSE_TIMEOUT_S)
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()
        for fds in self._offered.values():
            close_all(fds)

    @abc.abstractmethod
    def _begin(self) -> str:
        """Set up machine and watch on what an earlier server left; returns the state."""

    def status(self) -> dict[str, Any]:
        """What `gms status` shows of this memory."""
        state = self._snapshot()
        return {
            "device_uuid": self.device,
            "device": device_of(self.device),
            "model": model_at(self.device) or None,
            "tag": self.tag,
            "memory": self.memory.kind,
            "driver": self.memory.facts(),
            "pid": os.getpid(),
            "since": rfc3339(self._started),
            "restarts_total": self.restarts_total,
            **self.log.newest(),
            **state,
            "problem": state.get("problem") or self._watch.problem or self._server.problem,
            "protocol_errors_total": self._protocol_errors_total,
            "open_fds": open_fds(),
        }

    @abc.abstractmethod
    def _snapshot(self) -> dict[str, Any]:
        """The machine's part of `status`."""

    @abc.abstractmethod
    def _in_full(self) -> dict[str, Any]:
        """What `inspect` adds to `status`."""

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conns[conn.id] = conn

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        try:
            match message:
                case msg.StatusMsg():
                    conn.send(msg.StatusReplyMsg(self.status()), request_id)
                case msg.InspectMsg():
                    document = {**self.status(), **self._in_full()}
                    conn.send(msg.InspectReplyMsg(document), request_id)
                case msg.WatchMsg(since):
                    self._observers.join(conn, since, request_id)
                case _:
                    self._feed(conn, message, request_id, fds)
        except UnderstudyError as error:  # the wire answers with it and closes the connection
            self._protocol_errors_total += isinstance(error, ProtocolError)
            self._forget_offer(conn.id)
            raise
        finally:
            close_all(fds)

    @abc.abstractmethod
    def _feed(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        """Check what only the kernel knows, then hand the message to the machine. Descriptors that
        are kept must be detached from `fds`, which is closed afterwards."""

    def closed(self, conn: Connection, reason: str) -> None:
        if conn.state is not None:
            asyncio.get_running_loop().remove_reader(conn.state)
        del self._conns[conn.id]
        self._observers.leave(conn)
        self._forget_offer(conn.id)
        self._handle(ev.Closed(conn.id, reason))

    def _watch_process(self, conn: Connection) -> None:
        """A session ends with the process that opened it, even if a forked child has its socket."""
        if conn.peer.pidfd is not None and conn.state is None:
            conn.state = conn.peer.pidfd.fileno()
            asyncio.get_running_loop().add_reader(conn.state, conn.close, "its process is gone")

    def _take_offered(self, session: int, fds: Sequence[OwnedFd]) -> int:
        """Keep descriptors that a survivor hands back (taken); returns how many there are now."""
        kept = self._offered.setdefault(session, [])
        kept += [OwnedFd(fd.detach()) for fd in fds]
        return len(kept)

    def _forget_offer(self, session: int) -> None:
        """Close what the session has offered: it has ended, or its offer is not needed."""
        fds = self._offered.pop(session, [])
        if fds:
            self._closer.submit(lambda: close_all(fds))

    # ------------------------------------------------------------------ the machine

    def _handle(self, event: ev.DeviceEvent) -> None:
        """Carry out every effect of `event`: one that fails costs the session that it answers, and
        never the effects behind it."""
        for effect in self.machine.handle(event, self.clock.now_ms()):
            try:
                self._perform(effect)
            except (UnderstudyError, OSError) as error:
                what = type(effect).__name__
                self.log.record("gms.effect", f"{what} failed: {error}", severity="error")
                if isinstance(effect, ev.Respond) and effect.session in self._conns:
                    self._conns[effect.session].close(f"it cannot be answered: {error}")
        self._arm()

    @abc.abstractmethod
    def _perform(self, effect: ev.DeviceEffect) -> None: ...

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self.machine.next_deadline_ms()
        if due_ms is not None:
            delay_s = max(0.0, due_ms - self.clock.now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._timer = None
        self._handle(ev.DeadlinePassed())

    def _at(self, instant_ms: float) -> str:
        ago = timedelta(milliseconds=self.clock.now_ms() - instant_ms)
        return rfc3339(self.clock.wall() - ago)

    # ------------------------------------------------------------------ effects that both have

    def _respond(self, to: ev.Respond, message: Message, fds: Sequence[OwnedFd] = ()) -> None:
        """Send `message` with `fds` (taken), if that session is still there. Closing the last
        copies may free memory, which is not for the loop."""
        conn = self._conns.get(to.session)
        if conn is None:
            self._closer.submit(lambda: close_all(fds))
        else:
            conn.send(message, to.request_id, fds)

    def _refuse(self, to: ev.Respond, error: UnderstudyError) -> None:
        # A client's fault that was found late, on the driver's thread: a manifest, an offer.
        self._protocol_errors_total += isinstance(error, ProtocolError)
        conn = self._conns.get(to.session)
        if conn is not None:
            conn.fault(error, to.request_id)

    def _record(self, effect: ev.RecordEvent) -> None:
        data = {"device_uuid": self.device, **effect.data}
        self.log.record(effect.type, effect.message, effect.severity, data)

    def _close_slabs(
        self, what: str, name: str, slabs: list[Allocation], then: Callable[[], None]
    ) -> None:
        """Free the memory of an `epoch` or `pool` on the closer's thread, then call `then`, also if
        the driver does not take it back."""

        def failed(error: UnderstudyError) -> None:
            message = f"the driver could not free the memory of {what} {name}: {error.message}"
            self.log.record("gms.release", message, severity="error", data={what: name})
            then()

        self._closer.submit(lambda: release_all(slabs), lambda _: then(), failed)

    def _warn(self, event_type: str, what: str) -> Callable[[UnderstudyError], None]:
        """For a call whose failure is only a warning: the journal, or the kernel, knows it too."""

        def failed(error: UnderstudyError) -> None:
            self.log.record(event_type, f"could not {what}: {error.message}", "warning")

        return failed


def is_held(path: str) -> bool:
    """Whether any process holds the file of an epoch or pool.

    Raises:
        UnderstudyError: `gms.server_exhausted`, the file cannot be opened.
    """
    try:
        return epoch_file.is_held(path)
    except OSError as error:
        why = explain_shortage(error.errno, "the memory service")
        raise UnderstudyError(
            "gms.server_exhausted", f"the memory service cannot open {path}: {why}"
        ) from error
