"""What is booked on every device, and in host memory: one line for each thing that takes room.

    free = total − margin − outside − Σ entries

What is leaving still counts: an entry is dropped when its memory is proven to be free, never when
somebody was asked to give it back. Mechanics only: what is booked when, and what proves it gone, is
the machine's. The surprising thing: `free_bytes` may be negative. Books can be wrong (a measured
size above the estimate, a stranger on the device), and then they say so instead of raising.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from plumbing.errors import InvariantError
from plumbing.pod.messages import Tier
from pool.core.states import HOST, EngineSizes, EntryKey, EntryKind
from pool.core.view import DeviceView


class PoolLedger:
    """All entries of the pool. Sums are kept, so that every question is answered at once."""

    def __init__(self, margin_bytes: int) -> None:
        self.margin_bytes = margin_bytes
        self.entries: dict[EntryKey, int] = {}
        self.leaving: set[EntryKey] = set()
        self.totals: dict[str, int] = {}
        self.outside: dict[str, int] = {}
        self._booked: dict[str, int] = {}

    # ------------------------------------------------------------------ looking

    def free_bytes(self, device: str) -> int:
        """Room for a new entry; negative if more is booked or used than there is. Of a device that
        nobody has measured yet, nothing is free."""
        if device not in self.totals:
            return -self._booked.get(device, 0)
        return self.usable_bytes(device) - self._booked.get(device, 0)

    def usable_bytes(self, device: str) -> int:
        """All that may ever be booked there, as things stand outside. Host memory has no margin:
        its total is a limit that somebody has set, not a device."""
        margin_bytes = 0 if device == HOST else self.margin_bytes
        return self.totals[device] - margin_bytes - self.outside.get(device, 0)

    def fits(self, entries: Mapping[EntryKey, int]) -> bool:
        """Whether all of them could be booked at once."""
        added: dict[str, int] = {}
        for key, size_bytes in entries.items():
            more = size_bytes - self.entries.get(key, 0)
            added[key.device] = added.get(key.device, 0) + more
        return all(more <= 0 or more <= self.free_bytes(name) for name, more in added.items())

    def held_by(self, owners: Collection[str], kinds: Collection[EntryKind]) -> dict[str, int]:
        """Bytes by device that these have booked."""
        found: dict[str, int] = {}
        for key, size_bytes in self.entries.items():
            if key.owner in owners and key.kind in kinds:
                found[key.device] = found.get(key.device, 0) + size_bytes
        return found

    def views(self) -> dict[str, DeviceView]:
        """Every measured device, for the policy."""
        leaving = dict.fromkeys(self.totals, 0)
        for key in self.leaving:
            if key.device in leaving:
                leaving[key.device] += self.entries[key]
        return {
            name: DeviceView(
                name, total, self.free_bytes(name), leaving[name], self.outside.get(name, 0)
            )
            for name, total in self.totals.items()
        }

    # ------------------------------------------------------------------ what happens

    def set_device(self, device: str, total_bytes: int, outside_bytes: int) -> None:
        self.totals[device] = total_bytes
        self.outside[device] = max(0, outside_bytes)

    def book(self, entries: Mapping[EntryKey, int]) -> None:
        """All of them, or none: an entry that is there is replaced, and stays."""
        if not self.fits(entries):
            raise InvariantError(f"booked without room: {entries}")
        for key, size_bytes in entries.items():
            self.settle(key, size_bytes)
            self.leaving.discard(key)

    def settle(self, key: EntryKey, size_bytes: int) -> None:
        """It is of this size, whether there is room for it or not: it was measured."""
        if size_bytes < 0:
            raise InvariantError(f"{key} of {size_bytes} bytes")
        before = self.entries.get(key, 0)
        self.entries[key] = size_bytes
        self._booked[key.device] = self._booked.get(key.device, 0) + size_bytes - before

    def drop(self, key: EntryKey) -> None:
        """Its memory is proven to be free. Nothing happens if it is not there."""
        size_bytes = self.entries.pop(key, 0)
        self.leaving.discard(key)
        if size_bytes:
            self._booked[key.device] -= size_bytes

    def mark_leaving(self, keys: Iterable[EntryKey]) -> None:
        """Somebody was asked to give these back."""
        self.leaving.update(key for key in keys if key in self.entries)

    def mark_staying(self, keys: Iterable[EntryKey]) -> None:
        """Nobody needs to give these back any more, or nobody answers for them: they stay booked,
        and the policy does not count on them."""
        self.leaving.difference_update(keys)

    # ------------------------------------------------------------------ on file

    def snapshot(self) -> tuple[tuple[EntryKey, int], ...]:
        return tuple(self.entries.items())

    def restore(self, entries: Sequence[tuple[EntryKey, int]]) -> None:
        """What was on file is booked, whatever there is room for."""
        for key, size_bytes in entries:
            self.settle(key, size_bytes)


def needs_of(sizes: EngineSizes | None, *, has_copy: bool = True) -> dict[Tier, Mapping[str, int]]:
    """What one engine of a model has booked at each tier. A tier whose size nobody knows is left
    out, and takes the whole of its devices. `has_copy`: its weights are in host memory as well, at
    every tier above cold."""
    needs: dict[Tier, Mapping[str, int]] = {Tier.COLD: {}}
    if sizes is None or not sizes.base:
        return needs
    copy_bytes = {HOST: sum(sizes.weights.values())} if has_copy else {}
    needs[Tier.OFFLOADED] = offloaded = _sum(sizes.base, copy_bytes)
    if sizes.weights:
        needs[Tier.WARM] = warm = _sum(offloaded, sizes.weights)
        if sizes.kv:
            needs[Tier.AWAKE] = _sum(warm, sizes.kv)
    return needs


def _sum(some: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {name: some.get(name, 0) + more.get(name, 0) for name in {**some, **more}}
