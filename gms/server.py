"""The server of one device: sockets on one side, the machine in the middle, the driver behind.

It translates and decides nothing: messages become events, effects become driver calls, frames and
timers. Driver calls run on a thread, in order; the closes that free memory on another, so that
freeing a dead engine's memory does not delay a newcomer. It maps no memory.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from gms import epoch_file, journal, names
from gms import messages as msg
from gms.core import events as ev
from gms.core.machine import Machine
from gms.core.snapshot import epochs_in_full, snapshot
from gms.leftovers import left_behind
from gms.translate import event_of
from gms.vault import Vault
from gms.vmm.driver_thread import DriverThread
from gms.vmm.interface import Allocation, Memory
from gms.watch import EpochWatch
from understudy.errors import ProtocolError, UnderstudyError
from understudy.service.clock import Clock, SystemClock, rfc3339
from understudy.service.events import EventLog
from understudy.wire.connection import Connection
from understudy.wire.fds import OwnedFd, close_all
from understudy.wire.limits import FDS_PER_FRAME_MAX
from understudy.wire.messages import Message
from understudy.wire.server import Server

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
        tag: str = names.WEIGHTS,
        clock: Clock | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.directory, self.device, self.tag = directory, device, tag
        self.memory, self.capacity_bytes, self.stall_ms = memory, capacity_bytes, stall_ms
        self.clock = clock or SystemClock()
        self.log = log or EventLog(f"gms-{device}", self.clock)
        self._started = self.clock.wall()
        path = names.socket_path(directory, device, tag)
        self._server = Server(path, msg.CATALOGUE, self, service="gms")
        self._conns: dict[int, Connection] = {}
        self._arrived: dict[int, OwnedFd] = {}  # a new slab's descriptor, until it is sent
        self._timer: asyncio.TimerHandle | None = None
        self._protocol_errors_total = 0
        self._perform_by: Mapping[type[ev.Effect], Callable[[Any], None]] = {
            ev.TellWaiting: self._tell_waiting,
            ev.TellWriting: self._tell_writing,
            ev.TellAttached: self._tell_attached,
            ev.TellAllocated: self._tell_allocated,
            ev.TellCommitted: self._tell_committed,
            ev.Refuse: self._refuse,
            ev.OpenEpoch: self._open_epoch,
            ev.CreateSlab: self._create_slab,
            ev.SealEpoch: self._seal_epoch,
            ev.WriteJournal: self._write_journal,
            ev.ReleaseEpoch: self._release_epoch,
            ev.Record: self._record,
        }

    async def start(self) -> None:
        """Take the path, look at what an earlier server left, serve.

        Raises:
            UnderstudyError: `wire.address_in_use`, another server has this device here.
        """
        await self._server.start()
        # The path is ours; nobody is heard before this function yields to the loop.
        loop = asyncio.get_running_loop()
        self._driver = DriverThread(f"gms-driver-{self.device}", loop)
        self._closer = DriverThread(f"gms-closer-{self.device}", loop)
        self._vault = Vault(self.memory, self.directory)
        self._watch = EpochWatch(
            self.clock,
            self._driver,
            self._epoch_path,
            lambda epoch: self._handle(ev.EpochFree(epoch)),
            lambda epoch, pids: self._handle(ev.HoldersSeen(epoch, pids)),
        )
        orphans = left_behind(self.directory, self.device, self.tag)
        self.machine = Machine(
            capacity_bytes=self.capacity_bytes,
            granularity_bytes=self.memory.granularity_bytes,
            stall_ms=self.stall_ms,
            new_epoch_id=lambda: uuid.uuid4().hex,
            orphans=orphans,
        )
        for orphan in orphans:
            self._watch.add(orphan.id)
        said = f"serving {self.device}: {self.machine.device.state}"
        self.log.record("gms.serving", said, data={"device_uuid": self.device})

    async def close(self) -> None:
        """Stop serving; sessions end, and memory lives on where somebody maps it."""
        await self._server.close()
        # In this order: what the driver gives away, the closer releases.
        for thread in (self._driver, self._closer):
            await asyncio.to_thread(thread.close, CLOSE_TIMEOUT_S)
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()
        close_all(self._arrived.values())
        for epoch in self.machine.device.epochs:
            for slab in self._vault.take(epoch):
                slab.release()

    def status(self) -> dict[str, Any]:
        """What `gms status` shows of this device."""
        return {
            "device_uuid": self.device,
            "tag": self.tag,
            "memory": self.memory.kind,
            "pid": os.getpid(),
            "since": rfc3339(self._started),
            "as_of_event_id": self.log.last_id,
            **snapshot(self.machine.device, self._at),
            "protocol_errors_total": self._protocol_errors_total,
            "open_fds": len(os.listdir("/proc/self/fd")) - 1,  # less the listing's own
        }

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conns[conn.id] = conn

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)  # no message of ours to a server carries any; the wire has checked
        if isinstance(message, msg.Status):
            conn.send(msg.StatusReply(self.status()), request_id)
        elif isinstance(message, msg.Inspect):
            document = {**self.status(), "epochs": epochs_in_full(self.machine.device)}
            conn.send(msg.InspectReply(document), request_id)
        else:
            try:
                self._hear(conn, message, request_id)
            except ProtocolError:
                self._protocol_errors_total += 1
                raise  # the wire answers with it and closes the connection

    def closed(self, conn: Connection, reason: str) -> None:
        if conn.state is not None:
            asyncio.get_running_loop().remove_reader(conn.state)
        del self._conns[conn.id]
        self._handle(ev.Closed(conn.id, reason))

    def _hear(self, conn: Connection, message: Message, request_id: int) -> None:
        if isinstance(message, msg.Attach):
            self._watch_process(conn)
        elif isinstance(message, msg.Allocate):
            self._check_held(conn)
        self._handle(event_of(conn.id, conn.peer.pid, message, request_id))

    def _watch_process(self, conn: Connection) -> None:
        """A session ends with the process that opened it, even if a forked child has its socket."""
        if conn.peer.pidfd is not None and conn.state is None:
            conn.state = conn.peer.pidfd.fileno()
            said = "its process is gone"
            asyncio.get_running_loop().add_reader(conn.state, conn.close, said)

    def _check_held(self, conn: Connection) -> None:
        """No slab before the flock: without it, nothing would say that the memory is in use."""
        session = self.machine.device.sessions.get(conn.id)
        if session is not None and session.epoch is not None:
            if epoch_file.is_held(self._epoch_path(session.epoch)):
                return
            raise ProtocolError(
                "gms.epoch_not_held",
                "hold a shared flock on the epoch's file before the first allocation",
            )

    # ------------------------------------------------------------------ the machine

    def _handle(self, event: ev.Event) -> None:
        for effect in self.machine.handle(event, self.clock.now_ms()):
            self._perform_by[type(effect)](effect)
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

    # ------------------------------------------------------------------ effects: answers

    def _tell_waiting(self, effect: ev.TellWaiting) -> None:
        self._send(effect, msg.Waiting(effect.reason, effect.message))

    def _tell_writing(self, effect: ev.TellWriting) -> None:
        device = self.machine.device
        answer = msg.Writing(
            epoch=effect.epoch,
            epoch_file=names.epoch_file(self.device, effect.epoch, self.tag),
            capacity_bytes=device.capacity_bytes,
            free_bytes=device.free_bytes,
            granularity_bytes=device.granularity_bytes,
        )
        self._send(effect, answer)

    def _tell_attached(self, effect: ev.TellAttached) -> None:
        self._driver.submit(
            lambda: self._vault.export(effect.epoch),
            lambda fds: self._send_epoch(effect, fds),
            lambda error: self._refuse(ev.Refuse(effect.session, effect.request_id, error)),
        )

    def _send_epoch(self, effect: ev.TellAttached, fds: list[OwnedFd]) -> None:
        conn = self._conns.get(effect.session)
        epoch = self.machine.device.epochs.get(effect.epoch)
        if conn is None or epoch is None:
            # Perhaps the last copies: closing them may free, which is not for the loop.
            self._closer.submit(lambda: close_all(fds))
            return
        answer = msg.Attached(
            epoch=epoch.id,
            epoch_file=names.epoch_file(self.device, epoch.id, self.tag),
            identity=dict(epoch.identity or {}),
            layout_hash=epoch.layout_hash,
            slab_sizes=tuple(epoch.slab_sizes),
            manifest=epoch.manifest,
        )
        conn.send(answer, effect.request_id, fds[:FDS_PER_FRAME_MAX])
        for first in range(FDS_PER_FRAME_MAX, len(fds), FDS_PER_FRAME_MAX):
            more = fds[first : first + FDS_PER_FRAME_MAX]
            conn.send(msg.Slabs(epoch.id, first), effect.request_id, more)

    def _tell_allocated(self, effect: ev.TellAllocated) -> None:
        fd = self._arrived.pop(effect.session)
        self._send(effect, msg.Allocated(effect.slab, effect.size_bytes), fd)

    def _tell_committed(self, effect: ev.TellCommitted) -> None:
        self._send(effect, msg.Committed(effect.epoch))

    def _refuse(self, effect: ev.Refuse) -> None:
        conn = self._conns.get(effect.session)
        if conn is not None:
            conn.fault(effect.error, effect.request_id)

    def _send(self, effect: ev.Answer, message: Message, *fds: OwnedFd) -> None:
        conn = self._conns.get(effect.session)
        if conn is None:
            self._closer.submit(lambda: close_all(fds))
        else:
            conn.send(message, effect.request_id, fds)

    # ------------------------------------------------------------------ effects: the driver

    def _open_epoch(self, effect: ev.OpenEpoch) -> None:
        name = names.epoch_file(self.device, effect.epoch, self.tag)
        self._driver.submit(
            lambda: self._vault.open_epoch(effect.epoch, name),
            lambda _: self._handle(ev.EpochOpened(effect.session)),
            lambda error: self._handle(ev.DriverFailed(effect.session, error)),
        )

    def _create_slab(self, effect: ev.CreateSlab) -> None:
        self._driver.submit(
            lambda: self._vault.create(effect.epoch, effect.size_bytes),
            lambda fd: self._slab_created(effect.session, fd),
            lambda error: self._handle(ev.DriverFailed(effect.session, error)),
        )

    def _slab_created(self, session: int, fd: OwnedFd) -> None:
        self._arrived[session] = fd
        self._handle(ev.SlabCreated(session))
        unclaimed = self._arrived.pop(session, None)  # its writer left in the meantime
        if unclaimed is not None:
            self._closer.submit(unclaimed.close)

    def _seal_epoch(self, effect: ev.SealEpoch) -> None:
        self._driver.submit(
            lambda: self._vault.seal(effect.epoch),
            lambda _: self._handle(ev.Sealed(effect.session)),
            lambda error: self._handle(ev.DriverFailed(effect.session, error)),
        )

    def _write_journal(self, effect: ev.WriteJournal) -> None:
        path = names.journal_path(self.directory, self.device, self.tag)
        session = effect.session

        def done(_: None) -> None:
            if session is not None:
                self._handle(ev.Journalled(session))

        def failed(error: UnderstudyError) -> None:
            if session is not None:
                self._handle(ev.JournalFailed(session, error.message))
            else:  # harmless: it names an epoch whose file is free, which a restart finds out
                self.log.record("gms.journal", error.message, severity="warning")

        self._driver.submit(lambda: journal.write(path, effect.record), done, failed)

    def _release_epoch(self, effect: ev.ReleaseEpoch) -> None:
        """Take it from the vault (in order with other calls), close it, then watch its file."""
        epoch = effect.epoch

        def close(slabs: list[Allocation]) -> None:
            for slab in slabs:
                slab.release()

        self._driver.submit(
            lambda: self._vault.take(epoch),
            lambda slabs: self._closer.submit(
                lambda: close(slabs), lambda _: self._watch.add(epoch)
            ),
        )

    def _record(self, effect: ev.Record) -> None:
        data = {"device_uuid": self.device, **effect.data}
        self.log.record(effect.type, effect.message, effect.severity, data)

    # ------------------------------------------------------------------ small things

    def _epoch_path(self, epoch: str) -> str:
        return os.path.join(self.directory, names.epoch_file(self.device, epoch, self.tag))

    def _at(self, instant_ms: float) -> str:
        ago = timedelta(milliseconds=self.clock.now_ms() - instant_ms)
        return rfc3339(self.clock.wall() - ago)
