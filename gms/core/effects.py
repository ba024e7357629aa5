"""The effects that a device's machine asks for; `gms/server/performer.py` carries them out.

Pure data. A `Respond` goes to a session, or to a connection that only asked; the others are calls
to the driver, whose completions come back as events, and records for the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from gms.core.events import JournalRecord
from plumbing.errors import UnderstudyError
from plumbing.wire.messages import Message


class DeviceEffect(Struct, frozen=True):
    """Base of all effects."""


class Respond(DeviceEffect, frozen=True):
    session: int
    request_id: int


class SendMessage(Respond, frozen=True):
    """Send `message`; with `allocated` goes the descriptor of the slab that was just created."""

    message: Message


class GrantWriting(Respond, frozen=True):
    """Send `writing`: the epoch, its file, the room that it has, and the host copy that stands for
    the requested weights, if there is one."""

    epoch: str
    copy: str | None = None


class SendEpoch(Respond, frozen=True):
    """Send `attached`: manifest, sizes, read-only descriptors."""

    epoch: str


class RefuseRequest(Respond, frozen=True):
    """Send the error, then close the connection."""

    error: UnderstudyError


class OpenEpoch(DeviceEffect, frozen=True):
    session: int
    epoch: str


class CreateSlab(DeviceEffect, frozen=True):
    session: int
    epoch: str
    size_bytes: int


class SealEpoch(DeviceEffect, frozen=True):
    """Check the manifest, then seal, which both take a while; then `Sealed` or `DriverFailed`."""

    session: int
    epoch: str
    manifest: bytes


class AdoptEpoch(DeviceEffect, frozen=True):
    """Check what the session offered and hold it; then `Adopted` or `DriverFailed`."""

    session: int
    epoch: str
    slab_sizes: tuple[int, ...]
    manifest: bytes


class DiscardOffer(DeviceEffect, frozen=True):
    """Release what was adopted of an epoch, or is being adopted: its offer has broken off."""

    epoch: str


class Unwatch(DeviceEffect, frozen=True):
    """Stop watching the epoch's file: a session owns the epoch again."""

    epoch: str


class MarkHistory(DeviceEffect, frozen=True):
    """Mark the epoch's own file as out of service; nothing comes back."""

    epoch: str


class WriteJournal(DeviceEffect, frozen=True):
    """Put `record` on disk; then `Journalled` or `JournalFailed`, without a session `JournalKept`
    or `JournalBehind`. `offloaded` is the host copy that stands for what was committed here."""

    session: int | None
    record: JournalRecord | None
    offloaded: JournalRecord | None = None


class ReleaseEpoch(DeviceEffect, frozen=True):
    """Close what we hold of it, then watch its file; `EpochFree` when no process holds that."""

    epoch: str


class RecordEvent(DeviceEffect, frozen=True):
    """One event of a type `gms.*` for the log of events."""

    type: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    severity: str = "info"


Effects = list[DeviceEffect]
