"""The effects that a device's machine asks for; `gms/server/performer.py` carries them out.

Pure data. A `Respond` goes to a session, or to a connection that only asked; the others are calls
to the driver, whose completions come back as events, and records for the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gms.core.events import JournalRecord
from plumbing.errors import UnderstudyError
from plumbing.wire.messages import Message


@dataclass(frozen=True, slots=True)
class Effect:
    """Base of all effects."""


@dataclass(frozen=True, slots=True)
class Respond(Effect):
    session: int
    request_id: int


@dataclass(frozen=True, slots=True)
class SendMessage(Respond):
    """Send `message`; with `allocated` goes the descriptor of the slab that was just created."""

    message: Message


@dataclass(frozen=True, slots=True)
class GrantWriting(Respond):
    """Send `writing`: the epoch, its file and the room that it has."""

    epoch: str


@dataclass(frozen=True, slots=True)
class SendEpoch(Respond):
    """Send `attached`: manifest, sizes, read-only descriptors."""

    epoch: str


@dataclass(frozen=True, slots=True)
class RefuseRequest(Respond):
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
    """Check the manifest, then seal, which both take a while; then `Sealed` or `DriverFailed`."""

    session: int
    epoch: str
    manifest: bytes


@dataclass(frozen=True, slots=True)
class AdoptEpoch(Effect):
    """Check what the session offered and hold it; then `Adopted` or `DriverFailed`."""

    session: int
    epoch: str
    slab_sizes: tuple[int, ...]
    manifest: bytes


@dataclass(frozen=True, slots=True)
class DiscardOffer(Effect):
    """Release what was adopted of an epoch, or is being adopted: its offer has broken off."""

    epoch: str


@dataclass(frozen=True, slots=True)
class Unwatch(Effect):
    """Stop watching the epoch's file: a session owns the epoch again."""

    epoch: str


@dataclass(frozen=True, slots=True)
class MarkHistory(Effect):
    """Mark the epoch's own file as out of service; nothing comes back."""

    epoch: str


@dataclass(frozen=True, slots=True)
class WriteJournal(Effect):
    """Put `record` on disk; then `Journalled` or `JournalFailed`, without a session `JournalKept`
    or `JournalBehind`."""

    session: int | None
    record: JournalRecord | None


@dataclass(frozen=True, slots=True)
class ReleaseEpoch(Effect):
    """Close what we hold of it, then watch its file; `EpochFree` when no process holds that."""

    epoch: str


@dataclass(frozen=True, slots=True)
class RecordEvent(Effect):
    """One event of a type `gms.*` for the log of events."""

    type: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    severity: str = "info"


Effects = list[Effect]
