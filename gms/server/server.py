"""The server of one device's weights; `memory_server.py` says what such a server is."""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import Any

from gms import epoch_file, names, pool_file
from gms import messages as msg
from gms.core import events as ev
from gms.core.machine import DeviceMachine
from gms.core.snapshot import epochs_in_full, snapshot
from gms.server.devices import DeviceUsage
from gms.server.driver_thread import DriverThread
from gms.server.journal import CommitJournal, left_behind, peek
from gms.server.memory_server import MemoryServer, is_held
from gms.server.neighbours import bytes_elsewhere
from gms.server.performer import DevicePerformer, Threads
from gms.server.vault import Vault
from gms.server.watch import MemoryWatch
from gms.vmm.interface import DeviceMemory
from plumbing.errors import ProtocolError
from plumbing.pod.models import device_of
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message

# How long a writer may make no progress. It reports per tensor; reading one from the slowest
# network file system takes seconds.
STALL_MS = 120_000.0


class DeviceServer(MemoryServer[DeviceMachine]):
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
        counts_kv: bool = True,
    ) -> None:
        """`counts_kv`: `capacity_bytes` is the limit of weights and KV memory together."""
        super().__init__(
            names.socket_path(directory, device),
            msg.CATALOGUE,
            "gms",
            f"gms-{device}",
            device,
            names.WEIGHTS,
            memory,
            restarts_total,
        )
        self.directory, self.capacity_bytes, self.stall_ms = directory, capacity_bytes, stall_ms
        self._usage = None if names.is_host(device) else DeviceUsage(device_of(device))
        self.counts_kv = counts_kv

    async def start(self) -> None:
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
        self._watch = MemoryWatch(
            self.clock,
            self._threads.driver,
            self._epoch_path,
            lambda epoch: self._handle(ev.EpochFree(epoch, host_copy(self.directory, self.device))),
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
            offloaded=found.offloaded,
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
        await super().close()
        self._vault.close()
        self._journal.close()

    def _snapshot(self) -> dict[str, Any]:
        used_bytes = None if self._usage is None else self._usage.used_bytes()
        return {**snapshot(self.machine.device, self._at), "device_used_bytes": used_bytes}

    def _in_full(self) -> dict[str, Any]:
        return {"epochs": epochs_in_full(self.machine.device)}

    def opened(self, conn: Connection) -> None:
        super().opened(conn)
        conn.limit_frames(msg.REQUEST_BYTES_MAX)

    def _feed(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        is_mapped, kv_bytes, copy = False, None, None
        if self.counts_kv and isinstance(message, msg.AttachMsg | msg.AllocateMsg):
            kv_bytes = pool_file.kv_bytes(self.directory, self.device)
            kv_bytes += bytes_elsewhere(self.directory, self.device)
        match message:
            case msg.SlabsMsg() | msg.OfferMsg():
                if not self._take_offer(conn, message, fds):
                    return
            case msg.AttachMsg():
                self._watch_process(conn)
            case msg.RejoinMsg(epoch=epoch):
                self._watch_process(conn)
                self._check_survivor(epoch)
            case msg.AllocateMsg():
                session = self.machine.device.sessions.get(conn.id)
                if session is not None and session.epoch is not None:
                    _check_held(self._epoch_path(session.epoch))
            case msg.DropMsg(even_if_mapped=False) | msg.OffloadMsg():
                committed = self.machine.device.committed
                is_mapped = committed is not None and is_held(self._epoch_path(committed.id))
                copy = host_copy(self.directory, self.device)
        pid = conn.peer.pid
        self._handle(ev.Received(conn.id, request_id, message, pid, is_mapped, kv_bytes, copy))

    def _check_survivor(self, epoch: str) -> None:
        """It must hold the epoch's file, unless that was removed under all its holders.

        Raises:
            ProtocolError: `gms.bad_epoch`, `gms.epoch_not_held`.
            UnderstudyError: `gms.server_exhausted`.
        """
        if not names.is_epoch_id(epoch):
            raise ProtocolError("gms.bad_epoch", f"{epoch[:64]!r} is not an epoch id")
        path = self._epoch_path(epoch)
        if os.path.exists(path):
            _check_held(path)

    def _take_offer(
        self, conn: Connection, message: msg.SlabsMsg | msg.OfferMsg, fds: list[OwnedFd]
    ) -> bool:
        """Collect what a survivor hands back; returns whether the offer is complete."""
        session = self.machine.device.sessions.get(conn.id)
        is_asked = session is not None and session.state is ev.SessionState.OFFERING
        if session is None or session.rejoin is None or not is_asked:
            raise ProtocolError(
                "gms.unexpected_message", f"only a survivor that was asked may send {message.TYPE}"
            )
        count = len(session.rejoin.slab_sizes)
        have = self._performer.take_offered(conn.id, fds)
        if have > count:
            raise ProtocolError(
                "gms.bad_offer", f"{have} descriptors came for an epoch of {count} slabs"
            )
        if isinstance(message, msg.SlabsMsg):
            return False
        if have != count or message.epoch != session.rejoin.epoch:
            raise ProtocolError(
                "gms.bad_offer", f"an offer of {count} slabs came with {have} descriptors"
            )
        return True

    def _epoch_path(self, epoch: str) -> str:
        return os.path.join(self.directory, names.epoch_file(self.device, epoch))


def host_copy(directory: str, device: str) -> ev.JournalRecord | None:
    """The host copy of the weights of `device`, if a living process besides its server holds it:
    a server can be killed at any moment, and its keeper then hands the copy back."""
    host = names.offload_device(device)
    record = peek(names.journal_path(directory, host))
    if record is None:
        return None
    path = os.path.join(directory, names.epoch_file(host, record.epoch))
    return record if is_held(path) and not epoch_file.is_history(path) else None


def _check_held(path: str) -> None:
    """No slab before the flock: without it, nothing would show that the memory is in use.

    Raises:
        ProtocolError: `gms.epoch_not_held`.
        UnderstudyError: `gms.server_exhausted`, the file cannot be opened.
    """
    if not is_held(path):
        raise ProtocolError(
            "gms.epoch_not_held",
            "hold a shared flock on the epoch's file before the first allocation",
        )
