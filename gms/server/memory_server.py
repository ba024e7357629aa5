"""What the two servers of a device have in common: sockets on one side, the machine in the middle,
the driver behind.

It decides nothing: messages go to the machine as events, and the performer carries out its effects.
It maps no memory, and all that it holds can be lost with it: the processes that map the memory
hand it back to the next server.
"""

from __future__ import annotations

import abc
import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from gms import epoch_file
from gms import messages as msg
from gms.core import events as ev
from gms.core.effects import Effects
from gms.server.driver_thread import DriverThread
from gms.server.memory_performer import MemoryPerformer
from gms.server.watch import MemoryWatch
from gms.shortage import open_fds
from gms.vmm.interface import DeviceMemory
from plumbing.errors import ProtocolError, UnderstudyError, explain_shortage
from plumbing.pod.models import device_of, model_at
from plumbing.pod.observers import Observers
from plumbing.service.clock import SystemClock, rfc3339
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Catalogue, Message
from plumbing.wire.server import Server

# How long `close` waits for calls under way. Freeing continues in the kernel when we exit.
CLOSE_TIMEOUT_S = 5.0


class Machine(Protocol):
    def handle(self, event: ev.DeviceEvent, now_ms: float) -> Effects: ...

    def next_deadline_ms(self) -> float | None: ...


M = TypeVar("M", bound=Machine)


class MemoryServer(Handler, abc.ABC, Generic[M]):
    """Serves one kind of memory of one device. A subclass sets the members that are declared here
    when it starts."""

    machine: M
    _performer: MemoryPerformer
    _watch: MemoryWatch
    _threads: Sequence[DriverThread]  # in the order in which they are closed

    def __init__(
        self,
        path: str,
        catalogue: Catalogue,
        service: str,
        source: str,
        device: str,
        tag: str,
        memory: DeviceMemory,
        restarts_total: int,
    ) -> None:
        """`service` and `source` name this server in answers to `hello` and in events."""
        self.device, self.tag, self.memory = device, tag, memory
        self.restarts_total = restarts_total  # of this server, as the supervisor counts
        self.clock = SystemClock()
        self.log = EventLog(source, self.clock)
        self._started = self.clock.wall()
        self._server = Server(path, catalogue, self, service=service)
        self._conns: dict[int, Connection] = {}
        self._observers = Observers(self.log, self.status)
        self._timer: asyncio.TimerHandle | None = None
        self._protocol_errors_total = 0

    @abc.abstractmethod
    async def start(self) -> None:
        """Take the path, find what an earlier server left, serve.

        Raises:
            UnderstudyError: `wire.address_in_use`, another server has this device here;
                `gms.journal_unwritable`.
        """

    async def close(self) -> None:
        """Stop serving; sessions end, and memory lives on where a process maps it."""
        await self._server.close()
        for thread in self._threads:
            await asyncio.to_thread(thread.close, CLOSE_TIMEOUT_S)
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()
        self._performer.close()

    def status(self) -> dict[str, Any]:
        """What `gms status` shows of this memory."""
        state = self._snapshot()
        errors_total = self._protocol_errors_total + self._performer.protocol_errors_total
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
            "protocol_errors_total": errors_total,
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
            self._performer.forget(conn.id)
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
        self._performer.forget(conn.id)
        self._handle(ev.Closed(conn.id, reason))

    def _watch_process(self, conn: Connection) -> None:
        """A session ends with the process that opened it, even if a forked child has its socket."""
        if conn.peer.pidfd is not None and conn.state is None:
            conn.state = conn.peer.pidfd.fileno()
            asyncio.get_running_loop().add_reader(conn.state, conn.close, "its process is gone")

    # ------------------------------------------------------------------ the machine

    def _handle(self, event: ev.DeviceEvent) -> None:
        self._performer.perform(self.machine.handle(event, self.clock.now_ms()))
        self._arm()

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
