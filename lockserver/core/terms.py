"""Evidence over TCP, as it is filed: whose leases stand for a holder, and how long each lasts.

A leased holder has no witness that this server could lock. It is filed with device and inode 0,
which no file has: a server that knows nothing of leases and reads this file finds the witness
unproven, grants nobody and says so. That is why the file's schema is the same as without leases; a
new number would look like a lost state to it, and a lost state is free as soon as no local process
holds a witness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockserver.core.names import INCARNATION, WitnessFile, name_of

MEMBERS_MAX = 16  # of one engine; as many fit into a slot of the state file, for every lock
SUPERVISOR_CHARS = 16
LEASE_MS_MAX = 3_600_000


@dataclass(frozen=True, slots=True)
class MemberId:
    """One member's process tree: which supervisor vouches for it, and its incarnation."""

    supervisor: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What a group of members was granted under: by member index, from 0."""

    lease_ms: int
    members: tuple[MemberId, ...]

    def to_dict(self) -> dict[str, Any]:
        """Short: an incarnation is its engine's id, which is filed already, and 16 hex digits."""
        packed = [m.supervisor + m.incarnation.rpartition("-")[2] for m in self.members]
        return {"ms": self.lease_ms, "members": packed}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], engine: str) -> LeaseTerms:
        """The terms that `to_dict` wrote; KeyError, TypeError or ValueError if it is another."""
        lease_ms, packed = int(raw["ms"]), list(raw["members"])
        if not 1 <= lease_ms <= LEASE_MS_MAX or not 1 <= len(packed) <= MEMBERS_MAX:
            raise ValueError(f"no terms of a lease: {lease_ms} ms, {len(packed)} members")
        return cls(lease_ms, tuple(_unpack(str(each), engine) for each in packed))


def _unpack(packed: str, engine: str) -> MemberId:
    member = MemberId(packed[:SUPERVISOR_CHARS], f"{engine}-{packed[SUPERVISOR_CHARS:]}")
    if not INCARNATION.fullmatch(member.incarnation):
        raise ValueError(f"{packed!r} is no member of {engine}")
    return member


def unlockable_witness(incarnation: str) -> WitnessFile:
    """What stands where a witness would: its name for people, and a file that cannot exist."""
    return WitnessFile(name_of(incarnation), 0, 0)
