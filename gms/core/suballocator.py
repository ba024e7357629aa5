"""Where a writer's tensors go: few large slabs, tensors placed one after the other in them.

Pure; it hands out numbers, its caller opens the slabs. Few slabs make attaching one request and
one frame of descriptors; the rule for their size is: the largest of 64 MiB, the weights ÷ 128
and the largest tensor. A writer that does not say beforehand how much it will place gets slabs
that grow with what it has placed, so that their number stays small all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

SLAB_BYTES_MIN = 64 << 20
SLABS_WANTED = 128  # half of what one frame carries, so that odd tensor sizes cannot exceed it
GROWTH_DIVISOR = 32  # unplanned: each slab at least 1/32 of what lies before it; 1 TiB in < 250
ALIGNMENT_BYTES = 256  # what cudaMalloc gives and vectorised kernels expect


@dataclass(frozen=True, slots=True)
class Placement:
    """`nbytes` of a tensor belong at `offset` of slab number `slab`."""

    slab: int
    offset: int


@dataclass(frozen=True, slots=True)
class NeedSlab:
    """Open a slab of `size_bytes`, report it with `slab_opened`, then ask again."""

    size_bytes: int


class Suballocator:
    """Places tensors in slabs. Nothing is ever given back: an epoch is written once."""

    def __init__(self, granularity_bytes: int, slab_bytes_max: int) -> None:
        """`slab_bytes_max` is what the device has free: a small device gets small slabs."""
        self.granularity_bytes = granularity_bytes
        self.slab_bytes_max = slab_bytes_max
        self.slab_sizes: list[int] = []
        self._used: list[int] = []
        self._planned_bytes: int | None = None
        self._slab_bytes = SLAB_BYTES_MIN

    def plan(self, total_bytes: int, tensor_bytes_max: int) -> None:
        """Say what is coming: slabs get the size of the rule, and the last one what remains."""
        self._planned_bytes = total_bytes
        self._slab_bytes = max(SLAB_BYTES_MIN, total_bytes // SLABS_WANTED, tensor_bytes_max)

    def place(self, nbytes: int) -> Placement | NeedSlab:
        """Place a tensor of `nbytes` in the first slab with room, or ask for a new slab."""
        needed = _round_up(nbytes, ALIGNMENT_BYTES)
        for slab, size in enumerate(self.slab_sizes):
            if self._used[slab] + needed <= size:
                offset = self._used[slab]
                self._used[slab] += needed
                return Placement(slab, offset)
        return NeedSlab(self._next_slab_bytes(needed))

    def slab_opened(self, size_bytes: int) -> None:
        """A slab of `size_bytes` was opened; its number is the count of those before it."""
        self.slab_sizes.append(size_bytes)
        self._used.append(0)
        self.slab_bytes_max = max(0, self.slab_bytes_max - size_bytes)

    @property
    def placed_bytes(self) -> int:
        return sum(self._used)

    def _next_slab_bytes(self, needed: int) -> int:
        wanted = self._slab_bytes
        if self._planned_bytes is None:
            wanted = max(wanted, self.placed_bytes // GROWTH_DIVISOR)
        else:
            # What remains, and a little for alignment; the slab after it is small if it is short.
            remaining = self._planned_bytes - self.placed_bytes
            wanted = min(wanted, remaining + remaining // 64)
        # Never below what is needed: that fails with the server's sentence, not with ours.
        size = max(needed, min(wanted, self.slab_bytes_max), 1)
        return _round_up(size, self.granularity_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
