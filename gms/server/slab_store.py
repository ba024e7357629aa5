"""The physical memory that one device's servers hold: the slabs of epochs and of KV pools, and
whether another pool fits.

The driver thread uses both stores, so they need no locks and may block. Only `export` is called
from elsewhere: by another thread, of epochs that no longer change, and by the KV server's loop, of
host memory. They decide nothing: the machines say what to create, seal, check and give up.

`check_room` compares a KV pool with what the device has left beside its weights. A GPU's driver has
the last word, but a pool is made on the path of a wake: what cannot fit is better said at once.
This process's own control group does not matter: memory counts against the group of the process
that touches it first, which is the engine's (`engine.backends.free_memory.has_room_for`).
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gms import epoch_file, names
from gms.kv_messages import SLABS_MAX
from gms.manifest import check_manifest
from gms.questions import status_of
from gms.server import journal
from gms.server.journal import bytes_elsewhere
from gms.vmm.host import HostMemory
from gms.vmm.interface import Allocation, DeviceMemory, export_all, release_all
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import KV_SLAB_PREFIX, SLAB_PREFIX
from plumbing.text import size
from plumbing.wire.fds import OwnedFd, close_all


class SlabStore:
    """Memory by epoch, or by KV pool, in the order in which its descriptors are sent."""

    def __init__(self, memory: DeviceMemory, directory: str) -> None:
        self.memory, self._directory = memory, directory
        self._slabs: dict[str, list[Allocation]] = {}

    def export(self, name: str, *, writable: bool) -> list[OwnedFd]:
        """Descriptors of all its memory, in order, which the caller owns; none if it was given up.

        Raises:
            UnderstudyError: `gms.driver_failed`, for example without descriptors left.
        """
        return export_all(self._slabs.get(name, ()), writable=writable)

    def take(self, name: str) -> list[Allocation]:
        """Give its memory up: the caller releases it, where that may take long."""
        return self._slabs.pop(name, [])

    def close(self) -> None:
        """Release everything; memory lives on where a process maps it."""
        for name in list(self._slabs):
            release_all(self._slabs.pop(name))

    def _adopt(
        self, name: str, fds: Sequence[OwnedFd], parts: Iterable[Part], *, is_sealed: bool
    ) -> None:
        """Check and hold what a survivor hands back; takes `fds`."""
        slabs: list[Allocation] = []
        rest = deque(fds)
        try:
            for part in parts:
                slabs.append(part.memory.adopt(rest.popleft(), part.size_bytes))
                slabs[-1].check(part.name, is_sealed=is_sealed)
        except BaseException:
            close_all(rest)
            release_all(slabs)
            raise
        self._slabs[name] = slabs


class Part(NamedTuple):
    """A slab or an index. Its name is unique, so that none passes for another."""

    memory: DeviceMemory
    size_bytes: int
    name: str


class WeightsStore(SlabStore):
    """Slabs by epoch."""

    def open_epoch(self, epoch: str, file_name: str) -> None:
        """Create the file of a new epoch.

        Raises:
            UnderstudyError: `gms.epoch_file`.
        """
        try:
            epoch_file.create(os.path.join(self._directory, file_name))
        except OSError as error:
            raise UnderstudyError(
                "gms.epoch_file",
                f"cannot create {file_name} in {self._directory}: {error.strerror}; free space",
            ) from error
        self._slabs[epoch] = []

    def create(self, epoch: str, size_bytes: int) -> OwnedFd:
        """One more slab; returns a writable descriptor for its writer.

        Raises:
            UnderstudyError: `gms.driver_failed`, …
        """
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
        """Check the manifest and seal every slab; returns the number of tensors.

        Raises:
            ProtocolError: `gms.bad_manifest`.
            UnderstudyError: `gms.still_writable`.
        """
        slabs = self._slabs[epoch]
        tensors = check_manifest(manifest, [slab.size_bytes for slab in slabs])
        for slab in slabs:
            slab.seal()
        return tensors

    def adopt(
        self, epoch: str, fds: Sequence[OwnedFd], sizes: Sequence[int], manifest: bytes
    ) -> int:
        """Check and hold a survivor's epoch; takes `fds`; returns the number of tensors.

        Raises:
            ProtocolError: `gms.bad_manifest`.
            UnderstudyError: `gms.bad_slab`, one has another size, or is writable, or (host memory)
                is not the one that was created for its place.
        """
        try:
            tensors = check_manifest(manifest, sizes)
        except BaseException:
            close_all(fds)
            raise
        parts = (Part(self.memory, each, _slab_name(epoch, n)) for n, each in enumerate(sizes))
        self._adopt(epoch, fds, parts, is_sealed=True)
        return tensors


def _slab_name(epoch: str, index: int) -> str:
    return f"{SLAB_PREFIX}{epoch[:8]}-{index}"


# Handles above about 4 GiB have tripped the driver's memory scrubber on some machines, and pages of
# 2 MiB take the driver 200 µs each.
SLAB_BYTES_MAX = 2 << 30


class KvStore(SlabStore):
    """By pool: its index, then its slabs, in order."""

    def __init__(
        self, memory: DeviceMemory, directory: str, device: str, capacity_bytes: int | None
    ) -> None:
        """`capacity_bytes`: of the device, for weights and KV together; None: all that the machine
        has free."""
        super().__init__(memory, directory)
        self._device, self._capacity_bytes = device, capacity_bytes

    @property
    def exports_at_once(self) -> bool:
        """Whether `export` never blocks, so that no thread is needed for it."""
        return self.memory.kind == HostMemory.kind

    def path(self, pool: str) -> str:
        """The file that every process which maps the pool holds."""
        return os.path.join(self._directory, names.pool_file(self._device, pool))

    def make(self, pool: str, size_bytes: int, index_bytes: int) -> tuple[int, ...]:
        """File, index and slabs; the slabs' sizes. All or nothing.

        Raises:
            UnderstudyError: `gms.kv_too_large`, `gms.device_full`, `gms.pool_file`,
                `gms.driver_failed`, …
        """
        sizes = slab_sizes(size_bytes, self.memory.granularity_bytes)
        check_room(self._directory, self._device, sum(sizes), self._capacity_bytes)
        path = self.path(pool)
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
                raise beside_weights(error, self._directory, self._device) from error
            raise
        self._slabs[pool] = slabs
        return sizes

    def take_back(
        self, pool: str, fds: Sequence[OwnedFd], sizes: Sequence[int], index_bytes: int
    ) -> None:
        """Check and hold what a survivor handed back; takes `fds`.

        Raises:
            UnderstudyError: `gms.bad_slab`, one has another size or (host memory) is not the one
                that was made for its place.
        """
        self._adopt(pool, fds, self._parts(pool, sizes, index_bytes), is_sealed=False)

    def take(self, pool: str) -> list[Allocation]:
        """Remove the pool's file too."""
        epoch_file.remove_if_free(self.path(pool))
        return super().take(pool)

    def _parts(self, pool: str, sizes: Sequence[int], index_bytes: int) -> Iterator[Part]:
        step, prefix = HostMemory.granularity_bytes, f"{KV_SLAB_PREFIX}{pool[:8]}"
        yield Part(HostMemory(), -(-index_bytes // step) * step, f"{prefix}-0")
        for number, size_bytes in enumerate(sizes, 1):
            yield Part(self.memory, size_bytes, f"{prefix}-{number}")


def slab_sizes(size_bytes: int, granularity_bytes: int) -> tuple[int, ...]:
    """The slabs of a pool of at least `size_bytes`: as few as possible.

    Raises:
        UnderstudyError: `gms.kv_too_large`.
    """
    whole = -(-size_bytes // granularity_bytes) * granularity_bytes
    largest = SLAB_BYTES_MAX // granularity_bytes * granularity_bytes
    if whole > SLABS_MAX * largest:
        raise UnderstudyError(
            "gms.kv_too_large",
            f"{size(size_bytes)} of KV memory are more than the {size(SLABS_MAX * largest)} that"
            " one device can lend",
        )
    full, rest = divmod(whole, largest)
    return (*[largest] * full, *[rest][: bool(rest)])


RESERVE_BYTES = 64 << 20  # of host memory, left for the rest of the machine
ASK_S = 1.0  # the weights' server answers in milliseconds
MEMINFO = "/proc/meminfo"

logger = logging.getLogger(__name__)


def check_room(directory: str, device: str, needed_bytes: int, capacity_bytes: int | None) -> None:
    """
    Raises:
        UnderstudyError: `gms.kv_too_large`, it never fits; `gms.device_full`, not now.
    """
    if capacity_bytes is not None:
        _check_limit(needed_bytes, capacity_bytes, "this device")
        weights_bytes = _weights_bytes(directory, device)
        others_bytes = bytes_elsewhere(directory, device)
        if needed_bytes + weights_bytes + others_bytes > capacity_bytes:
            others = f", and {size(others_bytes)} are other models'" if others_bytes else ""
            raise UnderstudyError(
                "gms.device_full",
                f"the KV memory needs {size(needed_bytes)}, and {size(weights_bytes)} of the"
                f" {size(capacity_bytes)} of {device} hold weights{others}; use less KV memory, a"
                " smaller model, or a larger --device-bytes",
                needed_bytes=needed_bytes,
                weights_bytes=weights_bytes,
                capacity_bytes=capacity_bytes,
            )
    if device.startswith("HOST-"):
        _check_machine(needed_bytes)


def beside_weights(error: UnderstudyError, directory: str, device: str) -> UnderstudyError:
    """The driver's `gms.device_full`, with what the device's weights take."""
    weights_bytes = _weights_bytes(directory, device)
    text = f"{error.message}; weights of this service take {size(weights_bytes)}"
    return UnderstudyError(error.code, text, **error.details, weights_bytes=weights_bytes)


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


def _weights_bytes(directory: str, device: str) -> int:
    """The size of the device's weights. While the journalled epoch is the only one with a file that
    is all there is, and nobody need be asked. If their server does not answer, it is the size of
    those that were committed last, which the engines that map them keep.
    """
    record = journal.peek(names.journal_path(directory, device))
    size_bytes = record.size_bytes if record is not None else 0
    if names.epochs_on_disk(directory, device) == ([record.epoch] if record is not None else []):
        return size_bytes
    try:
        document = status_of(directory, device, ASK_S)
    except UnderstudyError as error:
        logger.warning(
            "counting %s of weights, by their journal: %s", size(size_bytes), error.message
        )
        return size_bytes
    phases = ("committed_bytes", "staging_bytes", "superseded_bytes", "releasing_bytes")
    return sum(int(document[name]) for name in phases)


def _meminfo() -> dict[str, int]:
    values = {}
    with open(MEMINFO, encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    return values
