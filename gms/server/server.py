"""The servers of one place's weights and of its KV memory; `memory_server.py` says what such a
server is.

What answers an engine that wakes and never blocks (copies of descriptors of host memory) needs no
thread: on a machine whose CPUs are all busy, each change of threads may wait for milliseconds.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from gms import epoch_file, names
from gms import messages as msg
from gms.core import events as ev
from gms.core.kv import KvMachine
from gms.core.snapshot import epochs_in_full, kv_snapshot, pools_in_full, weights_snapshot
from gms.core.weights import WeightsMachine
from gms.server.devices import DeviceUsage
from gms.server.driver_thread import attempt
from gms.server.journal import CommitJournal, left_behind, peek, read_tokens, write_tokens
from gms.server.memory_server import MemoryServer, is_held
from gms.server.slab_store import KvRoom, KvStore, WeightsStore
from gms.vmm.interface import DeviceMemory
from plumbing.errors import UnderstudyError
from plumbing.pod.models import device_of
from plumbing.service.procfs import holders_of
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import FDS_PER_FRAME_MAX, MANIFEST_FRAME_BYTES_MAX

# How long a writer may make no progress. It reports per tensor; reading one from the slowest
# network file system takes seconds.
STALL_MS = 120_000.0

T = TypeVar("T")


class WeightsServer(MemoryServer[WeightsMachine, WeightsStore]):
    """The weights of one place."""

    tag, service, what, blocked = names.WEIGHTS, "gms", "epoch", "load"
    not_held, bad_id, file_event = "gms.epoch_not_held", "gms.bad_epoch", "gms.epoch_file"
    # The closer is the last, since it releases what the driver gives up.
    threads: ClassVar[Sequence[str]] = ("driver", "lender", "closer")

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
        super().__init__(directory, device, memory, restarts_total)
        self.capacity_bytes, self.stall_ms = capacity_bytes, stall_ms
        self._usage = None if names.is_host(device) else DeviceUsage(device_of(device))
        self.counts_kv = counts_kv
        self._arrived: dict[int, OwnedFd] = {}  # a new slab's descriptor, until it is sent

    def _begin(self) -> None:
        self._journal = CommitJournal(
            names.journal_path(self.directory, self.device),
            has_epochs=bool(names.epochs_on_disk(self.directory, self.device)),
        )
        self._store = WeightsStore(self.memory)
        found = self._journal.loaded
        self.machine = WeightsMachine(
            capacity_bytes=self.capacity_bytes,
            granularity_bytes=self.memory.granularity_bytes,
            stall_ms=self.stall_ms,
            new_epoch_id=lambda: uuid.uuid4().hex,
            orphans=left_behind(self.directory, self.device, found.record),
            is_journal_lost=found.is_lost,
            offloaded=found.offloaded,
            # A server may have died before it had written that this epoch is out of service.
            is_journal_behind=found.record is not None
            and epoch_file.is_retired(self._path(found.record.epoch)),
            now_ms=self.clock.now_ms(),
        )

    async def close(self) -> None:
        await super().close()
        close_all(self._arrived.values())
        self._journal.close()

    def _file(self, region: str) -> str:
        return names.epoch_file(self.device, region)

    def _is_free(self, region: str) -> None:
        self._handle(ev.RegionFree(region, host_copy(self.directory, self.device)))

    @property
    def held_bytes(self) -> int:
        epoch = self.machine.committed
        expected = [each.size_bytes for each in self.machine.orphans if each.expected]
        return epoch.size_bytes if epoch is not None else sum(expected)

    @property
    def all_bytes(self) -> int:
        """Of every epoch, whatever becomes of it."""
        return sum(epoch.size_bytes for epoch in self.machine.regions.values())

    def _snapshot(self) -> dict[str, Any]:
        used_bytes = None if self._usage is None else self._usage.used_bytes()
        return {**weights_snapshot(self.machine, self._at), "device_used_bytes": used_bytes}

    def _in_full(self) -> dict[str, Any]:
        return {"epochs": epochs_in_full(self.machine)}

    def _feed(self, conn: Connection, event: ev.Received) -> None:
        is_mapped, beside_bytes, copy = False, None, None
        match event.message:
            case msg.AttachMsg():
                self._watch_process(conn)
            case msg.AllocateMsg():
                session = self.machine.sessions.get(conn.id)
                if session is not None and session.region is not None:
                    self._check_held(session.region)
            case msg.DropMsg(even_if_mapped=False) | msg.OffloadMsg():
                committed = self.machine.committed
                is_mapped = committed is not None and is_held(self._path(committed.id))
                copy = host_copy(self.directory, self.device)
        if self.counts_kv and isinstance(event.message, msg.AttachMsg | msg.AllocateMsg):
            beside_bytes = self.bytes_beside
        self._handle(
            ev.Received(
                *(event.session, event.request_id, event.message, event.pid),
                *(is_mapped, beside_bytes, copy),
            )
        )

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.SendMessage(session, _, msg.AllocatedMsg() as message):
                self._respond(effect, message, [self._arrived.pop(session)])
            case ev.GrantWriting():
                self._grant_writing(effect)
            case ev.SendEpoch(epoch=epoch):
                self._lender.submit(
                    lambda: self._store.export(epoch, writable=False),
                    lambda fds: self._send_epoch(effect, fds),
                    lambda error: self._refuse(effect, error),
                )
            case ev.OpenEpoch(session, epoch):
                self._call(
                    session,
                    lambda: self._store.open_epoch(epoch, self._path(epoch)),
                    lambda _: ev.EpochOpened(session),
                )
            case ev.CreateSlab(session, epoch, size_bytes):
                self._driver.submit(
                    lambda: self._store.create(epoch, size_bytes),
                    lambda fd: self._slab_created(session, fd),
                    lambda error: self._slab_failed(session, error),
                )
            case ev.SealEpoch(session, epoch, manifest):
                self._call(
                    session,
                    lambda: self._store.seal(epoch, manifest),
                    lambda tensors: ev.Sealed(session, tensors),
                )
            case ev.WriteJournal():
                self._write_journal(effect)
            case _:
                super()._perform(effect)

    def _grant_writing(self, effect: ev.GrantWriting) -> None:
        conn = self._conns.get(effect.session)
        if conn is not None:  # only a writer may send frames of 16 MiB: it owes a manifest
            conn.limit_frames(MANIFEST_FRAME_BYTES_MAX)
        answer = msg.WritingMsg(
            epoch=effect.epoch,
            epoch_file=names.epoch_file(self.device, effect.epoch),
            capacity_bytes=self.capacity_bytes,
            free_bytes=self.machine.free_bytes,
            granularity_bytes=self.memory.granularity_bytes,
            copy=effect.copy,
        )
        self._respond(effect, answer)

    def _send_epoch(self, effect: ev.SendEpoch, fds: list[OwnedFd]) -> None:
        epoch = self.machine.regions.get(effect.epoch)
        if epoch is None:
            self._closer.submit(lambda: close_all(fds))
            return
        answer = msg.EpochAttachedMsg(
            epoch=epoch.id,
            epoch_file=names.epoch_file(self.device, epoch.id),
            identity=dict(epoch.identity or {}),
            layout_hash=epoch.layout_hash,
            slab_sizes=tuple(epoch.slab_sizes),
            manifest=epoch.manifest,
        )
        self._respond(effect, answer, fds[:FDS_PER_FRAME_MAX])
        for first in range(FDS_PER_FRAME_MAX, len(fds), FDS_PER_FRAME_MAX):
            more = fds[first : first + FDS_PER_FRAME_MAX]
            self._respond(effect, msg.SlabsMsg(epoch.id, first), more)

    def _slab_created(self, session: int, fd: OwnedFd) -> None:
        self._arrived[session] = fd
        self._handle(ev.SlabCreated(session))
        unclaimed = self._arrived.pop(session, None)  # its writer has left meanwhile
        if unclaimed is not None:
            self._closer.submit(unclaimed.close)

    def _slab_failed(self, session: int, error: UnderstudyError) -> None:
        is_full = error.code == "gms.device_full"
        self._handle((ev.DeviceFull if is_full else ev.DriverFailed)(session, error))

    def _call(
        self, session: int, work: Callable[[], T], completed: Callable[[T], ev.SessionEvent]
    ) -> None:
        """Call the driver for a session, which a failure ends."""
        self._driver.submit(
            work,
            lambda result: self._handle(completed(result)),
            lambda error: self._handle(ev.DriverFailed(session, error)),
        )

    def _write_journal(self, effect: ev.WriteJournal) -> None:
        session = effect.session

        def done(_: None) -> None:
            self._handle(ev.JournalKept() if session is None else ev.Journalled(session))

        def failed(error: UnderstudyError) -> None:
            if session is None:
                self._handle(ev.JournalBehind(error.message))
            else:
                self._handle(ev.JournalFailed(session, error.message))

        self._driver.submit(
            lambda: self._journal.write(effect.record, effect.offloaded), done, failed
        )


def host_copy(directory: str, device: str) -> ev.JournalRecord | None:
    """The host copy of the weights of `device`, if a living process besides its server holds it:
    a server can be killed at any moment, and its keeper then hands the copy back."""
    host = names.offload_device(device)
    record = peek(names.journal_path(directory, host))
    if record is None:
        return None
    path = os.path.join(directory, names.epoch_file(host, record.epoch))
    return record if is_held(path) and not epoch_file.is_retired(path) else None


class KvServer(MemoryServer[KvMachine, KvStore]):
    """The KV memory of one place. It has none before the first claim. It files the newest claims
    for a restarted server: best effort, since the kernel and the lock server protect the memory
    without them."""

    tag, service, what, blocked = names.KV, "gms-kv", "pool", "use the KV memory"
    not_held, bad_id, file_event = "gms.kv_pool_not_held", "gms.bad_offer", "gms.kv_file"
    threads: ClassVar[Sequence[str]] = ("driver", "closer")

    def __init__(
        self,
        directory: str,
        device: str,
        memory: DeviceMemory,
        capacity_bytes: int | None,
        *,
        restarts_total: int = 0,
    ) -> None:
        """`capacity_bytes`: of the device, for weights and KV together; None: all that the machine
        has free."""
        super().__init__(directory, device, memory, restarts_total)
        self.capacity_bytes = capacity_bytes

    def _begin(self) -> None:
        self._token_path = names.kv_token_path(self.directory, self.device)
        self._store = KvStore(self.memory)
        found = names.pools_on_disk(self.directory, self.device)
        self.machine = KvMachine(
            new_pool_id=lambda: uuid.uuid4().hex,
            orphans={pool: epoch_file.is_retired(self._path(pool)) for pool in found},
            newest=read_tokens(self._token_path),
        )

    def _file(self, region: str) -> str:
        return names.pool_file(self.device, region)

    @property
    def held_bytes(self) -> int:
        """Its files know, also of a pool that is not handed back yet."""
        return epoch_file.kv_bytes(self.directory, self.device)

    def _snapshot(self) -> dict[str, Any]:
        return {**kv_snapshot(self.machine, self._at), "capacity_bytes": self.capacity_bytes}

    def _in_full(self) -> dict[str, Any]:
        return {"pools": pools_in_full(self.machine)}

    def _feed(self, conn: Connection, event: ev.Received) -> None:
        match event.message:
            case msg.BorrowPoolMsg():
                self._watch_process(conn)
            case msg.TakeMsg():
                session = self.machine.session(event)
                if session.region is not None:
                    self._check_held(session.region)
            case msg.DropPoolMsg():
                self._check_unmapped()
        self._handle(event)

    def _check_unmapped(self) -> None:
        """A process may map the pool although its session has ended.

        Raises:
            UnderstudyError: `gms.kv_held`; `gms.server_exhausted`, the file cannot be opened.
        """
        pool = self.machine.current
        if pool is None or self.machine.all_holders or not is_held(self._path(pool.id)):
            return
        file = os.stat(self._path(pool.id))
        pids = ", ".join(f"pid {pid}" for pid in holders_of(file.st_dev, file.st_ino))
        raise UnderstudyError(
            "gms.kv_held",
            f"the KV memory is still mapped by {pids or 'a process that is not visible here'}"
            + (f", which was lent to {pool.holder}" if pool.holder else "")
            + "; it can be dropped once that process has exited",
        )

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.GrantPool(_, _, pool):
                self._respond(effect, msg.PoolGrantedMsg(pool, self._file(pool)))
            case ev.SendPool():
                self._send_pool(effect)
            case ev.MakePool(pool, size_bytes, index_bytes):
                self._make(pool, size_bytes, index_bytes)
            case ev.KeepTokens(newest):
                # Here, before their owner is granted anything: on disk before it has memory.
                try:
                    attempt(lambda: write_tokens(self._token_path, newest))
                except UnderstudyError as error:
                    self._warn("keep the newest token")(error)
            case _:
                super()._perform(effect)

    def room(self) -> KvRoom:
        """What the device has for KV memory beside its weights."""
        weights = [each for each in self.beside if isinstance(each, WeightsServer)]
        mine = [each for each in weights if each.device == self.device]
        others_bytes = self.bytes_beside - sum(each.held_bytes for each in mine)
        weights_bytes = sum(each.all_bytes for each in mine)
        return KvRoom(self.device, self.capacity_bytes, weights_bytes, others_bytes)

    def _make(self, pool: str, size_bytes: int, index_bytes: int) -> None:
        room = self.room()
        self._driver.submit(
            lambda: self._store.make(pool, self._path(pool), size_bytes, index_bytes, room),
            lambda sizes: self._handle(ev.PoolMade(pool, sizes)),
            lambda error: self._handle(ev.PoolNotMade(pool, error)),
        )

    def _send_pool(self, effect: ev.SendPool) -> None:
        def export() -> list[OwnedFd]:
            return self._store.export(effect.pool, writable=True)

        def failed(error: UnderstudyError) -> None:
            self._refuse(effect, error)

        if not self._store.exports_at_once:
            self._driver.submit(export, lambda fds: self._sent(effect, fds), failed)
            return
        try:
            self._sent(effect, attempt(export))
        except UnderstudyError as error:
            failed(error)

    def _sent(self, effect: ev.SendPool, fds: list[OwnedFd]) -> None:
        pool = self.machine.regions.get(effect.pool)
        if pool is None:
            self._closer.submit(lambda: close_all(fds))
            return
        sizes = tuple(pool.slab_sizes)
        answer = msg.PoolTakenMsg(pool.id, sizes, pool.index_bytes, effect.is_fresh)
        self._respond(effect, answer, fds)
