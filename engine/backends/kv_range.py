"""Addresses for a KV cache, with or without memory behind them: a GPU's, or host memory.

    scratch   any address may be touched, nothing lasts   warm-up, graph capture
    parked    addresses only, touching them is fatal      standby
    taken     zeroed memory, or the pool's with what      from the wake on
              earlier engines have left in it

While parked they must not be touched. On the host a read or write kills the process (SIGSEGV),
which is better than a standby that quietly takes memory; on a GPU it destroys the context.

The memory is the process's own, or slabs of a pool that it has borrowed. CUDA graphs record
addresses, not memory. While the engine warms up and captures its graphs, one block of scratch
memory is mapped repeatedly over the whole range, so that every address is valid; what is written
there is garbage, which no capture reads. The graphs work with whatever is mapped there later.

What one layer writes to scratch memory may be overwritten by another. A self-test uses only some
parts of the range (`used`), and the scratch size is chosen so that these lie at different places of
the block. On the host the block is as large as the range: what is not touched takes no memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise

from engine.backends.process_memory import (
    RESERVE_BYTES,
    Room,
    has_room_for,
    keep_trying,
    resident_bytes,
)
from gms.client import Allocation, Filling, memory_for
from plumbing.errors import InvariantError, UnderstudyError
from plumbing.pod.paths import KV_SLAB_PREFIX

logger = logging.getLogger(__name__)

# The largest scratch block: 80 GiB of KV cache are 320 mappings of it, at about 10 µs each, and a
# standby needs that much, besides its graphs, until it parks.
SCRATCH_BYTES_MAX = 256 << 20
# Where a self-test needs more: the models whose blocks are largest.
TEST_BYTES_MAX = 1 << 30

Range = tuple[int, int]  # from, to: bytes


class Backing(StrEnum):
    """What is behind the addresses."""

    SCRATCH = "scratch"
    PARKED = "parked"
    TAKEN = "taken"


class KvRange:
    """`size_bytes` of the addresses of a device; parked (without memory) at first."""

    def __init__(
        self,
        device: str,
        size_bytes: int,
        read: Callable[[], Room],
        *,
        ranks: int = 1,
        used: Sequence[Range] | None = None,
    ) -> None:
        """`read` returns how much memory there is free. `ranks` processes of this machine take a
        range of this size at the same time. `used` by a self-test: scratch memory is to keep these
        parts of the range apart, if it can.

        Raises:
            UsageError: this process cannot use the GPU called `device`.
            UnderstudyError: `gms.driver_failed`, there are not enough addresses.
        """
        self._memory, self._read, self._ranks = memory_for(device), read, ranks
        self._is_host = self._memory.kind == "host"
        self.size_bytes = size_bytes
        step = self._memory.granularity_bytes
        self.pool_bytes = _up(size_bytes, step)
        least = min(_up(SCRATCH_BYTES_MAX, step), self.pool_bytes)
        most = min(TEST_BYTES_MAX, self.pool_bytes)
        apart = fitting(used, least, most, step) if used is not None else None
        if self._is_host:
            apart = self.pool_bytes
        self._scratch_bytes = apart or least
        self.can_test = apart is not None
        # A multiple of the scratch block: allocations are mapped whole, and addresses are free.
        self._range = self._memory.reserve(_up(size_bytes, self._scratch_bytes))
        self._undo = contextlib.ExitStack()
        self.backing = Backing.PARKED

    @property
    def address(self) -> int:
        return self._range.address

    def scratch(self) -> None:
        """Map one block of memory behind every part of a parked range.

        Raises:
            UnderstudyError: `gms.device_full`.
        """
        if self.backing is not Backing.PARKED:
            raise InvariantError(f"scratch memory for a KV cache that is {self.backing}")
        with contextlib.ExitStack() as undo:
            block = self._memory.create(self._scratch_bytes, f"{KV_SLAB_PREFIX}scratch")
            undo.callback(block.release)
            times = self._range.size_bytes // self._scratch_bytes
            self._map(undo, [block] * times, is_new=True)
        self.backing = Backing.SCRATCH

    def park(self) -> None:
        """Release all memory and keep the addresses; idempotent."""
        # Set first: after a failure half-way the memory must not count as taken.
        self.backing = Backing.PARKED
        self._undo.close()

    def take(self, deadline_s: float) -> None:
        """Map zeroed memory behind all of the range, once the device has it free; idempotent.

        A process that has just died may hold its memory for a moment longer, so a full device is
        retried until the deadline. The host's kernel overcommits, and must be asked first.

        Raises:
            WaitTimeoutError: `engine.kv_memory_busy`; the range stays parked.
            UnderstudyError: `gms.driver_failed`; likewise.
        """
        if self.backing is Backing.TAKEN:
            return
        self.park()
        most, size_bytes = self._memory.allocation_bytes_max or self.pool_bytes, self.pool_bytes
        parts = [min(most, size_bytes - at) for at in range(0, size_bytes, most)]
        needed_bytes, kept_bytes = size_bytes * self._ranks, RESERVE_BYTES if self._is_host else 0
        with contextlib.ExitStack() as undo:
            blocks: list[Allocation] = []

            def attempt() -> int | None:
                if self._is_host and (free := self._read().free_bytes) < needed_bytes + kept_bytes:
                    return free
                while len(blocks) < len(parts):
                    try:
                        blocks.append(
                            self._memory.create(parts[len(blocks)], f"{KV_SLAB_PREFIX}own")
                        )
                    except UnderstudyError as error:
                        if error.code != "gms.device_full":
                            raise
                        # What we have already taken was free too.
                        return self._read().free_bytes + sum(parts[: len(blocks)])
                    undo.callback(blocks[-1].release)
                return None

            keep_trying(attempt, needed_bytes, deadline_s, kept_bytes)
            self._map(undo, blocks, is_new=True)
        self._taken(blocks)

    def borrow(self, slabs: Sequence[Allocation], *, is_new: bool) -> None:
        """Map slabs behind all of the range; idempotent. They stay their owner's; new ones are
        zeroed.

        Raises:
            UnderstudyError: `gms.driver_failed`; the range stays parked.
        """
        if self.backing is Backing.TAKEN:
            return
        self.park()
        found_bytes = sum(slab.size_bytes for slab in slabs)
        if found_bytes != self.pool_bytes:
            raise InvariantError(f"a pool of {found_bytes} bytes for {self.pool_bytes}")
        with contextlib.ExitStack() as undo:
            self._map(undo, slabs, is_new=is_new)
        self._taken(slabs)

    def view(self) -> memoryview:
        """What is taken of host memory: used after `park`, it ends the process."""
        return self._range.view(0, self.size_bytes)

    def resident_bytes(self) -> int:
        """Memory that this process has in the range. A device's mapped memory is all resident; on
        the host the kernel counts this range's pages. smaps would list every mapping of a vLLM
        process, which takes 15 ms of a rest that takes 5."""
        if self._is_host:
            return resident_bytes(self.address, self.pool_bytes)
        return self._range.mapped_bytes

    def free(self) -> None:
        """Release the addresses too; idempotent."""
        self.park()
        self._range.free()

    def _map(
        self, undo: contextlib.ExitStack, slabs: Sequence[Allocation], *, is_new: bool
    ) -> None:
        undo.callback(self._range.unmap)
        self._range.map(0, slabs, writable=True)
        if is_new and not self._is_host:
            self._range.clear()  # leftovers of other processes may be NaN
        self._undo = undo.pop_all()

    def _taken(self, slabs: Sequence[Allocation]) -> None:
        """Host memory gets huge pages meanwhile: a process with small ones takes 72 ms per GiB to
        die, which delays the next grant."""
        self.backing = Backing.TAKEN
        if not self._is_host:
            return
        fds, size = [slab.fileno() for slab in slabs], self.pool_bytes
        filling = Filling(
            self.address,
            size,
            lambda huge: logger.info("%d of %d bytes of KV memory are in huge pages", huge, size),
            has_room=lambda: has_room_for(fds, self._read),
        )
        self._undo.callback(filling.stop)


def _up(size_bytes: int, step_bytes: int) -> int:
    return -(-size_bytes // step_bytes) * step_bytes


def fitting(used: Sequence[Range], least: int, most: int, step: int) -> int | None:
    """The smallest size from `least` to `most` bytes, in steps, that keeps `used` apart."""
    return next((size for size in range(least, most + 1, step) if _are_apart(used, size)), None)


def _are_apart(used: Sequence[Range], size: int) -> bool:
    parts: list[Range] = []
    for start, end in used:
        if end - start > size:
            return False
        at, length = start % size, end - start
        parts.append((at, min(at + length, size)))
        if at + length > size:
            parts.append((0, at + length - size))
    return all(one[1] <= other[0] for one, other in pairwise(sorted(parts)))
