"""Evidence over TCP, as it is filed: whose leases stand for a holder, and how long each lasts.

A leased holder has no witness that this server could lock. It is filed with device and inode 0,
which no file has: a server that does not know leases and reads this file finds the witness
unproven, makes no grant and reports why. That is why the file's schema is the same as without
leases; a new number would look like a lost state to it, and after a lost state a lock is free as
soon as no local process holds a witness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockserver.core.names import INCARNATION, WitnessFile, name_of

MEMBERS_MAX = 16  # per engine; this many fit into a slot of the state file, for every lock
SUPERVISOR_CHARS = 16
LEASE_MS_MAX = 3_600_000


@dataclass(frozen=True, slots=True)
class MemberId:
    """One member's process tree: which supervisor vouches for it, and its incarnation."""

    supervisor: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The leases that a group of members was granted under, by member index."""

    lease_ms: int
    members: tuple[MemberId, ...]

    def to_dict(self) -> dict[str, Any]:
        """Compact: only the 16 hex digits of an incarnation, since its engine is filed already."""
        packed = [m.supervisor + m.incarnation.rpartition("-")[2] for m in self.members]
        return {"ms": self.lease_ms, "members": packed}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], engine: str) -> LeaseTerms:
        """The terms that `to_dict` wrote; KeyError, TypeError or ValueError if malformed."""
        lease_ms, packed = int(raw["ms"]), list(raw["members"])
        if not 1 <= lease_ms <= LEASE_MS_MAX or not 1 <= len(packed) <= MEMBERS_MAX:
            raise ValueError(f"invalid lease terms: {lease_ms} ms, {len(packed)} members")
        return cls(lease_ms, tuple(_unpack(str(each), engine) for each in packed))


def _unpack(packed: str, engine: str) -> MemberId:
    member = MemberId(packed[:SUPERVISOR_CHARS], f"{engine}-{packed[SUPERVISOR_CHARS:]}")
    if not INCARNATION.fullmatch(member.incarnation):
        raise ValueError(f"{packed!r} is not a valid member of {engine}")
    return member


def unlockable_witness(incarnation: str) -> WitnessFile:
    """The stand-in for a witness: a readable name, and a file that cannot exist."""
    return WitnessFile(name_of(incarnation), 0, 0)
