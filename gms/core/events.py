"""What the machines of one place, its weights and its KV memory, are told, and their effects:
values, no behaviour.

The shell says what has happened and performs the effects in order (`gms/server/memory_server.py`).
A `Respond` goes to a session, or to a connection that only sent a request; the other effects are
calls to the driver and the kernel, of whose ends the machine is told, and records for the log.

Everything that a client asks for arrives as `Received`, with its wire message as it is. A session
is named by an integer that the shell chooses and never reuses; a region (an epoch of weights, a
pool of KV memory) by a random hex string, never a number: numbers restart with the server and would
bring stale memory back to life.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field

from gms.manifest import LayoutHash
from gms.messages import HandBackMsg
from plumbing.errors import UnderstudyError
from plumbing.wire.messages import Message


class JournalRecord(Struct, frozen=True):
    """The journal's record of the committed epoch: enough to check it when it is handed back."""

    epoch: str
    size_bytes: int
    layout_hash: LayoutHash  # covers slab sizes and manifest
    identity_hash: str
    digest: str | None = None  # of the bytes; None until the writer has computed it


class LoadedJournal(Struct, frozen=True, rename={"record": "committed"}):
    """What is on disk of a place's weights; `is_lost`: an earlier file could not be read, and no
    record has been written since. `offloaded`: the host copy of what was committed,
    unless `record` is still there."""

    record: JournalRecord | None = None
    is_lost: bool = False
    offloaded: JournalRecord | None = None
    schema: Literal[1] = 1


class Claimant(Struct, frozen=True):
    """One incarnation of an engine, as the holder of `active` under `token` of `era`."""

    engine: str
    incarnation: str
    token: int
    era: str

    def __str__(self) -> str:
        return f"{self.engine} (token {self.token})"


class Received(Struct, frozen=True):
    """A message from a client, which need not have a session, with facts from the kernel."""

    session: int
    request_id: int
    message: Message
    pid: int = 0  # of its process; 0 where its PID namespace is not visible
    is_mapped: bool = False  # for `drop`: some process holds the committed epoch's file
    kv_bytes: int | None = None  # for `attach` and `allocate`: what else has of the device
    # For `offload`: what the journal of the host copies says is committed there, if a living
    # process holds it besides its server.
    copy: JournalRecord | None = None


class Effect(Struct, frozen=True):
    """Base of all effects."""


class Respond(Effect, frozen=True):
    session: int
    request_id: int


class SendMessage(Respond, frozen=True):
    """Send `message`; with `allocated` goes the descriptor of its slab."""

    message: Message


class OpenEpoch(SendMessage, frozen=True):
    """Make the epoch's file, then send `message`; if that fails, refuse the request."""

    region: str


class RefuseRequest(Respond, frozen=True):
    """Send the error, then close the connection."""

    error: UnderstudyError


class SendRegion(Respond, frozen=True):
    """Send `message`, with the descriptors of all the region's memory."""

    region: str
    message: Message


class RegionEffect(Effect, frozen=True):
    region: str


class Watch(RegionEffect, frozen=True):
    """Watch its file until it is free, once: `region_free`. `ends`: the file is then removed, in
    one step, so that no process can hold it any more; None: it need not be known any more."""

    ends: bool | None


class MarkRetired(RegionEffect, frozen=True):
    """Mark its file as out of service, so that no restart brings it back; best effort."""


class Release(RegionEffect, frozen=True):
    """Free what we hold of it, after every preceding call, as far as the driver lets."""


class TakeBack(RegionEffect, frozen=True):
    """Check what `session` handed back, and hold it. The result: how many tensors it has. An error
    ends that session."""

    session: int
    message: HandBackMsg


class MakePool(RegionEffect, frozen=True):
    """Make file, index and slabs. The result: the slabs' sizes. On an error nothing of it is left;
    with `gms.device_full`, other processes may release some memory."""

    size_bytes: int
    index_bytes: int


class CreateSlab(RegionEffect, frozen=True):
    """An error is final, unless the device is full: other processes may release some memory."""

    size_bytes: int


class SealEpoch(RegionEffect, frozen=True):
    """Check the manifest and seal every slab, so that no process can write any more. The result:
    how many tensors it has."""

    manifest: bytes


class WriteJournal(Effect, frozen=True):
    """Put `record` on disk; after an error the machine retries. `offloaded` is the host copy of
    what was committed here."""

    record: JournalRecord | None
    offloaded: JournalRecord | None = None


class KeepTokens(Effect, frozen=True):
    """Put the newest claim of each era on disk, for a restarted server; best effort."""

    newest: tuple[Claimant, ...]


class RecordEvent(Effect, frozen=True):
    """One event of a type `gms.*` for the log of events."""

    type: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    severity: str = "info"
