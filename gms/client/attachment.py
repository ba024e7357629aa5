"""One process's hold on one epoch: the flock on its file, the slabs, their range of addresses.

Owns the order of things: flock before the first mapping, and at the end unmap, let the slabs go,
flock last; where the driver fails at that, the flock stays for as long as the process lives,
because the memory may be mapped for as long. It knows neither messages nor what the bytes mean.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

from gms.vmm.interface import Allocation, Memory, Reservation
from plumbing.errors import InvariantError
from plumbing.wire.fds import OwnedFd, close_all


class Attachment:
    """The flock, the slabs and the one range in which they lie side by side."""

    def __init__(self, memory: Memory) -> None:
        self.slabs: list[Allocation] = []
        self._memory = memory
        self._range: Reservation | None = None
        self._flock: OwnedFd | None = None

    @property
    def range(self) -> Reservation:
        """The addresses of the epoch."""
        if self._range is None:
            raise InvariantError("this attachment has no addresses")
        return self._range

    @property
    def size_bytes(self) -> int:
        """What is mapped."""
        return sum(slab.size_bytes for slab in self.slabs)

    def hold(self, flock: OwnedFd) -> None:
        """Takes the descriptor with the shared flock."""
        self._flock = flock

    def reserve(self, size_bytes: int) -> None:
        """Take addresses for at least `size_bytes`, unless it has them; they cost no memory."""
        if self._range is not None:
            return
        granularity = self._memory.granularity_bytes
        # An epoch may be empty, a range of addresses may not.
        self._range = self._memory.reserve(max(1, -(-size_bytes // granularity)) * granularity)

    def adopt(self, fds: Sequence[OwnedFd], sizes: Sequence[int], *, writable: bool) -> None:
        """Map further slabs after those that are there; takes `fds`."""
        fresh: list[Allocation] = []
        rest = deque(fds)
        try:
            for size_bytes in sizes:
                slab = self._memory.adopt(rest.popleft(), size_bytes)
                fresh.append(slab)
            self.range.map(self.size_bytes, fresh, writable=writable)
        except BaseException:
            close_all(rest)
            _release(fresh)
            raise
        self.slabs += fresh

    def make_read_only(self) -> None:
        """Every slab read-only over itself; nobody can write through us from here on."""
        self.range.make_read_only()

    def unmap(self) -> None:
        """Let go of the memory and then of the epoch, keeping the addresses."""
        slabs, self.slabs = self.slabs, []
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(_release, slabs)
                if self._range is not None:
                    self._range.unmap()
        except BaseException:
            if self._flock is not None:
                self._flock.detach()
                self._flock = None
            raise
        if self._flock is not None:
            self._flock.close()
            self._flock = None

    def close(self) -> None:
        """Give everything back; again is harmless."""
        with contextlib.ExitStack() as stack:
            if self._range is not None:
                stack.callback(self._range.free)
            self.unmap()


def _release(slabs: Sequence[Allocation]) -> None:
    """Release every one, whatever releasing any of them raises."""
    failed: BaseException | None = None
    for slab in slabs:
        try:
            slab.release()
        except BaseException as error:
            failed = error
    if failed is not None:
        raise failed
