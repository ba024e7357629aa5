"""The servers of one place's weights and of its KV memory, and the process of all places of a
device (of each model, in a pool); `memory_server.py` has what they share.

What cannot be served of one place, for example because its journal cannot be written, is tried
again and stops no other place.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gms import epoch_file, names
from gms import messages as msg
from gms.core import events as ev
from gms.core.kv import KvMachine
from gms.core.snapshot import kv_snapshot, weights_snapshot
from gms.core.weights import WeightsMachine
from gms.manifest import check_manifest
from gms.server.devices import DeviceUsage
from gms.server.driver_thread import attempt
from gms.server.journal import CommitJournal, peek, read_tokens, write_tokens
from gms.server.memory_server import MemoryPlace, MemoryServer, holders
from gms.server.slab_store import KvRoom, Part, pool_parts, slab_sizes, weights_parts
from gms.vmm.interface import DeviceMemory, release_all
from plumbing.errors import UnderstudyError
from plumbing.pod.models import device_of
from plumbing.pod.paths import gms_journal


class WeightsServer(MemoryServer[WeightsMachine]):
    """The weights of one place."""

    tag, what, blocked = names.WEIGHTS, "epoch", "load"
    is_lent_writable = False

    def _begin(self) -> None:
        is_gpu = not names.is_host(self.device)
        self._usage = DeviceUsage(device_of(self.device)) if is_gpu else None
        orphans = self.files()
        self._journal = CommitJournal(
            gms_journal(self.directory, self.device), has_epochs=bool(orphans)
        )
        self.machine = WeightsMachine(
            capacity_bytes=self.place.capacity_bytes,
            granularity_bytes=self.memory.granularity_bytes,
            stall_ms=self.place.stall_ms,
            new_epoch_id=lambda: uuid.uuid4().hex,
            orphans=orphans,
            journal=self._journal.loaded,
            now_ms=self.clock.now_ms(),
        )

    async def close(self) -> None:
        await super().close()
        self._journal.close()

    def is_free(self, region: str) -> None:
        copy = host_copy(self.directory, self.device)
        self.handle(self.machine.region_free, region, copy)

    @property
    def held_bytes(self) -> int:
        epoch = self.machine.committed
        expected = [each.size_bytes for each in self.machine.orphans if each.expected]
        return epoch.size_bytes if epoch is not None else sum(expected)

    def status(self) -> dict[str, Any]:
        used_bytes = None if self._usage is None else self._usage.used_bytes()
        return {**weights_snapshot(self.machine, self._at), "device_used_bytes": used_bytes}

    def _with_facts(self, event: ev.Received) -> ev.Received:
        match event.message:
            case msg.AttachMsg() | msg.AllocateMsg() if self.place.is_bounded:
                return replace(event, kv_bytes=self.bytes_beside)
            case msg.DropMsg(even_if_mapped=False) | msg.OffloadMsg():
                committed = self.machine.committed
                is_mapped = committed is not None and epoch_file.is_held(self.path(committed.id))
                copy = host_copy(self.directory, self.device)
                return replace(event, is_mapped=is_mapped, copy=copy)
        return event

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: ev.Effect) -> None:
        store, memory = self._store, self.memory
        match effect:
            case ev.SendMessage(session, _, msg.AllocatedMsg(slab) as message):
                epoch = str(self.machine.sessions[session].region)
                self._respond(effect, message, [attempt(lambda: store.lend(epoch, slab))])
            case ev.OpenEpoch(_, _, message, epoch):
                store.open(epoch, self.path(epoch))
                self._respond(effect, message)
            case ev.CreateSlab(epoch, size_bytes):
                self._call(effect, lambda: store.add(epoch, memory, size_bytes))
            case ev.SealEpoch(epoch, manifest):
                sizes = self.machine.regions[epoch].slab_sizes
                self._call(effect, lambda: self._sealed(epoch, manifest, sizes))
            case ev.WriteJournal(record, offloaded):
                self._call(effect, lambda: self._journal.write(record, offloaded))
            case _:
                super()._perform(effect)

    def _sealed(self, epoch: str, manifest: bytes, sizes: Sequence[int]) -> int:
        tensors = check_manifest(manifest, sizes)
        self._store.seal(epoch)
        return tensors

    def _parts(self, message: msg.HandBackMsg) -> tuple[int, Sequence[Part]]:
        tensors = check_manifest(message.manifest, message.slab_sizes)
        return tensors, weights_parts(self.memory, message.region, message.slab_sizes)


def host_copy(directory: str, device: str) -> ev.JournalRecord | None:
    """The host copy of the weights of `device`, if a living process besides its server holds it:
    a server can be killed at any moment, and its keeper then hands the copy back."""
    host = names.offload_device(device)
    record = peek(gms_journal(directory, host))
    if record is None:
        return None
    path = names.region_path(directory, host, names.WEIGHTS, record.epoch)
    return record if epoch_file.is_held(path) and not epoch_file.is_retired(path) else None


class KvServer(MemoryServer[KvMachine]):
    """The KV memory of one place. It has none before the first claim. It files the newest claims
    for a restarted server: best effort, since the kernel and the lock server protect the memory
    without them."""

    tag, what, blocked = names.KV, "pool", "use the KV memory"
    is_lent_writable = True

    def _begin(self) -> None:
        self._token_path = gms_journal(self.directory, self.device, names.KV)
        self.machine = KvMachine(
            new_pool_id=lambda: uuid.uuid4().hex,
            orphans=self.files(),
            newest=read_tokens(self._token_path),
        )

    @property
    def limit_bytes(self) -> int | None:
        """Of the device, for weights and KV together; None: all that the machine has free."""
        return self.place.capacity_bytes if self.place.is_bounded else None

    @property
    def held_bytes(self) -> int:
        """Its files know, also of a pool that is not handed back yet."""
        return epoch_file.kv_bytes(self.directory, self.device)

    def status(self) -> dict[str, Any]:
        return {**kv_snapshot(self.machine, self._at), "capacity_bytes": self.limit_bytes}

    def _with_facts(self, event: ev.Received) -> ev.Received:
        pool = self.machine.current if isinstance(event.message, msg.DropMsg) else None
        if pool is None or self.machine.all_holders or not epoch_file.is_held(self.path(pool.id)):
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
            case ev.MakePool():
                room = self.room()
                self._call(effect, lambda: self._made(effect, room))
            case ev.KeepTokens(newest):
                # Here, before their owner is granted anything: on disk before it has memory.
                try:
                    attempt(lambda: write_tokens(self._token_path, newest))
                except UnderstudyError as error:
                    self.warn(f"could not keep the newest token: {error.message}")
            case _:
                super()._perform(effect)

    def _made(self, effect: ev.MakePool, room: KvRoom) -> tuple[int, ...]:
        """File, index and slabs; the slabs' sizes. All or nothing."""
        pool, path = effect.region, self.path(effect.region)
        sizes = slab_sizes(effect.size_bytes, self.memory.granularity_bytes)
        room.check(sum(sizes))
        self._store.open(pool, path, sum(sizes))
        try:
            for part in pool_parts(self.memory, pool, sizes, effect.index_bytes):
                self._store.add(pool, *part)
        except BaseException:
            release_all(self._store.take(pool, path))
            raise
        return sizes

    def _parts(self, message: msg.HandBackMsg) -> tuple[int, Sequence[Part]]:
        assert message.pool is not None
        sizes, index_bytes = message.slab_sizes, message.pool.index_bytes
        return 0, pool_parts(self.memory, message.region, sizes, index_bytes)

    def room(self) -> KvRoom:
        """What the device has for KV memory beside its weights."""
        weights = self.place.parts[0]
        others_bytes = self.bytes_beside - weights.held_bytes
        weights_bytes = sum(each.size_bytes for each in weights.machine.regions.values())
        return KvRoom(self.device, self.limit_bytes, weights_bytes, others_bytes)


def a_place(
    directory: str, place: str, memory: DeviceMemory, capacity_bytes: int, **options: Any
) -> MemoryPlace:
    """The server of one place: of weights, and of KV memory unless it is for host copies."""
    both: list[type[MemoryServer[Any]]] = [WeightsServer, KvServer]
    kinds = both[:1] if names.is_offload(place) else both
    return MemoryPlace(directory, place, memory, capacity_bytes, kinds, **options)


class DeviceProcess:
    """Everything that the server process of one device serves."""

    def __init__(self, directory: str, places: Sequence[str], *device: Any, **options: Any) -> None:
        """The rest as for each server."""
        self.places = [a_place(directory, place, *device, **options) for place in places]
        for each in self.places:
            each.beside = self.places
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve what can be served; the rest is tried again."""
        self._tasks = [asyncio.create_task(place.serve()) for place in self.places]
        for task in self._tasks:  # our own fault ends the process
            task.add_done_callback(lambda done: done.cancelled() or done.result())
        await asyncio.sleep(0)  # each has tried once

    async def close(self) -> None:
        """Stop serving; memory lives on where a process maps it."""
        for task in self._tasks:
            task.cancel()
        for place in self.places:
            if place.is_serving:
                await place.close()
