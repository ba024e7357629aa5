"""What travels between the GPU memory service and its clients.

Meaning of the messages only; frames are `plumbing.wire`'s and legality is `gms/core`'s. One
`attach` may be answered several times: `waiting` any number of times, then `writing`, or
`attached` and the `slabs` frames that its descriptors did not fit in. All repeat its request id.
Manifests are bytes, which `gms/core/manifest.py` makes and reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from gms.core.capacity import SLABS_MAX
from plumbing.part.observe import EventRecord as EventRecord
from plumbing.part.observe import Status as Status
from plumbing.part.observe import StatusReply as StatusReply
from plumbing.wire.limits import FDS_PER_FRAME_MAX, MANIFEST_FRAME_BYTES_MAX
from plumbing.wire.messages import Catalogue, Length, Message, Range

BYTES_MAX = 2**62  # beyond any device, and sums of a few still fit 64 bits
WAIT_MS_MAX = 7 * 24 * 3600 * 1000  # a week: longer waits are a unit mistaken for another
RANKS_MAX = 1024
EVENT_ID_MAX = 2**62  # a thousand a second for a hundred million years
REQUEST_BYTES_MAX = 512 * 1024  # of every frame but those with a manifest: an identity is half
DETAIL_LENGTH_MAX = 2048  # a sentence of a driver or a canary, not a core dump

Name = Annotated[str, Length(1, 128)]
Bytes = Annotated[int, Range(0, BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class Attach(Message):
    """Ask for the device's memory; `mode` is `rw`, `ro` or `rw_or_ro`."""

    TYPE: ClassVar[str] = "attach"
    engine: Name
    incarnation: Name
    mode: Name
    identity: dict[str, Any] | None = None
    rank: Annotated[int, Range(0, RANKS_MAX)] = 0
    wait_ms: Annotated[int, Range(0, WAIT_MS_MAX)] = 0
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Waiting(Message):
    """Not yet: `reason` is a code, `message` names what is waited for. Sent at every change."""

    TYPE: ClassVar[str] = "waiting"
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Attached(Message):
    """The committed epoch, with read-only descriptors of slabs `first`, `first` + 1, …"""

    TYPE: ClassVar[str] = "attached"
    FDS: ClassVar[tuple[int, int]] = (0, FDS_PER_FRAME_MAX)
    epoch: str
    epoch_file: str  # a name in the service's directory, which containers may mount anywhere
    identity: dict[str, Any]
    layout_hash: str
    slab_sizes: tuple[int, ...]
    manifest: bytes
    first: int = 0


@dataclass(frozen=True, slots=True)
class Slabs(Message):
    """More descriptors of the same answer, from slab `first` on."""

    TYPE: ClassVar[str] = "slabs"
    FDS: ClassVar[tuple[int, int]] = (1, FDS_PER_FRAME_MAX)
    epoch: str
    first: int


@dataclass(frozen=True, slots=True)
class Writing(Message):
    """RW is granted; hold a shared flock on `epoch_file` before the first `allocate`."""

    TYPE: ClassVar[str] = "writing"
    epoch: str
    epoch_file: str
    capacity_bytes: Bytes
    free_bytes: Bytes
    granularity_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Allocate(Message):
    TYPE: ClassVar[str] = "allocate"
    size_bytes: Annotated[int, Range(1, BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class Allocated(Message):
    """A new slab (numbered from 0) with its writable descriptor."""

    TYPE: ClassVar[str] = "allocated"
    FDS: ClassVar[tuple[int, int]] = (1, 1)
    slab: int
    size_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """The writer lives and has placed so much; has no answer."""

    TYPE: ClassVar[str] = "progress"
    done_bytes: Bytes
    total_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Publish what was written. The writer has mapped every slab read-only before it says so."""

    TYPE: ClassVar[str] = "commit"
    identity: dict[str, Any]
    manifest: bytes
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Committed(Message):
    """Published, sealed and on disk; the session goes on as RO."""

    TYPE: ClassVar[str] = "committed"
    epoch: str


@dataclass(frozen=True, slots=True)
class Rejoin(Message):
    """A session ended with its server: say what this process maps, to be its reader again.
    `was_committed` is false for a writer whose commit was not answered."""

    TYPE: ClassVar[str] = "rejoin"
    engine: Name
    incarnation: Name
    epoch: Name
    slab_sizes: Annotated[tuple[Bytes, ...], Length(0, SLABS_MAX)]
    was_committed: bool
    rank: Annotated[int, Range(0, RANKS_MAX)] = 0


@dataclass(frozen=True, slots=True)
class Rejoined(Message):
    """Registered. Another answer to `rejoin` is `wanted`."""

    TYPE: ClassVar[str] = "rejoined"
    epoch: str


@dataclass(frozen=True, slots=True)
class Wanted(Message):
    """The service has lost this epoch: hand it back with `offer`."""

    TYPE: ClassVar[str] = "wanted"
    epoch: str


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """The epoch, with the read-only descriptors of its first slabs; more come in `slabs`."""

    TYPE: ClassVar[str] = "offer"
    FDS: ClassVar[tuple[int, int]] = (0, FDS_PER_FRAME_MAX)
    epoch: Name
    identity: dict[str, Any]
    manifest: bytes
    layout_hash: Name


@dataclass(frozen=True, slots=True)
class Condemn(Message):
    """The bytes are bad: `why` is `device_error` or `canary`. Has no answer: its sender is about
    to end."""

    TYPE: ClassVar[str] = "condemn"
    why: Name
    detail: Annotated[str, Length(0, DETAIL_LENGTH_MAX)]


@dataclass(frozen=True, slots=True)
class DigestWanted(Message):
    """A reader is asked for the digest of its epoch's bytes."""

    TYPE: ClassVar[str] = "digest_wanted"
    epoch: str


@dataclass(frozen=True, slots=True)
class Digest(Message):
    """SHA-256, in hex, of all slabs in order: unasked by the writer after its commit, or the
    answer to `digest_wanted`. None: this reader has better things to do, or, with `is_coming`, it
    has begun and answers again."""

    TYPE: ClassVar[str] = "digest"
    digest: Annotated[str, Length(64, 64)] | None
    is_coming: bool = False


@dataclass(frozen=True, slots=True)
class Verify(Message):
    """Ask whether the committed bytes are still those that were written."""

    TYPE: ClassVar[str] = "verify"


@dataclass(frozen=True, slots=True)
class Verified(Message):
    """`expected` is None while the writer has not computed it."""

    TYPE: ClassVar[str] = "verified"
    epoch: str
    expected: str | None
    found: str
    reader: str


@dataclass(frozen=True, slots=True)
class Drop(Message):
    """Take the committed epoch out of service."""

    TYPE: ClassVar[str] = "drop"
    epoch: Name | None = None
    even_if_mapped: bool = False


@dataclass(frozen=True, slots=True)
class Dropped(Message):
    """Done; its memory is freed when the last of `readers` leaves."""

    TYPE: ClassVar[str] = "dropped"
    epoch: str
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Watch(Message):
    """Stay and be told: a `status_reply`, with `since` the kept events after that id, then every
    event as it happens. A server that was restarted counts its ids from 1 again."""

    TYPE: ClassVar[str] = "watch"
    since: Annotated[int, Range(0, EVENT_ID_MAX)] | None = None


@dataclass(frozen=True, slots=True)
class Inspect(Message):
    """Ask for every epoch with its slabs, readers and tensors."""

    TYPE: ClassVar[str] = "inspect"


@dataclass(frozen=True, slots=True)
class InspectReply(Message):
    TYPE: ClassVar[str] = "inspect_reply"
    document: dict[str, Any]


CATALOGUE = Catalogue(
    Attach,
    Waiting,
    Attached,
    Slabs,
    Writing,
    Allocate,
    Allocated,
    Progress,
    Commit,
    Committed,
    Rejoin,
    Rejoined,
    Wanted,
    Offer,
    Condemn,
    DigestWanted,
    Digest,
    Verify,
    Verified,
    Drop,
    Dropped,
    Status,
    StatusReply,
    Watch,
    EventRecord,
    Inspect,
    InspectReply,
    frame_bytes_max=MANIFEST_FRAME_BYTES_MAX,
)
