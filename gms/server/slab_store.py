"""The physical memory that one device's servers hold: the slabs of epochs and of KV pools, and
whether another pool fits.

The driver thread uses both stores, so they need no locks and may block. Only `export` is called
from elsewhere: by another thread, of epochs that no longer change, and by the KV server's loop, of
host memory. They decide nothing: the machines say what to create, seal, check and give up.

`KvRoom` compares a KV pool with what the device has left beside its weights. A GPU's driver has
the last word, but a pool is made on the path of a wake: what cannot fit is better said at once.
This process's own control group does not matter: memory counts against the group of the process
that touches it first, which is the engine's (`engine.backends.free_memory.has_room_for`).
"""

from __future__ import annotations

import abc
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from gms import epoch_file
from gms.manifest import check_manifest
from gms.messages import POOL_SLABS_MAX, HandBackMsg
from gms.vmm.host import HostMemory
from gms.vmm.interface import Allocation, DeviceMemory, export_all, release_all
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import KV_SLAB_PREFIX, SLAB_PREFIX
from plumbing.text import size
from plumbing.wire.fds import OwnedFd, close_all


class SlabStore(abc.ABC):
    """Memory by epoch, or by KV pool, in the order in which its descriptors are sent."""

    is_writable = False  # by those to whom it is exported

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self._slabs: dict[str, list[Allocation]] = {}

    @property
    def exports_at_once(self) -> bool:
        """Whether `export` never blocks, so that no thread is needed for it."""
        return False

    def export(self, name: str) -> list[OwnedFd]:
        """Descriptors of all its memory, in order, for the caller; none if it was given up."""
        return export_all(self._slabs.get(name, ()), writable=self.is_writable)

    def take_back(self, name: str, fds: Sequence[OwnedFd], message: HandBackMsg) -> int:
        """Check and hold what a survivor has handed back; takes `fds`; returns the number of
        tensors.

        Raises:
            ProtocolError: `gms.bad_manifest`.
            UnderstudyError: `gms.bad_slab`, one has another size, or is writable though it must
                not be, or (host memory) is not the one that was created for its place.
        """
        slabs: list[Allocation] = []
        rest = deque(fds)
        try:
            tensors, parts = self._expected(name, message)
            for part in parts:
                slabs.append(part.memory.adopt(rest.popleft(), part.size_bytes))
                slabs[-1].check(part.name, is_sealed=not self.is_writable)
        except BaseException:
            close_all(rest)
            release_all(slabs)
            raise
        self._slabs[name] = slabs
        return tensors

    @abc.abstractmethod
    def _expected(self, name: str, message: HandBackMsg) -> tuple[int, Iterable[Part]]:
        """The number of tensors of a valid `message`, and what comes with it, in order."""

    def take(self, name: str, path: str) -> list[Allocation]:
        """Give its memory up, with its file: the caller releases it, where that may take long."""
        epoch_file.remove_if_free(path)
        return self._slabs.pop(name, [])

    def close(self) -> None:
        """Release everything; memory lives on where a process maps it."""
        for name in list(self._slabs):
            release_all(self._slabs.pop(name))


class Part(NamedTuple):
    """A slab or an index. Its name is unique, so that none passes for another."""

    memory: DeviceMemory
    size_bytes: int
    name: str


class WeightsStore(SlabStore):
    """Slabs by epoch."""

    def open_epoch(self, epoch: str, path: str) -> None:
        """Create the file of a new epoch."""
        try:
            epoch_file.create(path)
        except OSError as error:
            raise UnderstudyError(
                "gms.epoch_file", f"cannot create {path}: {error.strerror}; free space"
            ) from error
        self._slabs[epoch] = []

    def create(self, epoch: str, size_bytes: int) -> OwnedFd:
        """One more slab; returns a writable descriptor for its writer."""
        slabs = self._slabs[epoch]
        slab = self.memory.create(size_bytes, _slab_name(epoch, len(slabs)))
        try:
            fd = slab.export(writable=True)
        except BaseException:
            slab.release()
            raise
        slabs.append(slab)
        return fd

    def seal(self, epoch: str, manifest: bytes) -> int:
        """Check the manifest and seal every slab; returns the number of tensors."""
        slabs = self._slabs[epoch]
        tensors = check_manifest(manifest, [slab.size_bytes for slab in slabs])
        for slab in slabs:
            slab.seal()
        return tensors

    def _expected(self, name: str, message: HandBackMsg) -> tuple[int, Iterable[Part]]:
        sizes = message.slab_sizes
        parts = (Part(self.memory, each, _slab_name(name, n)) for n, each in enumerate(sizes))
        return check_manifest(message.manifest, sizes), parts


def _slab_name(epoch: str, index: int) -> str:
    return f"{SLAB_PREFIX}{epoch[:8]}-{index}"


# Handles above about 4 GiB have tripped the driver's memory scrubber on some machines, and pages of
# 2 MiB take the driver 200 µs each.
SLAB_BYTES_MAX = 2 << 30


class KvStore(SlabStore):
    """By pool: its index, then its slabs, in order."""

    is_writable = True

    @property
    def exports_at_once(self) -> bool:
        return self.memory.kind == HostMemory.kind

    def make(
        self, pool: str, path: str, size_bytes: int, index_bytes: int, room: KvRoom
    ) -> tuple[int, ...]:
        """File, index and slabs; the slabs' sizes. All or nothing."""
        sizes = slab_sizes(size_bytes, self.memory.granularity_bytes)
        room.check(sum(sizes))
        try:
            epoch_file.create_region_file(path, sum(sizes))
        except OSError as error:
            raise UnderstudyError(
                "gms.pool_file", f"cannot create {path}: {error.strerror}; free space on that disk"
            ) from error
        slabs: list[Allocation] = []
        try:
            for part in self._parts(pool, sizes, index_bytes):
                slabs.append(part.memory.create(part.size_bytes, part.name))  # noqa: PERF401 - released if one fails
        except BaseException as error:
            release_all(slabs)
            os.unlink(path)
            if isinstance(error, UnderstudyError) and error.code == "gms.device_full":
                text = f"{error.message}; weights of this service take {size(room.weights_bytes)}"
                more = {**error.details, "weights_bytes": room.weights_bytes}
                raise UnderstudyError(error.code, text, **more) from error
            raise
        self._slabs[pool] = slabs
        return sizes

    def _expected(self, name: str, message: HandBackMsg) -> tuple[int, Iterable[Part]]:
        assert message.pool is not None
        return 0, self._parts(name, message.slab_sizes, message.pool.index_bytes)

    def _parts(self, pool: str, sizes: Sequence[int], index_bytes: int) -> Iterator[Part]:
        step, prefix = HostMemory.granularity_bytes, f"{KV_SLAB_PREFIX}{pool[:8]}"
        yield Part(HostMemory(), -(-index_bytes // step) * step, f"{prefix}-0")
        for number, size_bytes in enumerate(sizes, 1):
            yield Part(self.memory, size_bytes, f"{prefix}-{number}")


def slab_sizes(size_bytes: int, granularity_bytes: int) -> tuple[int, ...]:
    """The slabs of a pool of at least `size_bytes`: as few as possible."""
    whole = -(-size_bytes // granularity_bytes) * granularity_bytes
    largest = SLAB_BYTES_MAX // granularity_bytes * granularity_bytes
    if whole > POOL_SLABS_MAX * largest:
        raise UnderstudyError(
            "gms.kv_too_large",
            f"{size(size_bytes)} of KV memory are more than the {size(POOL_SLABS_MAX * largest)}"
            " that one device can lend",
        )
    full, rest = divmod(whole, largest)
    return (*[largest] * full, *[rest][: bool(rest)])


RESERVE_BYTES = 64 << 20  # of host memory, left for the rest of the machine
MEMINFO = "/proc/meminfo"


class KvRoom(Struct, frozen=True):
    """What a device has for KV memory beside its weights. `capacity_bytes` is for both; None: all
    that the machine has free."""

    device: str
    capacity_bytes: int | None
    weights_bytes: int
    others_bytes: int

    def check(self, needed_bytes: int) -> None:
        capacity_bytes, weights_bytes = self.capacity_bytes, self.weights_bytes
        if capacity_bytes is not None:
            _check_limit(needed_bytes, capacity_bytes, "this device")
            if needed_bytes + weights_bytes + self.others_bytes > capacity_bytes:
                others = (
                    f", and {size(self.others_bytes)} are other models'"
                    if self.others_bytes
                    else ""
                )
                raise UnderstudyError(
                    "gms.device_full",
                    f"the KV memory needs {size(needed_bytes)}, and {size(weights_bytes)} of the"
                    f" {size(capacity_bytes)} of {self.device} hold weights{others}; use less KV"
                    " memory, a smaller model, or a larger --device-bytes",
                    needed_bytes=needed_bytes,
                    weights_bytes=weights_bytes,
                    capacity_bytes=capacity_bytes,
                )
        if self.device.startswith("HOST-"):
            _check_machine(needed_bytes)


def _check_machine(needed_bytes: int) -> None:
    found = _meminfo()
    _check_limit(needed_bytes, found["MemTotal"] - RESERVE_BYTES, "this machine's memory")
    free_bytes = found["MemAvailable"]
    if needed_bytes + RESERVE_BYTES > free_bytes:
        raise UnderstudyError(
            "gms.device_full",
            f"the KV memory needs {size(needed_bytes)}, and this machine has {size(free_bytes)}"
            f" free, of which {size(RESERVE_BYTES)} are reserved; stop what holds the memory, or"
            " use less KV memory",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def _check_limit(needed_bytes: int, limit_bytes: int, of: str) -> None:
    if needed_bytes > limit_bytes:
        raise UnderstudyError(
            "gms.kv_too_large",
            f"{size(needed_bytes)} of KV memory can never fit: {of} has {size(limit_bytes)}; use"
            " less KV memory",
            needed_bytes=needed_bytes,
            limit_bytes=limit_bytes,
        )


def _meminfo() -> dict[str, int]:
    values = {}
    with open(MEMINFO, encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    return values
