"""Where the tensors of an epoch go: few large slabs side by side, tensors one after the other in
them.

It computes numbers; the writer opens the slabs. A place is an offset from the start of the epoch,
because its slabs are mapped side by side. With few slabs, attaching takes one request and one frame
of descriptors. A slab is as large as the largest of 64 MiB, the weights ÷ 128 and the largest
tensor.

Only a tensor larger than the slab limit (`slab_bytes_cap`: some drivers fail with large handles)
spans slabs; a smaller one never crosses an edge.
"""

from __future__ import annotations

from msgspec import Struct

SLAB_BYTES_MIN = 64 << 20
SLABS_WANTED = 128  # half of what one frame carries, so that odd tensor sizes cannot exceed it
ALIGNMENT_BYTES = 256  # what cudaMalloc gives and vectorised kernels expect


class NeedSlab(Struct, frozen=True):
    """Open a slab of `size_bytes`, report it with `slab_opened`, then ask again."""

    size_bytes: int


class _Slab(Struct):
    """One slab: `start` from the start of the epoch, and how much of it is placed."""

    start: int
    size_bytes: int
    used_bytes: int = 0


class Suballocator:
    """Places tensors in slabs. Nothing is ever freed: an epoch is written once."""

    def __init__(
        self, granularity_bytes: int, free_bytes: int, slab_bytes_cap: int | None = None
    ) -> None:
        """`free_bytes` of the device: a small device gets small slabs."""
        self.granularity_bytes = granularity_bytes
        self.free_bytes = free_bytes
        # Rounded down, because slabs are rounded up to the granularity.
        self.slab_bytes_cap = slab_bytes_cap and slab_bytes_cap // granularity_bytes * (
            granularity_bytes
        )
        self.slab_sizes: list[int] = []
        self.placed_bytes = 0
        self._roomy: list[_Slab] = []  # those that are not full, in order
        self._end = 0
        self._planned_bytes: int | None = None
        self._slab_bytes = SLAB_BYTES_MIN

    def plan(self, total_bytes: int, tensor_bytes_max: int, slab_bytes: int | None = None) -> None:
        """Announce what is coming: slabs get the size of the rule, and the last one what remains.

        Args:
            slab_bytes: overrides the rule.
        """
        self._planned_bytes = total_bytes
        by_rule = max(SLAB_BYTES_MIN, total_bytes // SLABS_WANTED, tensor_bytes_max)
        self._slab_bytes = slab_bytes or by_rule

    def place(self, nbytes: int) -> int | NeedSlab:
        """The offset of a tensor of `nbytes`, or the next slab that it needs first."""
        needed = _round_up(nbytes, ALIGNMENT_BYTES)
        if self.slab_bytes_cap is not None and needed > self.slab_bytes_cap:
            return self._place_spanning(needed)
        for slab in self._roomy:
            if slab.used_bytes + needed <= slab.size_bytes:
                return self._take(slab, needed)
        return NeedSlab(self._next_slab_bytes(needed))

    def slab_opened(self, size_bytes: int) -> None:
        """A slab of `size_bytes` was opened."""
        self.slab_sizes.append(size_bytes)
        self._roomy.append(_Slab(self._end, size_bytes))
        self._end += size_bytes
        self.free_bytes = max(0, self.free_bytes - size_bytes)

    def _take(self, slab: _Slab, needed: int) -> int:
        offset = slab.start + slab.used_bytes
        slab.used_bytes += needed
        self.placed_bytes += needed
        if slab.used_bytes == slab.size_bytes:
            self._roomy.remove(slab)
        return offset

    def _place_spanning(self, needed: int) -> int | NeedSlab:
        """Place it in the free space at the end of the epoch, if that suffices."""
        run = self._end_run()
        at_hand_bytes = sum(slab.size_bytes - slab.used_bytes for slab in run)
        if at_hand_bytes < needed:
            return NeedSlab(self._next_slab_bytes(needed - at_hand_bytes, at_hand_bytes))
        offset = run[0].start + run[0].used_bytes
        for slab in run:
            part = min(needed, slab.size_bytes - slab.used_bytes)
            if part:
                self._take(slab, part)
                needed -= part
        return offset

    def _end_run(self) -> list[_Slab]:
        """The slabs in which the free bytes up to the end of the epoch lie, in order."""
        run: list[_Slab] = []
        end = self._end
        for slab in reversed(self._roomy):
            if slab.start + slab.size_bytes != end:
                break
            run.insert(0, slab)
            end = slab.start
            if slab.used_bytes:
                break
        return run

    def _next_slab_bytes(self, needed: int, at_hand_bytes: int = 0) -> int:
        wanted = self._slab_bytes
        if self._planned_bytes is not None:
            # What remains, and a little for alignment; if that is short, the next slab is small.
            remaining = self._planned_bytes - self.placed_bytes - at_hand_bytes
            wanted = min(wanted, remaining + remaining // 64)
        # Never below what is needed: then the server refuses it, with its explanation.
        size = max(needed, min(wanted, self.free_bytes), 1)
        if self.slab_bytes_cap is not None:
            size = min(size, self.slab_bytes_cap)
        return _round_up(size, self.granularity_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
