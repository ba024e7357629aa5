"""The server of one device: sockets on one side, the machine in the middle, the driver behind.

It decides nothing: messages go to the machine as events, and the performer carries out its effects.
It maps no memory, and all that it holds can be lost with it: readers hand it back to the next
server.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from datetime import timedelta
from typing import Any

from gms import epoch_file, names
from gms import messages as msg
from gms.core import events as ev
from gms.core.machine import DeviceMachine
from gms.core.snapshot import epochs_in_full, snapshot
from gms.server.driver_thread import DriverThread
from gms.server.journal import CommitJournal, left_behind
from gms.server.performer import DevicePerformer, Threads, check_held, is_held
from gms.server.vault import Vault
from gms.server.watch import EpochWatch
from gms.shortage import open_fds
from gms.vmm.interface import DeviceMemory, release_all
from plumbing.errors import ProtocolError
from plumbing.part.observers import Observers
from plumbing.service.clock import Clock, SystemClock, rfc3339
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server

# How long a writer may make no progress. It reports per tensor; reading one from the slowest
# network file system takes seconds.
STALL_MS = 120_000.0

# How long `close` waits for calls under way. Freeing continues in the kernel when we exit.
CLOSE_TIMEOUT_S = 5.0


class DeviceServer:
    """Serves `device` in `directory` until it is closed."""

    def __init__(
        self,
        directory: str,
        device: str,
        memory: DeviceMemory,
        capacity_bytes: int,
        *,
        stall_ms: float = STALL_MS,
        restarts_total: int = 0,
        clock: Clock | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.directory, self.device = directory, device
        self.memory, self.capacity_bytes, self.stall_ms = memory, capacity_bytes, stall_ms
        self.restarts_total = restarts_total  # of its device's servers, as the supervisor counts
        self.clock = clock or SystemClock()
        self.log = log or EventLog(f"gms-{device}", self.clock)
        self._started = self.clock.wall()
        path = names.socket_path(directory, device)
        self._server = Server(path, msg.CATALOGUE, self, service="gms")
        self._conns: dict[int, Connection] = {}
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
        self._journal = CommitJournal(
            names.journal_path(self.directory, self.device),
            has_epochs=bool(names.epochs_on_disk(self.directory, self.device)),
        )
        threads = (
            DriverThread(f"gms-{name}-{self.device}", asyncio.get_running_loop())
            for name in ("driver", "lender", "closer")
        )
        self._threads = Threads(*threads)
        self._vault = Vault(self.memory, self.directory)
        self._watch = EpochWatch(
            self.clock,
            self._threads.driver,
            self._epoch_path,
            lambda epoch: self._handle(ev.EpochFree(epoch)),
            lambda epoch, pids: self._handle(ev.HoldersSeen(epoch, pids)),
            lambda epoch, why: self.log.record("gms.epoch", why, "warning", {"epoch": epoch}),
        )
        found = self._journal.loaded
        orphans = left_behind(self.directory, self.device, found.record)
        self.machine = DeviceMachine(
            capacity_bytes=self.capacity_bytes,
            granularity_bytes=self.memory.granularity_bytes,
            stall_ms=self.stall_ms,
            new_epoch_id=lambda: uuid.uuid4().hex,
            orphans=orphans,
            is_journal_lost=found.is_lost,
            # A server may have died before it had written that this epoch is out of service.
            is_journal_behind=found.record is not None
            and epoch_file.is_history(self._epoch_path(found.record.epoch)),
            now_ms=self.clock.now_ms(),
        )
        self._performer = DevicePerformer(
            self.machine.device,
            self.device,
            self._conns,
            self._handle,
            self.log,
            self._threads,
            self._vault,
            self._watch,
            self._journal,
        )
        for orphan in orphans:
            self._watch.add(orphan.id)
        serving = f"serving {self.device}: {self.machine.device.state}"
        self.log.record("gms.serving", serving, data={"device_uuid": self.device})
        self._arm()

    async def close(self) -> None:
        """Stop serving; sessions end, and memory lives on where a process maps it."""
        await self._server.close()
        # In this order: the closer releases what the driver gives up.
        for thread in (self._threads.driver, self._threads.lender, self._threads.closer):
            await asyncio.to_thread(thread.close, CLOSE_TIMEOUT_S)
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()
        self._performer.close()
        for epoch in self.machine.device.epochs:
            release_all(self._vault.take(epoch))
        self._journal.close()

    def status(self) -> dict[str, Any]:
        """What `gms status` shows of this device."""
        errors_total = self._protocol_errors_total + self._performer.protocol_errors_total
        return {
            "device_uuid": self.device,
            "tag": names.WEIGHTS,
            "memory": self.memory.kind,
            "driver": self.memory.facts(),
            "pid": os.getpid(),
            "since": rfc3339(self._started),
            "restarts_total": self.restarts_total,
            **self.log.newest(),
            **snapshot(self.machine.device, self._at),
            "problem": self.machine.device.problem or self._watch.problem or self._server.problem,
            "protocol_errors_total": errors_total,
            "open_fds": open_fds(),
        }

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conns[conn.id] = conn
        conn.limit_frames(msg.REQUEST_BYTES_MAX)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        try:
            if isinstance(message, msg.StatusMsg):
                conn.send(msg.StatusReplyMsg(self.status()), request_id)
            elif isinstance(message, msg.InspectMsg):
                document = {**self.status(), "epochs": epochs_in_full(self.machine.device)}
                conn.send(msg.InspectReplyMsg(document), request_id)
            elif isinstance(message, msg.WatchMsg):
                self._observers.join(conn, message.since, request_id)
            elif isinstance(message, msg.SlabsMsg | msg.OfferMsg):
                self._take_offer(conn, message, request_id, fds)
            else:
                self._feed(conn, message, request_id)
        except ProtocolError:
            close_all(fds)
            self._protocol_errors_total += 1
            raise  # the wire answers with it and closes the connection

    def closed(self, conn: Connection, reason: str) -> None:
        if conn.state is not None:
            asyncio.get_running_loop().remove_reader(conn.state)
        del self._conns[conn.id]
        self._observers.leave(conn)
        self._performer.forget(conn.id)
        self._handle(ev.Closed(conn.id, reason))

    def _feed(self, conn: Connection, message: Message, request_id: int) -> None:
        """Check what only the kernel knows, then hand the message to the machine."""
        is_mapped = False
        if isinstance(message, msg.AttachMsg | msg.RejoinMsg):
            self._watch_process(conn)
            if isinstance(message, msg.RejoinMsg):
                self._check_survivor(message)
        elif isinstance(message, msg.AllocateMsg):
            session = self.machine.device.sessions.get(conn.id)
            if session is not None and session.epoch is not None:
                check_held(self._epoch_path(session.epoch))
        elif isinstance(message, msg.DropMsg) and not message.even_if_mapped:
            epoch = self.machine.device.committed
            is_mapped = epoch is not None and is_held(self._epoch_path(epoch.id))
        self._handle(ev.Received(conn.id, request_id, message, conn.peer.pid, is_mapped))

    def _check_survivor(self, message: msg.RejoinMsg) -> None:
        """It must hold the epoch's file, unless that was removed under all its holders.

        Raises:
            ProtocolError: `gms.bad_epoch`, `gms.epoch_not_held`.
            UnderstudyError: `gms.server_exhausted`.
        """
        if not names.is_epoch_id(message.epoch):
            raise ProtocolError("gms.bad_epoch", f"{message.epoch[:64]!r} is not an epoch id")
        path = self._epoch_path(message.epoch)
        if os.path.exists(path):
            check_held(path)

    def _take_offer(
        self,
        conn: Connection,
        message: msg.SlabsMsg | msg.OfferMsg,
        request_id: int,
        fds: list[OwnedFd],
    ) -> None:
        """Collect what a survivor hands back; the machine gets the offer when it is complete."""
        session = self.machine.device.sessions.get(conn.id)
        is_asked = session is not None and session.state is ev.SessionState.OFFERING
        if session is None or session.rejoin is None or not is_asked:
            raise ProtocolError(
                "gms.unexpected_message", f"only a survivor that was asked may send {message.TYPE}"
            )
        count = len(session.rejoin.slab_sizes)
        have = self._performer.take_offered(conn.id, fds, count)
        if isinstance(message, msg.SlabsMsg):
            return
        if have != count or message.epoch != session.rejoin.epoch:
            raise ProtocolError(
                "gms.bad_offer", f"an offer of {count} slabs came with {have} descriptors"
            )
        self._handle(ev.Received(conn.id, request_id, message, conn.peer.pid))

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

    # ------------------------------------------------------------------ small things

    def _epoch_path(self, epoch: str) -> str:
        return os.path.join(self.directory, names.epoch_file(self.device, epoch))

    def _at(self, instant_ms: float) -> str:
        ago = timedelta(milliseconds=self.clock.now_ms() - instant_ms)
        return rfc3339(self.clock.wall() - ago)
