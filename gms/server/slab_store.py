"""The physical memory that one place's servers hold: the slabs of epochs, or of KV pools with their
indexes; and whether another pool fits.

The driver's thread uses a store, so it needs no locks and may block. Elsewhere, on the loop, only
`open` is called, of an epoch, and `export`, of what does not change any more. A store decides
nothing: the machines say what to create, seal, check and give up.

`KvRoom` compares a KV pool with what the device has left beside its weights. A GPU's driver has
the last word, but a pool is made on the path of a wake: what cannot fit is better said at once.
This process's own control group does not matter: memory counts against the group of the process
that touches it first, which is the engine's (`engine.backends.free_memory.has_room_for`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from gms import epoch_file
from gms.messages import POOL_SLABS_MAX
from gms.vmm.host import HostMemory
from gms.vmm.interface import Allocation, DeviceMemory, export_all, release_all
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import KV_SLAB_PREFIX, SLAB_PREFIX
from plumbing.text import size
from plumbing.wire.fds import OwnedFd, close_all


class Part(NamedTuple):
    """A slab or an index. Its name is unique, so that none passes for another."""

    memory: DeviceMemory
    size_bytes: int
    name: str


class SlabStore:
    """Memory by region, in the order in which its descriptors are sent."""

    def __init__(self, *, is_writable: bool) -> None:
        """`is_writable`: by those to whom a whole region is exported."""
        self._is_writable = is_writable
        self._slabs: dict[str, list[Allocation]] = {}

    def open(self, region: str, path: str, size_bytes: int = 0) -> None:
        """Create the file of a new region; `size_bytes`: of KV memory."""
        try:
            epoch_file.create(path, size_bytes)
        except OSError as error:
            raise UnderstudyError(
                "gms.pool_file" if size_bytes else "gms.epoch_file",
                f"cannot create {path}: {error.strerror}; free space on that disk",
            ) from error
        self._slabs[region] = []

    def add(self, region: str, memory: DeviceMemory, size_bytes: int, name: str = "") -> None:
        """One more; without a name it is a slab of weights."""
        name = name or _slab_name(region, len(self._slabs[region]))
        self._slabs[region].append(memory.create(size_bytes, name))

    def seal(self, region: str) -> None:
        """From now on no process can write it."""
        for slab in self._slabs[region]:
            slab.seal()

    def lend(self, region: str, slab: int) -> OwnedFd:
        """A writable descriptor of one slab, for its writer."""
        return self._slabs[region][slab].export(writable=True)

    def export(self, region: str) -> list[OwnedFd]:
        """Descriptors of all its memory, in order, for the caller; none if it was given up."""
        return export_all(self._slabs.get(region, ()), writable=self._is_writable)

    def take_back(self, region: str, fds: Sequence[OwnedFd], parts: Sequence[Part]) -> None:
        """Check and hold what a survivor has handed back; takes `fds`.

        Raises:
            UnderstudyError: `gms.bad_slab`, one has another size, or is writable though it must
                not be, or (host memory) is not the one that was created for its place.
        """
        slabs: list[Allocation] = []
        rest = deque(fds)
        try:
            for part in parts:
                slabs.append(part.memory.adopt(rest.popleft(), part.size_bytes))
                slabs[-1].check(part.name, is_sealed=not self._is_writable)
        except BaseException:
            close_all(rest)
            release_all(slabs)
            raise
        self._slabs[region] = slabs

    def take(self, region: str, path: str) -> list[Allocation]:
        """Give its memory up, with its file: the caller releases it, where that may take long."""
        epoch_file.remove_if_free(path)
        return self._slabs.pop(region, [])

    def close(self) -> None:
        """Release everything; memory lives on where a process maps it."""
        for region in list(self._slabs):
            release_all(self._slabs.pop(region))


def weights_parts(memory: DeviceMemory, epoch: str, sizes: Sequence[int]) -> list[Part]:
    return [Part(memory, each, _slab_name(epoch, n)) for n, each in enumerate(sizes)]


def _slab_name(epoch: str, index: int) -> str:
    return f"{SLAB_PREFIX}{epoch[:8]}-{index}"


def pool_parts(
    memory: DeviceMemory, pool: str, sizes: Sequence[int], index_bytes: int
) -> list[Part]:
    """The index, then the slabs."""
    step, prefix = HostMemory.granularity_bytes, f"{KV_SLAB_PREFIX}{pool[:8]}"
    index = Part(HostMemory(), -(-index_bytes // step) * step, f"{prefix}-0")
    return [index, *(Part(memory, each, f"{prefix}-{n}") for n, each in enumerate(sizes, 1))]


# Handles above about 4 GiB have tripped the driver's memory scrubber on some machines, and pages of
# 2 MiB take the driver 200 µs each.
SLAB_BYTES_MAX = 2 << 30


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


class KvRoom(Struct, frozen=True):
    """What a device has for KV memory beside its weights. `capacity_bytes` is for both; None: all
    that the machine has free."""

    device: str
    capacity_bytes: int | None
    weights_bytes: int
    others_bytes: int

    def check(self, needed_bytes: int) -> None:
        capacity_bytes = self.capacity_bytes
        if capacity_bytes is not None:
            taken = (
                f"{size(self.weights_bytes)} of the {size(capacity_bytes)} of {self.device} hold"
            )
            taken += " weights"
            if self.others_bytes:
                taken += f", and {size(self.others_bytes)} are other models'"
            free_bytes = capacity_bytes - self.weights_bytes - self.others_bytes
            _check(needed_bytes, capacity_bytes, free_bytes, "this device", taken)
        if self.device.startswith("HOST-"):
            with open("/proc/meminfo", encoding="ascii") as file:
                found = dict(line.split()[:2] for line in file)
            total_bytes, free_bytes = (
                int(found[name]) * 1024 - RESERVE_BYTES for name in ("MemTotal:", "MemAvailable:")
            )
            taken = f"this machine has {size(max(0, free_bytes))} free beside a reserve"
            _check(needed_bytes, total_bytes, free_bytes, "this machine's memory", taken)


def _check(needed_bytes: int, limit_bytes: int, free_bytes: int, where: str, taken: str) -> None:
    if needed_bytes > limit_bytes:
        raise UnderstudyError(
            "gms.kv_too_large",
            f"{size(needed_bytes)} of KV memory can never fit: {where} has {size(limit_bytes)}; use"
            " less KV memory (--slots, --max-context), or a larger --device-bytes",
            needed_bytes=needed_bytes,
            limit_bytes=limit_bytes,
        )
    if needed_bytes > free_bytes:
        raise UnderstudyError(
            "gms.device_full",
            f"the KV memory needs {size(needed_bytes)}, and {taken}; stop what holds the memory, or"
            " use less KV memory, a smaller model, or a larger --device-bytes",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )
