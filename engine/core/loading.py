"""Which ranks of one incarnation may load their weights, by the loader lock.

One engine of a model loads at a time: ranks of two would wait for each other's devices. Owns when
the lock is wanted (from the first rank that asks until every rank is attached) and that all ranks
have the same weights. Must not know how the lock is acquired. A `shadow` never writes, so it never
waits for this lock.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

MODE_WRITE = "rw_or_ro"
MODE_READ = "ro"


class Role(StrEnum):
    PRIMARY = "primary"
    SHADOW = "shadow"
    AUTO = "auto"

    @property
    def may_write(self) -> bool:
        return self is not Role.SHADOW


class Loading:
    """The ranks of one incarnation on their way to the weights."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.ranks = 1  # how many there are, by what they reported
        self._attached: dict[int, dict[str, Any]] = {}
        self._places: dict[int, str] = {}  # where each rank has its weights, in a pod with models
        self._has_asked = False

    @property
    def missing(self) -> str | None:
        """Which ranks have no weights although some rank asked: all or none must have them."""
        absent = [str(rank) for rank in range(self.ranks) if rank not in self._attached]
        if not self._has_asked or not absent:
            return None
        return f"of {self.ranks} ranks, {', '.join(absent)} attached no weights"

    @property
    def places(self) -> tuple[str, ...]:
        """Of all ranks, in order, as far as they are known."""
        return tuple(self._places[rank] for rank in sorted(self._places))

    @property
    def wants_loader(self) -> bool:
        is_done = len(self._attached) >= self.ranks
        return self._has_asked and self._role.may_write and not is_done

    @property
    def mode(self) -> str:
        return MODE_WRITE if self._role.may_write else MODE_READ

    def asked(self, ranks: int) -> None:
        """One of so many ranks asks for its weights."""
        self._has_asked, self.ranks = True, ranks

    def is_permitted(self, *, has_loader: bool) -> bool:
        """Whether ranks that have asked may load now, in `mode`."""
        return has_loader or not self._role.may_write

    def attached(self, rank: int, identity: dict[str, Any], place: str = "") -> str | None:
        """A rank has its weights mapped: what is wrong with them, if anything."""
        self._attached[rank] = identity
        if place:
            self._places[rank] = place
        first_rank, first = next(iter(self._attached.items()))
        names = sorted(
            name for name in first.keys() | identity.keys() if first.get(name) != identity.get(name)
        )
        if not names:
            return None
        return f"rank {rank} has other weights than rank {first_rank}: {names[0]} differs"
