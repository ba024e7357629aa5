"""The events and effects of the machine of one device's weights: values, no behaviour.

The shell hands in events and performs the effects in order (`gms/server/server.py`). A `Respond`
goes to a session, or to a connection that only sent a request; the other effects are calls to the
driver, whose completions come back as events, and records for the log.

Everything that a client asks for arrives as `Received`, with its wire message as it is.
A session is named by an integer that the shell chooses and never reuses; an epoch by a random hex
string, never a number: numbers restart with the server and would bring stale memory back to life.
Events named after a driver call (`EpochOpened`, `SlabCreated`, `Sealed`, `Journalled`) are the
completions of the effect of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from gms.manifest import LayoutHash
from plumbing.errors import UnderstudyError
from plumbing.wire.messages import Message


class Mode(StrEnum):
    """The access that a session asks for. Roles are configuration, unknown here."""

    RW = "rw"
    RO = "ro"
    RW_OR_RO = "rw_or_ro"


class SessionState(StrEnum):
    """The states of one attached process."""

    OPEN = "open"  # attached to nothing yet
    WAITING = "waiting"  # for its grant
    OPENING = "opening"  # granted RW; the epoch's file is being made
    WRITING = "writing"
    ALLOCATING = "allocating"
    SEALING = "sealing"  # committing: no process may write from here on
    JOURNALLING = "journalling"  # committing: sealed, being written to disk
    READING = "reading"
    REJOINING = "rejoining"  # came back after a server's death; not registered yet
    OFFERING = "offering"  # was asked to hand its epoch back
    ADOPTING = "adopting"  # handed it back; the driver checks it
    CLOSED = "closed"  # gone, or refused and about to go


class EpochPhase(StrEnum):
    """What an epoch's memory is to this server."""

    STAGING = "staging"
    COMMITTED = "committed"
    SUPERSEDED = "superseded"  # replaced, and still read
    RELEASING = "releasing"  # given up here; a process may still map it
    ORPHANED = "orphaned"  # left by an earlier server; a process may still map it


class JournalRecord(Struct, frozen=True):
    """The journal's record of the committed epoch: enough to check it when it is handed back."""

    epoch: str
    size_bytes: int
    layout_hash: LayoutHash  # covers slab sizes and manifest
    identity_hash: str
    digest: str | None = None  # of the bytes; None until the writer has computed it
    # The epoch that this one replaces, until the commit is answered: a writer and a server that die
    # between this record and the answer must not lose the epoch that every other engine still uses.
    previous: JournalRecord | None = None


class DeviceEvent(Struct, frozen=True):
    """Base of all events."""


class SessionEvent(DeviceEvent, frozen=True):
    session: int


class Received(SessionEvent, frozen=True):
    """A message from a client, which need not have a session, with facts from the kernel."""

    request_id: int
    message: Message
    pid: int = 0  # of its process; 0 where its PID namespace is not visible
    is_mapped: bool = False  # for `drop`: some process holds the committed epoch's file
    kv_bytes: int | None = None  # for `attach` and `allocate`: what the device's KV pools take
    # For `offload`: what the journal of the host copies says is committed there, if a living
    # process holds it besides its server.
    copy: JournalRecord | None = None


class EpochOpened(SessionEvent, frozen=True):
    """The epoch's file exists."""


class SlabCreated(SessionEvent, frozen=True):
    """The requested slab exists."""


class Sealed(SessionEvent, frozen=True):
    """The manifest is valid and every slab is sealed: no process can write any more."""

    tensors: int


class Journalled(SessionEvent, frozen=True):
    """The record is on disk."""


class JournalFailed(SessionEvent, frozen=True):
    """The record could not be written; the machine retries."""

    why: str


class Adopted(SessionEvent, frozen=True):
    """The offered memory passed its checks, and the driver holds it."""

    tensors: int


class DeviceFull(SessionEvent, frozen=True):
    """The driver has no memory for the requested slab; other processes may release some."""

    error: UnderstudyError


class DriverFailed(SessionEvent, frozen=True):
    """A driver call for this session failed for good."""

    error: UnderstudyError


class Closed(SessionEvent, frozen=True):
    """The connection has ended: the process died, or left."""

    reason: str = ""


class EpochFree(DeviceEvent, frozen=True):
    """No process holds the file of this epoch any more, and our own copy is freed."""

    epoch: str
    copy: JournalRecord | None = None  # the host copy, as for `offload`


class JournalKept(DeviceEvent, frozen=True):
    """A record that no session waits for is on disk."""


class JournalBehind(DeviceEvent, frozen=True):
    """A record that no session waits for could not be written: the journal is out of date."""

    why: str


class HoldersSeen(DeviceEvent, frozen=True):
    """The processes that have the file of a releasing or orphaned epoch open, where visible."""

    epoch: str
    pids: tuple[int, ...]


class DeadlinePassed(DeviceEvent, frozen=True):
    """`DeviceMachine.next_deadline_ms` has come."""


# The machine's own verdicts on a session: rows of its table, never accepted from a shell.


class GrantedRead(SessionEvent, frozen=True): ...


class GrantedWrite(SessionEvent, frozen=True): ...


class SessionRefused(SessionEvent, frozen=True): ...


class Rejoined(SessionEvent, frozen=True): ...


class AskedToOffer(SessionEvent, frozen=True): ...


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
