"""The physical memory that one device's servers hold: the slabs of epochs and of KV pools, and
whether another pool fits.

The driver thread uses both stores, so they need no locks and may block. Only `export` is called
from elsewhere: by another thread, of epochs that no longer change, and by the KV server's loop, of
host memory. They decide nothing: the machines say what to create, seal, check and give up.

`check_room` compares a KV pool with what the device has left beside its weights. A GPU's driver has
the last word, and so has whoever touches host memory first. But a pool is made on the path of a
wake: what cannot fit is better said at once, with what takes the room. Only the machine is asked,
never the limit of this process's own control group: memory counts against the group of the process
that touches it first, which is the engine's. The engine looks at that before it fills the pool
(`engine.backends.free_memory.has_room_for`).
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence

from gms import epoch_file, names
from gms import epoch_file as pool_file
from gms import messages as msg
from gms.kv_messages import SLABS_MAX
from gms.manifest import check_manifest
from gms.server import journal
from gms.server.journal import bytes_elsewhere
from gms.vmm.host import HostMemory
from gms.vmm.interface import Allocation, DeviceMemory, export_all, release_all
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import KV_SLAB_PREFIX, SLAB_PREFIX
from plumbing.text import size
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import OwnedFd, close_all


class SlabStore:
    """Slabs by epoch."""

    def __init__(self, memory: DeviceMemory, directory: str) -> None:
        self.memory = memory
        self._directory = directory
        self._slabs: dict[str, list[Allocation]] = {}

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

    def mark_history(self, file_name: str) -> None:
        """Mark an epoch's file as out of service.

        Raises:
            UnderstudyError: `gms.epoch_file`.
        """
        try:
            epoch_file.mark_history(os.path.join(self._directory, file_name))
        except OSError as error:
            raise UnderstudyError(
                "gms.epoch_file", f"cannot mark {file_name} as out of service: {error.strerror}"
            ) from error

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
        self, epoch: str, fds: Sequence[OwnedFd], slab_sizes: Sequence[int], manifest: bytes
    ) -> int:
        """Check and hold a survivor's epoch; takes `fds`; returns the number of tensors.

        Raises:
            ProtocolError: `gms.bad_manifest`.
            UnderstudyError: `gms.bad_slab`, one has another size, or is writable, or (host memory)
                is not the one that was created for its place.
        """
        slabs: list[Allocation] = []
        rest = deque(fds)
        try:
            tensors = check_manifest(manifest, slab_sizes)
            for index, size_bytes in enumerate(slab_sizes):
                slabs.append(self.memory.adopt(rest.popleft(), size_bytes))
                slabs[-1].check(_slab_name(epoch, index))
        except BaseException:
            close_all(rest)
            release_all(slabs)
            raise
        self._slabs[epoch] = slabs
        return tensors

    def export(self, epoch: str) -> list[OwnedFd]:
        """Read-only descriptors of every slab, in order; the caller owns them.

        Raises:
            UnderstudyError: `gms.driver_failed`, for example without descriptors left.
        """
        slabs = self._slabs.get(epoch, ())  # empty: it was given up meanwhile
        return export_all(slabs, writable=False)

    def take(self, epoch: str) -> list[Allocation]:
        """Give up an epoch's slabs: the caller releases them, where that may take long."""
        return self._slabs.pop(epoch, [])

    def close(self) -> None:
        """Release everything; memory lives on where a process maps it."""
        for epoch in list(self._slabs):
            release_all(self._slabs.pop(epoch))


def _slab_name(epoch: str, index: int) -> str:
    """The name that a slab is created with: unique, so that none passes for another."""
    return f"{SLAB_PREFIX}{epoch[:8]}-{index}"


# Handles above about 4 GiB have tripped the driver's memory scrubber on some machines, and pages of
# 2 MiB take the driver 200 µs each.
SLAB_BYTES_MAX = 2 << 30


class KvSlabStore:
    """By pool: its index, then its slabs, in order."""

    def __init__(
        self, memory: DeviceMemory, directory: str, device: str, capacity_bytes: int | None
    ) -> None:
        """`capacity_bytes`: of the device, for weights and KV together; None: all that the machine
        has free."""
        self._memory, self._index_memory = memory, HostMemory()
        self._directory, self._device = directory, device
        self._capacity_bytes = capacity_bytes
        self._parts: dict[str, list[Allocation]] = {}

    @property
    def exports_at_once(self) -> bool:
        """Whether `export` never blocks, so that no thread is needed for it."""
        return self._memory.kind == HostMemory.kind

    def path(self, pool: str) -> str:
        """The file that every process which maps the pool holds."""
        return os.path.join(self._directory, names.pool_file(self._device, pool))

    def make(self, pool: str, size_bytes: int, index_bytes: int) -> tuple[int, ...]:
        """File, index and slabs; the slabs' sizes. All or nothing.

        Raises:
            UnderstudyError: `gms.kv_too_large`, `gms.device_full`, `gms.pool_file`,
                `gms.driver_failed`, …
        """
        sizes = slab_sizes(size_bytes, self._memory.granularity_bytes)
        check_room(self._directory, self._device, sum(sizes), self._capacity_bytes)
        path = self.path(pool)
        try:
            pool_file.create_region_file(path, sum(sizes))
        except OSError as error:
            raise UnderstudyError(
                "gms.pool_file", f"cannot create {path}: {error.strerror}; free space on that disk"
            ) from error
        parts: list[Allocation] = []
        try:
            parts.append(self._index_memory.create(_pages(index_bytes), _part_name(pool, 0)))
            for each in sizes:
                parts.append(self._memory.create(each, _part_name(pool, len(parts))))
        except BaseException as error:
            release_all(parts)
            os.unlink(path)
            if isinstance(error, UnderstudyError) and error.code == "gms.device_full":
                raise beside_weights(error, self._directory, self._device) from error
            raise
        self._parts[pool] = parts
        return sizes

    def take_back(
        self, pool: str, fds: Sequence[OwnedFd], sizes: Sequence[int], index_bytes: int
    ) -> None:
        """Check and hold what a survivor handed back; takes `fds`.

        Raises:
            UnderstudyError: `gms.bad_slab`, one has another size or (host memory) is not the one
                that was made for its place.
        """
        parts: list[Allocation] = []
        rest = deque(fds)
        try:
            parts.append(self._index_memory.adopt(rest.popleft(), _pages(index_bytes)))
            for each in sizes:
                parts.append(self._memory.adopt(rest.popleft(), each))  # noqa: PERF401 - released if one fails
            for number, part in enumerate(parts):
                part.check(_part_name(pool, number), is_sealed=False)
        except BaseException:
            close_all(rest)
            release_all(parts)
            raise
        self._parts[pool] = parts

    def export(self, pool: str) -> list[OwnedFd]:
        """Writable descriptors of the index and every slab, in order; the caller owns them.

        Raises:
            UnderstudyError: `gms.driver_failed`, for example without descriptors left.
        """
        parts = self._parts.get(pool, ())  # empty: it was given up meanwhile
        return export_all(parts, writable=True)

    def mark_discarded(self, pool: str) -> None:
        """On the pool's own file, for a restarted server.

        Raises:
            OSError: it cannot be marked.
        """
        pool_file.mark_discarded(self.path(pool))

    def take(self, pool: str) -> list[Allocation]:
        """Remove the pool's file and give its memory up: the caller releases it."""
        epoch_file.remove_if_free(self.path(pool))
        return self._parts.pop(pool, [])

    def close(self) -> None:
        """Release everything; memory lives on where a process maps it."""
        for pool in list(self._parts):
            release_all(self._parts.pop(pool))


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


def _pages(size_bytes: int) -> int:
    step = HostMemory.granularity_bytes
    return -(-size_bytes // step) * step


def _part_name(pool: str, number: int) -> str:
    """The name that a part is created with: unique, so that none passes for another, nor for a slab
    of weights (`understudy-…`)."""
    return f"{KV_SLAB_PREFIX}{pool[:8]}-{number}"


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
    path = names.socket_path(directory, device)
    try:
        with BlockingClient(path, msg.CATALOGUE, connect_timeout_s=ASK_S) as client:
            answer = client.request(msg.StatusMsg(), timeout_s=ASK_S).message
    except UnderstudyError as error:
        logger.warning(
            "counting %s of weights, by their journal: %s", size(size_bytes), error.message
        )
        return size_bytes
    assert isinstance(answer, msg.StatusReplyMsg)
    phases = ("committed_bytes", "staging_bytes", "superseded_bytes", "releasing_bytes")
    return sum(int(answer.document[name]) for name in phases)


def _meminfo() -> dict[str, int]:
    values = {}
    with open(MEMINFO, encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    return values
