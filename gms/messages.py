"""What travels between the GPU memory service and its clients.

Meaning of the messages only; frames are `understudy.wire`'s and legality is `gms/core`'s. One
`attach` may be answered several times: `waiting` any number of times, then `writing`, or
`attached` and the `slabs` frames that its descriptors did not fit in. All repeat its request id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from gms.core.manifest import TensorRecord
from understudy.wire.limits import FDS_PER_FRAME_MAX, MANIFEST_FRAME_BYTES_MAX
from understudy.wire.messages import Catalogue, Length, Message, Range
from understudy.wire.observe import Status as Status
from understudy.wire.observe import StatusReply as StatusReply

BYTES_MAX = 2**62  # beyond any device, and sums of a few still fit 64 bits
WAIT_MS_MAX = 7 * 24 * 3600 * 1000  # a week: longer waits are a unit mistaken for another
RANKS_MAX = 1024

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
    manifest: tuple[TensorRecord, ...]
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
    manifest: tuple[TensorRecord, ...]
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Committed(Message):
    """Published, sealed and on disk; the session goes on as RO."""

    TYPE: ClassVar[str] = "committed"
    epoch: str


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
    Status,
    StatusReply,
    Inspect,
    InspectReply,
    frame_bytes_max=MANIFEST_FRAME_BYTES_MAX,
)
