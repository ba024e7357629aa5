"""The servers of one place's weights and of its KV memory, and the process of all places of a
device (of each model, in a pool); `memory_server.py` says what such a server is.

What cannot be served of one place, for example because its journal cannot be written, is tried
again and stops no other place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from msgspec.structs import replace

from gms import epoch_file, names
from gms import messages as msg
from gms.core import events as ev
from gms.core.kv import KvMachine, Pool
from gms.core.snapshot import epochs_in_full, kv_snapshot, pools_in_full, weights_snapshot
from gms.core.upkeep import Epoch
from gms.core.weights import WeightsMachine
from gms.server.devices import DeviceUsage
from gms.server.driver_thread import attempt
from gms.server.journal import CommitJournal, left_behind, peek, read_tokens, write_tokens
from gms.server.memory_server import MemoryServer, holders, is_held
from gms.server.slab_store import KvRoom, KvStore, WeightsStore
from gms.vmm.interface import DeviceMemory
from plumbing.errors import UnderstudyError
from plumbing.pod.models import device_of
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import MANIFEST_FRAME_BYTES_MAX

# How long a writer may make no progress. It reports per tensor; reading one from the slowest
# network file system takes seconds.
STALL_MS = 120_000.0
RETRY_S = 1.0  # of a place that cannot be served

T = TypeVar("T")

logger = logging.getLogger(__name__)


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
            and epoch_file.is_retired(self.path(found.record.epoch)),
            now_ms=self.clock.now_ms(),
        )

    async def close(self) -> None:
        await super().close()
        close_all(self._arrived.values())
        self._journal.close()

    def is_free(self, region: str) -> None:
        self.handle(ev.RegionFree(region, host_copy(self.directory, self.device)))

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

    def _with_facts(self, event: ev.Received) -> ev.Received:
        match event.message:
            case msg.AttachMsg() | msg.AllocateMsg() if self.counts_kv:
                return replace(event, kv_bytes=self.bytes_beside)
            case msg.DropMsg(even_if_mapped=False) | msg.OffloadMsg():
                committed = self.machine.committed
                is_mapped = committed is not None and is_held(self.path(committed.id))
                copy = host_copy(self.directory, self.device)
                return replace(event, is_mapped=is_mapped, copy=copy)
        return event

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.SendMessage(session, _, msg.AllocatedMsg() as message):
                self._respond(effect, message, [self._arrived.pop(session)])
            case ev.SendMessage(session, _, msg.WritingMsg() as message):
                conn = self._conns.get(session)
                if conn is not None:  # only a writer may send frames of 16 MiB: it owes a manifest
                    conn.limit_frames(MANIFEST_FRAME_BYTES_MAX)
                self._respond(effect, message)
            case ev.OpenEpoch(session, epoch):
                self._call(
                    session,
                    lambda: self._store.open_epoch(epoch, self.path(epoch)),
                    lambda _: self.handle(ev.EpochOpened(session)),
                )
            case ev.CreateSlab(session, epoch, size_bytes):
                self._call(
                    session,
                    lambda: self._store.create(epoch, size_bytes),
                    lambda fd: self._slab_created(session, fd),
                )
            case ev.SealEpoch(session, epoch, manifest):
                self._call(
                    session,
                    lambda: self._store.seal(epoch, manifest),
                    lambda tensors: self.handle(ev.Sealed(session, tensors)),
                )
            case ev.WriteJournal(committing, record, offloaded):
                self._driver.submit(
                    lambda: self._journal.write(record, offloaded),
                    lambda _: self.handle(ev.Journalled(committing)),
                    lambda error: self.handle(ev.Journalled(committing, error.message)),
                )
            case _:
                super()._perform(effect)

    def _grant(self, region: Epoch, effect: ev.SendRegion) -> msg.EpochAttachedMsg:
        return msg.EpochAttachedMsg(
            epoch=region.id,
            identity=dict(region.identity or {}),
            layout_hash=region.layout_hash,
            slab_sizes=tuple(region.slab_sizes),
            manifest=region.manifest,
        )

    def _slab_created(self, session: int, fd: OwnedFd) -> None:
        self._arrived[session] = fd
        self.handle(ev.SlabCreated(session))
        unclaimed = self._arrived.pop(session, None)  # its writer has left meanwhile
        if unclaimed is not None:
            self._closer.submit(unclaimed.close)

    def _call(self, session: int, work: Callable[[], T], done: Callable[[T], None]) -> None:
        """Call the driver for a writer."""
        self._driver.submit(work, done, lambda error: self.handle(ev.DriverFailed(session, error)))


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
            orphans={pool: epoch_file.is_retired(self.path(pool)) for pool in found},
            newest=read_tokens(self._token_path),
        )

    @property
    def held_bytes(self) -> int:
        """Its files know, also of a pool that is not handed back yet."""
        return epoch_file.kv_bytes(self.directory, self.device)

    def _snapshot(self) -> dict[str, Any]:
        return {**kv_snapshot(self.machine, self._at), "capacity_bytes": self.capacity_bytes}

    def _in_full(self) -> dict[str, Any]:
        return {"pools": pools_in_full(self.machine)}

    def _with_facts(self, event: ev.Received) -> ev.Received:
        pool = self.machine.current if isinstance(event.message, msg.DropPoolMsg) else None
        if pool is None or self.machine.all_holders or not is_held(self.path(pool.id)):
            return event
        pids = ", ".join(f"pid {pid}" for pid in holders(self.path(pool.id)))
        raise UnderstudyError(
            "gms.kv_held",
            f"the KV memory is still mapped by {pids or 'a process that is not visible here'}"
            + (f", which was lent to {pool.holder}" if pool.holder else "")
            + "; it can be dropped once that process has exited",
        )

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.MakePool(pool, size_bytes, index_bytes):
                room = self.room()
                self._driver.submit(
                    lambda: self._store.make(pool, self.path(pool), size_bytes, index_bytes, room),
                    lambda sizes: self.handle(ev.PoolMade(pool, sizes)),
                    lambda error: self.handle(ev.PoolNotMade(pool, error)),
                )
            case ev.KeepTokens(newest):
                # Here, before their owner is granted anything: on disk before it has memory.
                try:
                    attempt(lambda: write_tokens(self._token_path, newest))
                except UnderstudyError as error:
                    self.warn(f"could not keep the newest token: {error.message}")
            case _:
                super()._perform(effect)

    def _grant(self, region: Pool, effect: ev.SendRegion) -> msg.PoolTakenMsg:
        sizes = tuple(region.slab_sizes)
        return msg.PoolTakenMsg(region.id, sizes, region.index_bytes, effect.is_fresh)

    def room(self) -> KvRoom:
        """What the device has for KV memory beside its weights."""
        weights = [each for each in self.beside if isinstance(each, WeightsServer)]
        mine = [each for each in weights if each.device == self.device]
        others_bytes = self.bytes_beside - sum(each.held_bytes for each in mine)
        weights_bytes = sum(each.all_bytes for each in mine)
        return KvRoom(self.device, self.capacity_bytes, weights_bytes, others_bytes)


FAILURES = (UnderstudyError, OSError)


class DeviceProcess:
    """Everything that the server process of one device serves."""

    def __init__(
        self,
        directory: str,
        places: Sequence[str],
        memory: DeviceMemory,
        capacity_bytes: int,
        *,
        is_bounded: bool,
        stall_ms: float = STALL_MS,
        restarts_total: int = 0,
    ) -> None:
        """`is_bounded`: `capacity_bytes` is the limit of weights and KV memory together."""
        self.servers: list[MemoryServer[Any, Any]] = []
        told: dict[str, Any] = {"restarts_total": restarts_total}
        for place in places:
            of = directory, place, memory
            weights = WeightsServer(
                *of, capacity_bytes, stall_ms=stall_ms, counts_kv=is_bounded, **told
            )
            self.servers.append(weights)
            if not names.is_offload(place):
                self.servers.append(KvServer(*of, capacity_bytes if is_bounded else None, **told))
        self._running: list[MemoryServer[Any, Any]] = []
        for server in self.servers:
            server.beside = self._running
        self._late: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve what can be served."""
        failed: list[tuple[MemoryServer[Any, Any], Exception]] = []
        for server in self.servers:
            try:
                await self._start(server)
            except FAILURES as error:
                failed.append((server, error))
        if not any(server.tag == names.WEIGHTS for server in self._running):
            await self.close()
            raise failed[0][1]
        self._late = [asyncio.create_task(self._retry(*each)) for each in failed]

    async def close(self) -> None:
        """Stop serving; memory lives on where a process maps it."""
        for task in self._late:
            task.cancel()
        for server in self._running:
            await server.close()

    async def _start(self, server: MemoryServer[Any, Any]) -> None:
        await server.start()
        self._running.append(server)

    async def _retry(self, server: MemoryServer[Any, Any], error: Exception) -> None:
        said = ""
        while server not in self._running:
            if str(error) != said:
                said = str(error)
                logger.error("the %s of %s are not served: %s", server.tag, server.device, said)
            await asyncio.sleep(RETRY_S)
            try:
                await self._start(server)
            except FAILURES as again:
                error = again
