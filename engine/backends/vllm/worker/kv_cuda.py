"""Addresses for a KV cache on a GPU, with or without memory behind them.

CUDA graphs record addresses, not memory. While the engine warms up and captures its graphs, one
block of scratch memory is mapped repeatedly over the whole range, so that every address is valid;
what is written there is garbage, which no capture reads. The graphs work with whatever is mapped at
the same addresses later.

What one layer writes to scratch memory may be overwritten by another. A self-test uses only the
first `BLOCKS` blocks of each layer, and the scratch size is chosen so that these lie at different
places of the block of memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from engine.backends.process_memory import Room, keep_trying
from gms.client import Allocation, memory_for
from plumbing.errors import UnderstudyError

# The largest scratch block: 80 GiB of KV cache are 320 mappings of it, at about 10 µs each, and a
# standby needs that much, besides its graphs, until it parks.
SCRATCH_BYTES_MAX = 256 << 20
# Where a self-test needs more: the models whose blocks are largest.
TEST_BYTES_MAX = 1 << 30


class CudaRange:
    """`size_bytes` of a device's addresses; parked (without memory) at first.

    Touching it while parked destroys the CUDA context, and with it the process.
    """

    def __init__(
        self,
        device: str,
        size_bytes: int,
        read: Callable[[], Room],
        used: Sequence[Range] | None = None,
    ) -> None:
        """`read` returns how much memory the device has free, for messages while waiting. `used` by
        a self-test: scratch memory is to keep these parts of the range apart, if it can.

        Raises:
            UsageError: this process cannot use the GPU called `device`.
            UnderstudyError: `gms.driver_failed`, there are not enough addresses.
        """
        self.size_bytes = size_bytes
        self._read = read
        self._memory = memory_for(device)
        step = self._memory.granularity_bytes
        self.pool_bytes = _up(size_bytes, step)
        least = min(_up(SCRATCH_BYTES_MAX, step), self.pool_bytes)
        most = min(TEST_BYTES_MAX, self.pool_bytes)
        apart = fitting(used, least, most, step) if used is not None else None
        self._scratch_bytes = apart or least
        self.can_test = apart is not None
        # A multiple of the scratch block: allocations are mapped whole, and addresses are free.
        self._range = self._memory.reserve(_up(size_bytes, self._scratch_bytes))
        self._resident_bytes = 0
        self._undo = contextlib.ExitStack()

    @property
    def address(self) -> int:
        return self._range.address

    def scratch(self) -> None:
        """Map one block of memory behind every part of the range.

        Raises:
            UnderstudyError: `gms.device_full`.
        """
        with contextlib.ExitStack() as undo:
            block = self._memory.create(self._scratch_bytes, "kv-scratch")
            undo.callback(block.release)
            undo.callback(self._range.unmap)
            times = self._range.size_bytes // self._scratch_bytes
            self._range.map(0, [block] * times, writable=True)
            self._range.clear()  # leftovers of other processes may be NaN
            self._undo = undo.pop_all()
        self._resident_bytes = self._scratch_bytes

    def park(self) -> None:
        """Release all memory and keep the addresses."""
        self._resident_bytes = 0
        self._undo.close()

    def take(self, deadline_s: float) -> None:
        """Map zeroed memory behind all of a parked range, once the device has it free.

        A process that has just died may hold its memory for a moment longer, so a full device is
        retried until the deadline.

        Raises:
            WaitTimeoutError: `engine.kv_memory_busy`; the range stays parked.
            UnderstudyError: `gms.driver_failed`; likewise.
        """
        most, size_bytes = self._memory.allocation_bytes_max or self.pool_bytes, self.pool_bytes
        parts = [min(most, size_bytes - at) for at in range(0, size_bytes, most)]
        with contextlib.ExitStack() as undo:
            blocks: list[Allocation] = []

            def attempt() -> int | None:
                while len(blocks) < len(parts):
                    try:
                        blocks.append(self._memory.create(parts[len(blocks)], "kv"))
                    except UnderstudyError as error:
                        if error.code != "gms.device_full":
                            raise
                        # What we have already taken was free too.
                        return self._read().free_bytes + sum(parts[: len(blocks)])
                    undo.callback(blocks[-1].release)
                return None

            keep_trying(attempt, self.pool_bytes, deadline_s)
            undo.callback(self._range.unmap)
            self._range.map(0, blocks, writable=True)
            self._range.clear()
            self._undo = undo.pop_all()
        self._resident_bytes = self.pool_bytes

    def borrow(self, slabs: Sequence[Allocation], *, is_new: bool) -> None:
        """Map slabs behind all of a parked range. They stay their owner's; new ones are zeroed.

        Raises:
            UnderstudyError: `gms.driver_failed`; the range stays parked.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self._range.unmap)
            self._range.map(0, slabs, writable=True)
            if is_new:
                self._range.clear()
            self._undo = undo.pop_all()
        self._resident_bytes = sum(each.size_bytes for each in slabs)

    def resident_bytes(self) -> int:
        """What is mapped; on a device, mapped memory is resident."""
        return self._resident_bytes

    def free(self) -> None:
        """Release the addresses too; idempotent."""
        self.park()
        self._range.free()


def _up(size_bytes: int, step_bytes: int) -> int:
    return -(-size_bytes // step_bytes) * step_bytes


BLOCKS = 192  # of each group of layers: what a self-test uses at most (`self_test.most_blocks`)

Range = tuple[int, int]  # from, to: bytes


def ranges(kv_cache_config: Any) -> list[Range] | None:
    """Where the first `BLOCKS` blocks of all layers lie, in order and joined; None: that cannot be
    told, because the parts of a block lie apart."""
    found: list[Range] = []
    pages = [group.kv_cache_spec.page_size_bytes for group in kv_cache_config.kv_cache_groups]
    for tensor in kv_cache_config.kv_cache_tensors:
        of_block = int(getattr(tensor, "block_stride", 0))
        if of_block < max(pages):
            return None
        length = min(BLOCKS * len(pages), int(kv_cache_config.num_blocks)) * of_block
        starts = [tensor.offset + at * tensor.layer_stride for at in range(len(tensor.layers))]
        found += [(start, min(start + length, tensor.size)) for start in starts]
    joined: list[Range] = []
    for start, end in sorted(found):
        if joined and start <= joined[-1][1]:
            start, before = joined.pop()
            end = max(end, before)
        joined.append((start, end))
    return joined


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
