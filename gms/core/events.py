"""The events that a device's machine handles; the effects it answers with are in `effects.py`.

Pure data. Everything that a client asks for arrives as `Received`, with its wire message as it is.
A session is named by an integer that the shell chooses and never reuses; an epoch by a random hex
string, never a number: numbers restart with the server and would bring stale memory back to life.
Events named after a driver call (`EpochOpened`, `SlabCreated`, `Sealed`, `Journalled`) are the
completions of the effect of the same kind.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

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
