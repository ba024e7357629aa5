"""What the machine of a device wants done, and for whom: the other half of `events.py`.

Pure data. An `Answer` goes to a session (or to a connection that only asks); the other effects are
calls to the driver, whose completions come back as events, and notes for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gms.core.events import JournalRecord
from plumbing.errors import UnderstudyError


@dataclass(frozen=True, slots=True)
class Effect:
    """Something to do."""


@dataclass(frozen=True, slots=True)
class Answer(Effect):
    session: int
    request_id: int


@dataclass(frozen=True, slots=True)
class TellWaiting(Answer):
    """Say why the grant has not come yet; more answers to the same request follow."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class TellWriting(Answer):
    epoch: str


@dataclass(frozen=True, slots=True)
class TellAttached(Answer):
    """Send the epoch: manifest, sizes, read-only descriptors."""

    epoch: str


@dataclass(frozen=True, slots=True)
class TellAllocated(Answer):
    """Send the descriptor of the slab whose `SlabCreated` is being handled."""

    slab: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TellCommitted(Answer):
    epoch: str


@dataclass(frozen=True, slots=True)
class TellRejoined(Answer):
    epoch: str


@dataclass(frozen=True, slots=True)
class AskOffer(Answer):
    """Ask for manifest, identity and descriptors of the epoch."""

    epoch: str


@dataclass(frozen=True, slots=True)
class TellDropped(Answer):
    epoch: str
    readers: tuple[str, ...]  # who still maps it; its memory is freed when the last leaves


@dataclass(frozen=True, slots=True)
class AskDigest(Answer):
    """Ask a reader for the digest of its epoch."""

    epoch: str


@dataclass(frozen=True, slots=True)
class TellVerified(Answer):
    """`found` was computed by `reader`; `expected` is the writer's, None while it is pending."""

    epoch: str
    expected: str | None
    found: str
    reader: str


@dataclass(frozen=True, slots=True)
class Refuse(Answer):
    """Send the error, then close the connection."""

    error: UnderstudyError


@dataclass(frozen=True, slots=True)
class OpenEpoch(Effect):
    session: int
    epoch: str


@dataclass(frozen=True, slots=True)
class CreateSlab(Effect):
    session: int
    epoch: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SealEpoch(Effect):
    """Check the manifest, then seal; then `Sealed`, or `DriverFailed`. Both take a while."""

    session: int
    epoch: str
    manifest: bytes


@dataclass(frozen=True, slots=True)
class AdoptEpoch(Effect):
    """Look at what the session offered and hold it; then `Adopted`, or `DriverFailed`."""

    session: int
    epoch: str
    slab_sizes: tuple[int, ...]
    manifest: bytes


@dataclass(frozen=True, slots=True)
class DiscardOffer(Effect):
    """Let go of what was adopted of an epoch, or is being adopted: its offer has broken off."""

    epoch: str


@dataclass(frozen=True, slots=True)
class Unwatch(Effect):
    """Its file is no longer the question: the epoch is somebody's again."""

    epoch: str


@dataclass(frozen=True, slots=True)
class MarkHistory(Effect):
    """Note on the epoch's own file that it is out of service; there is no answer."""

    epoch: str


@dataclass(frozen=True, slots=True)
class WriteJournal(Effect):
    """Put `record` on disk, then say `Journalled` or `JournalFailed`; without a session,
    `JournalKept` or `JournalBehind`."""

    session: int | None
    record: JournalRecord | None


@dataclass(frozen=True, slots=True)
class ReleaseEpoch(Effect):
    """Close what we hold of it, then watch its file and say `EpochFree` when that is free."""

    epoch: str


@dataclass(frozen=True, slots=True)
class Record(Effect):
    """One event for people and programs, of CONVENTIONS' types `gms.*`."""

    type: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    severity: str = "info"
