"""What the machine of a device is told; what it wants done is in `effects.py`.

Pure data. A session is named by an integer that the shell chose and never uses again; an epoch by
a random hex string, never a number: numbers restart with the server and bring stale memory back
to life. Events named after a driver call (`EpochOpened`, `SlabCreated`, `Sealed`, `Journalled`)
are completions of the effect of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gms.core.manifest import LayoutHash
from plumbing.errors import UnderstudyError


class Mode(StrEnum):
    """What a session asks for. Role is configuration and not known here."""

    RW = "rw"
    RO = "ro"
    RW_OR_RO = "rw_or_ro"


class SessionState(StrEnum):
    """Where one attached process stands."""

    OPEN = "open"  # attached nothing yet
    WAITING = "waiting"  # for its grant
    OPENING = "opening"  # granted RW; the epoch's file is being made
    WRITING = "writing"
    ALLOCATING = "allocating"
    SEALING = "sealing"  # committing: nobody may write from here on
    JOURNALLING = "journalling"  # committing: sealed, being written down
    READING = "reading"
    REJOINING = "rejoining"  # came back after a server's death; not registered yet
    OFFERING = "offering"  # was asked to hand its epoch back
    ADOPTING = "adopting"  # handed it back; the driver looks at it
    CLOSED = "closed"  # gone, or refused and about to go


class EpochPhase(StrEnum):
    """What an epoch's memory is to this server."""

    STAGING = "staging"
    COMMITTED = "committed"
    SUPERSEDED = "superseded"  # replaced, and still read
    RELEASING = "releasing"  # given up here; somebody may still map it
    ORPHANED = "orphaned"  # of a server before this one; somebody still maps it


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """What is on disk about the committed epoch: enough to know it again when it is handed back."""

    epoch: str
    size_bytes: int
    layout_hash: LayoutHash  # covers slab sizes and manifest
    identity_hash: str
    digest: str | None = None  # of the bytes; None until the writer has computed it
    # What it replaces, for as long as nobody was told: a writer and a server that die between this
    # record and the answer must not take the epoch with them that everybody still uses.
    previous: JournalRecord | None = None


# ---------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""


@dataclass(frozen=True, slots=True)
class SessionEvent(Event):
    session: int


@dataclass(frozen=True, slots=True)
class Attach(SessionEvent):
    """A process asks for the device's memory. `rank` is its place in a tensor-parallel engine."""

    request_id: int
    engine: str
    incarnation: str
    mode: Mode
    identity: Mapping[str, Any] | None = None
    rank: int = 0
    wait_ms: int = 0
    replace: bool = False
    pid: int = 0  # as the kernel says; 0 where its PID namespace is not visible


@dataclass(frozen=True, slots=True)
class Allocate(SessionEvent):
    request_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Progress(SessionEvent):
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Commit(SessionEvent):
    request_id: int
    identity: Mapping[str, Any]
    manifest: bytes
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Rejoin(SessionEvent):
    """A process whose session ended with the server before this one. `was_committed`: it knows
    that its epoch was published; a writer whose commit was not answered does not."""

    request_id: int
    engine: str
    incarnation: str
    epoch: str
    slab_sizes: tuple[int, ...]
    was_committed: bool
    rank: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Offer(SessionEvent):
    """The epoch that was asked for; the shell has a descriptor for each slab."""

    request_id: int
    identity: Mapping[str, Any]
    manifest: bytes
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Condemn(SessionEvent):
    """A reader says that the bytes are bad: `why` is `device_error` or `canary`."""

    why: str
    detail: str


@dataclass(frozen=True, slots=True)
class Digested(SessionEvent):
    """A reader has computed the digest of its epoch's bytes, unasked (`request_id` 0) or for a
    verification; None: it has better things to do."""

    request_id: int
    digest: str | None
    is_coming: bool = False  # it has begun; another such event follows


@dataclass(frozen=True, slots=True)
class EpochOpened(SessionEvent):
    """The epoch's file exists."""


@dataclass(frozen=True, slots=True)
class SlabCreated(SessionEvent):
    """The slab that was asked for exists."""


@dataclass(frozen=True, slots=True)
class Sealed(SessionEvent):
    """The manifest is good, and every slab is sealed: nobody can write any more."""

    tensors: int


@dataclass(frozen=True, slots=True)
class Journalled(SessionEvent):
    """The record is on disk."""


@dataclass(frozen=True, slots=True)
class JournalFailed(SessionEvent):
    """The record could not be written; it is tried again."""

    why: str


@dataclass(frozen=True, slots=True)
class Adopted(SessionEvent):
    """What was offered is what it should be, and the driver holds it."""

    tensors: int


@dataclass(frozen=True, slots=True)
class DeviceFull(SessionEvent):
    """The driver has no memory for the slab that was asked for; others may give some back."""

    error: UnderstudyError


@dataclass(frozen=True, slots=True)
class DriverFailed(SessionEvent):
    """A driver call for this session failed for good."""

    error: UnderstudyError


@dataclass(frozen=True, slots=True)
class Closed(SessionEvent):
    """The connection is gone: the process died, or left."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Drop(Event):
    """An operator takes the committed epoch out of service. `session` asks and is told."""

    session: int
    request_id: int
    epoch: str | None
    even_if_mapped: bool
    is_mapped: bool = False  # the kernel says that a process holds the committed epoch


@dataclass(frozen=True, slots=True)
class Verify(Event):
    """Somebody asks whether the committed bytes are still what the writer wrote."""

    session: int
    request_id: int


@dataclass(frozen=True, slots=True)
class EpochFree(Event):
    """The kernel says that nobody holds the file of this epoch, and our own copy is freed."""

    epoch: str


@dataclass(frozen=True, slots=True)
class JournalKept(Event):
    """A record that no session waits for is on disk."""


@dataclass(frozen=True, slots=True)
class JournalBehind(Event):
    """Such a record could not be written: what is on disk is not true any more."""

    why: str


@dataclass(frozen=True, slots=True)
class HoldersSeen(Event):
    """Who has the file of a releasing or orphaned epoch open, where that is visible."""

    epoch: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed; sent when `Machine.next_deadline_ms` comes."""


# The machine's own verdicts on a waiting or writing session. Not accepted from a shell.


@dataclass(frozen=True, slots=True)
class GrantedRead(SessionEvent):
    pass


@dataclass(frozen=True, slots=True)
class GrantedWrite(SessionEvent):
    pass


@dataclass(frozen=True, slots=True)
class Refused(SessionEvent):
    pass


@dataclass(frozen=True, slots=True)
class Rejoined(SessionEvent):
    pass


@dataclass(frozen=True, slots=True)
class AskedToOffer(SessionEvent):
    pass
