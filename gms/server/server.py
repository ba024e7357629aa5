"""The server of one device: sockets on one side, the machine in the middle, the driver behind.

It translates and decides nothing: messages become events, effects are the performer's. It maps no
memory, and what it holds of it can be lost with it: readers hand it back to the next server.
"""

from __future__ import annotations

import asyncio
import os
import resource
import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any

from gms import epoch_file, names
from gms import messages as msg
from gms.core import events as ev
from gms.core.events import JournalRecord
from gms.core.machine import Machine
from gms.core.snapshot import epochs_in_full, snapshot
from gms.server.journal import Journal
from gms.server.leftovers import left_behind
from gms.server.performer import Performer, check_held, is_held
from gms.server.translate import event_of
from gms.server.vault import Vault
from gms.server.watch import EpochWatch
from gms.vmm.driver_thread import DriverThread
from gms.vmm.interface import Memory
from plumbing.errors import ProtocolError
from plumbing.part.observers import Observers
from plumbing.service.clock import Clock, SystemClock, rfc3339
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server

# How long a writer may make no progress. Reports come per tensor; reading one from the slowest
# network file system that anybody loads from takes seconds.
STALL_MS = 120_000.0

# How long ending waits for calls under way. Freeing continues in the kernel when we exit.
CLOSE_TIMEOUT_S = 5.0


class DeviceServer:
    """Serves `device` in `directory` until it is closed."""

    def __init__(
        self,
        directory: str,
        device: str,
        memory: Memory,
        capacity_bytes: int,
        *,
        stall_ms: float = STALL_MS,
        restarts_total: int = 0,
        tag: str = names.WEIGHTS,
        clock: Clock | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.directory, self.device, self.tag = directory, device, tag
        self.memory, self.capacity_bytes, self.stall_ms = memory, capacity_bytes, stall_ms
        self.restarts_total = restarts_total  # of its device's servers: who starts them knows
        self.clock = clock or SystemClock()
        self.log = log or EventLog(f"gms-{device}", self.clock)
        self._started = self.clock.wall()
        path = names.socket_path(directory, device, tag)
        self._server = Server(path, msg.CATALOGUE, self, service="gms")
        self._conns: dict[int, Connection] = {}
        self._observers = Observers(self.log, self.status)
        self._timer: asyncio.TimerHandle | None = None
        self._protocol_errors_total = 0

    async def start(self) -> None:
        """Take the path, look at what an earlier server left, serve.

        Raises:
            UnderstudyError: `wire.address_in_use`, another server has this device here;
                `gms.journal_unwritable`.
        """
        await self._server.start()
        # The path is ours; nobody is heard before this function yields to the loop.
        loop = asyncio.get_running_loop()
        self._journal = Journal(
            names.journal_path(self.directory, self.device, self.tag),
            has_epochs=bool(names.epochs_on_disk(self.directory, self.device, self.tag)),
        )
        self._driver = DriverThread(f"gms-driver-{self.device}", loop)
        self._lender = DriverThread(f"gms-lender-{self.device}", loop)
        self._closer = DriverThread(f"gms-closer-{self.device}", loop)
        self._vault = Vault(self.memory, self.directory)
        self._watch = EpochWatch(
            self.clock,
            self._driver,
            self._epoch_path,
            lambda epoch: self._handle(ev.EpochFree(epoch)),
            lambda epoch, pids: self._handle(ev.HoldersSeen(epoch, pids)),
            lambda epoch, said: self.log.record("gms.epoch", said, "warning", {"epoch": epoch}),
        )
        found = self._journal.loaded
        orphans = left_behind(self.directory, self.device, self.tag, found.record)
        self.machine = Machine(
            capacity_bytes=self.capacity_bytes,
            granularity_bytes=self.memory.granularity_bytes,
            stall_ms=self.stall_ms,
            new_epoch_id=lambda: uuid.uuid4().hex,
            orphans=orphans,
            is_journal_lost=found.is_lost,
            is_journal_behind=self._names_history(found.record),
            now_ms=self.clock.now_ms(),
        )
        self._performer = Performer(
            self.device,
            self.tag,
            self.machine.device,
            self._conns,
            self._handle,
            self.log,
            driver=self._driver,
            lender=self._lender,
            closer=self._closer,
            vault=self._vault,
            watch=self._watch,
            journal=self._journal,
        )
        for orphan in orphans:
            self._watch.add(orphan.id)
        said = f"serving {self.device}: {self.machine.device.state}"
        self.log.record("gms.serving", said, data={"device_uuid": self.device})
        self._arm()

    def _names_history(self, record: JournalRecord | None) -> bool:
        """Whether a server died before it had written that this epoch is out of service."""
        return record is not None and epoch_file.is_history(self._epoch_path(record.epoch))

    async def close(self) -> None:
        """Stop serving; sessions end, and memory lives on where somebody maps it."""
        await self._server.close()
        # In this order: what the driver gives away, the closer releases.
        for thread in (self._driver, self._lender, self._closer):
            await asyncio.to_thread(thread.close, CLOSE_TIMEOUT_S)
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()
        self._performer.close()
        for epoch in self.machine.device.epochs:
            for slab in self._vault.take(epoch):
                slab.release()
        self._journal.close()

    def status(self) -> dict[str, Any]:
        """What `gms status` shows of this device."""
        errors_total = self._protocol_errors_total + self._performer.protocol_errors_total
        return {
            "device_uuid": self.device,
            "tag": self.tag,
            "memory": self.memory.kind,
            "driver": self.memory.facts(),
            "pid": os.getpid(),
            "since": rfc3339(self._started),
            "restarts_total": self.restarts_total,
            **self.log.newest(),
            **snapshot(self.machine.device, self._at),
            "problem": self.machine.device.problem or self._watch.problem,
            "protocol_errors_total": errors_total,
            "open_fds": _open_fds(),
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
            elif isinstance(message, msg.Inspect):
                document = {**self.status(), "epochs": epochs_in_full(self.machine.device)}
                conn.send(msg.InspectReply(document), request_id)
            elif isinstance(message, msg.WatchMsg):
                self._observers.join(conn, message.since, request_id)
            elif isinstance(message, msg.Slabs | msg.Offer):
                self._take_offer(conn, message, request_id, fds)
            else:
                self._hear(conn, message, request_id)
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

    def _hear(self, conn: Connection, message: Message, request_id: int) -> None:
        if isinstance(message, msg.Attach | msg.Rejoin):
            self._watch_process(conn)
            if isinstance(message, msg.Rejoin):
                self._check_survivor(message)
        elif isinstance(message, msg.Allocate):
            session = self.machine.device.sessions.get(conn.id)
            if session is not None and session.epoch is not None:
                check_held(self._epoch_path(session.epoch))
        event = event_of(conn.id, conn.peer.pid, message, request_id)
        if isinstance(event, ev.Drop) and not event.even_if_mapped:
            event = replace(event, is_mapped=self._is_mapped())
        self._handle(event)

    def _is_mapped(self) -> bool:
        """Whether a process maps what is committed is asked of the kernel, not of sessions.

        Raises:
            UnderstudyError: `gms.server_exhausted`.
        """
        epoch = self.machine.device.committed
        return epoch is not None and is_held(self._epoch_path(epoch.id))

    def _check_survivor(self, message: msg.Rejoin) -> None:
        """It maps what it says, unless the epoch's file was removed under everybody."""
        if names.is_epoch_id(message.epoch):
            path = self._epoch_path(message.epoch)
            if os.path.exists(path):
                check_held(path)

    def _take_offer(
        self, conn: Connection, message: msg.Slabs | msg.Offer, request_id: int, fds: list[OwnedFd]
    ) -> None:
        """Collect what a survivor hands back; the machine hears of it when it is whole."""
        session = self.machine.device.sessions.get(conn.id)
        is_asked = session is not None and session.state is ev.SessionState.OFFERING
        if session is None or session.rejoin is None or not is_asked:
            raise ProtocolError(
                "gms.unexpected_message", f"{message.TYPE} is said by survivors that were asked"
            )
        count = len(session.rejoin.slab_sizes)
        have = self._performer.take_offered(conn.id, fds, count)
        if isinstance(message, msg.Slabs):
            return
        if have != count or message.epoch != session.rejoin.epoch:
            raise ProtocolError(
                "gms.bad_offer", f"an offer of {count} slabs came with {have} descriptors"
            )
        self._handle(event_of(conn.id, conn.peer.pid, message, request_id))

    def _watch_process(self, conn: Connection) -> None:
        """A session ends with the process that opened it, even if a forked child has its socket."""
        if conn.peer.pidfd is not None and conn.state is None:
            conn.state = conn.peer.pidfd.fileno()
            said = "its process is gone"
            asyncio.get_running_loop().add_reader(conn.state, conn.close, said)

    # ------------------------------------------------------------------ the machine

    def _handle(self, event: ev.Event) -> None:
        for effect in self.machine.handle(event, self.clock.now_ms()):
            self._performer.perform(effect)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self.machine.next_deadline_ms()
        if due_ms is not None:
            delay_s = max(0.0, due_ms - self.clock.now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(ev.Tick())

    # ------------------------------------------------------------------ small things

    def _epoch_path(self, epoch: str) -> str:
        return os.path.join(self.directory, names.epoch_file(self.device, epoch, self.tag))

    def _at(self, instant_ms: float) -> str:
        ago = timedelta(milliseconds=self.clock.now_ms() - instant_ms)
        return rfc3339(self.clock.wall() - ago)


def _open_fds() -> int:
    """How many there are: the limit, where none is left to look with."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # less the listing's own
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
