"""The physical memory of one device's KV pools: files, indexes, slabs.

Used by the driver thread, so it needs no locks and may block; only `export` of host memory is for
the server's loop. It decides nothing: the machine says what to make, to check and to give up.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

from gms import epoch_file, names, pool_file
from gms.kv.room import beside_weights, check_room
from gms.kv_messages import SLABS_MAX
from gms.vmm.host import HostMemory
from gms.vmm.interface import Allocation, DeviceMemory, export_all, release_all
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import KV_SLAB_PREFIX
from plumbing.text import size
from plumbing.wire.fds import OwnedFd, close_all

# Handles above about 4 GiB have tripped the driver's memory scrubber on some machines, and pages of
# 2 MiB take the driver 200 µs each.
SLAB_BYTES_MAX = 2 << 30


class PoolVault:
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
            pool_file.create(path, sum(sizes))
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
