"""The messages between the GPU memory service and its clients.

Their meaning only: `plumbing.wire` knows frames, `gms/core` what is legal. One `attach` may be
answered several times: `waiting` any number of times, then `writing`, or `attached` and the `slabs`
frames with the remaining descriptors. All repeat its request id. Manifests are bytes, which
`gms/manifest.py` encodes and decodes.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from gms.manifest import SLABS_MAX
from plumbing.pod.messages import EventMsg as EventMsg
from plumbing.pod.messages import StatusMsg as StatusMsg
from plumbing.pod.messages import StatusReplyMsg as StatusReplyMsg
from plumbing.pod.messages import WatchMsg as WatchMsg
from plumbing.wire.limits import FDS_PER_FRAME_MAX, MANIFEST_FRAME_BYTES_MAX
from plumbing.wire.messages import Catalogue, Message, messages_in

BYTES_MAX = 2**62  # beyond any device, and sums of a few still fit 64 bits
WAIT_MS_MAX = 7 * 24 * 3600 * 1000  # a week: a longer wait is a mistaken unit
RANKS_MAX = 1024
REQUEST_BYTES_MAX = 512 * 1024  # of every frame without a manifest: an identity is half
DETAIL_LENGTH_MAX = 2048  # a message of a driver or a canary, not a core dump
COPIER = "gms"  # the engine as which the maker and the keeper of a host copy attach

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Bytes = Annotated[int, Meta(ge=0, le=BYTES_MAX)]


class AttachMsg(Message, frozen=True, tag="attach"):
    """Ask for the device's memory; `mode` is `rw`, `ro` or `rw_or_ro`."""

    engine: Name
    incarnation: Name
    mode: Name
    identity: dict[str, Any] | None = None
    rank: Annotated[int, Meta(ge=0, le=RANKS_MAX)] = 0
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    replace: bool = False


class WaitingMsg(Message, frozen=True, tag="waiting"):
    """Not yet: `reason` is a code, `message` names the cause. Sent at every change."""

    reason: str
    message: str


class EpochAttachedMsg(Message, frozen=True, tag="attached"):
    """The committed epoch, with read-only descriptors of slabs `first`, `first` + 1, …"""

    FDS = (0, FDS_PER_FRAME_MAX)
    epoch: str
    epoch_file: str  # a name in the service's directory, which containers may mount anywhere
    identity: dict[str, Any]
    layout_hash: str
    slab_sizes: tuple[int, ...]
    manifest: bytes
    first: int = 0


class SlabsMsg(Message, frozen=True, tag="slabs"):
    """More descriptors of the same answer, from slab `first` on."""

    FDS = (1, FDS_PER_FRAME_MAX)
    epoch: str
    first: int


class WritingMsg(Message, frozen=True, tag="writing"):
    """RW is granted; hold a shared flock on `epoch_file` before the first `allocate`."""

    epoch: str
    epoch_file: str
    capacity_bytes: Bytes
    free_bytes: Bytes
    granularity_bytes: Bytes
    copy: str | None = None  # the epoch in host memory that stands for the requested weights


class AllocateMsg(Message, frozen=True, tag="allocate"):
    size_bytes: Annotated[int, Meta(ge=1, le=BYTES_MAX)]


class AllocatedMsg(Message, frozen=True, tag="allocated"):
    """A new slab (numbered from 0) with its writable descriptor."""

    FDS = (1, 1)
    slab: int
    size_bytes: Bytes


class ProgressMsg(Message, frozen=True, tag="progress"):
    """The writer is alive and has placed `done_bytes`. Has no answer."""

    done_bytes: Bytes
    total_bytes: Bytes


class CommitMsg(Message, frozen=True, tag="commit"):
    """Publish what was written. The writer has mapped every slab read-only before it sends this."""

    identity: dict[str, Any]
    manifest: bytes
    layout_hash: str
    restaged_from: Name | None = None  # the `copy` of `writing`, if all bytes are from there


class CommittedMsg(Message, frozen=True, tag="committed"):
    """Published, sealed and on disk; the session continues as RO."""

    epoch: str


class RejoinMsg(Message, frozen=True, tag="rejoin"):
    """A session ended with its server: report what this process maps, to be its reader again.
    `was_committed` is false for a writer whose commit was not answered."""

    engine: Name
    incarnation: Name
    epoch: Name
    slab_sizes: Annotated[tuple[Bytes, ...], Meta(max_length=SLABS_MAX)]
    was_committed: bool
    rank: Annotated[int, Meta(ge=0, le=RANKS_MAX)] = 0


class RejoinedMsg(Message, frozen=True, tag="rejoined"):
    """Registered. Another answer to `rejoin` is `wanted`."""

    epoch: str


class WantedMsg(Message, frozen=True, tag="wanted"):
    """The service has lost this epoch: hand it back with `offer`."""

    epoch: str


class OfferMsg(Message, frozen=True, tag="offer"):
    """The epoch, with the read-only descriptors of its first slabs; more come in `slabs`."""

    FDS = (0, FDS_PER_FRAME_MAX)
    epoch: Name
    identity: dict[str, Any]
    manifest: bytes
    layout_hash: Name


class CondemnMsg(Message, frozen=True, tag="condemn"):
    """The bytes are bad: `why` is `device_error` or `canary`. Has no answer: its sender is about
    to exit."""

    why: Name
    detail: Annotated[str, Meta(max_length=DETAIL_LENGTH_MAX)]


class DigestWantedMsg(Message, frozen=True, tag="digest_wanted"):
    """Ask a reader for the digest of its epoch's bytes."""

    epoch: str


class DigestMsg(Message, frozen=True, tag="digest"):
    """SHA-256, in hex, of all slabs in order: from the writer after its commit, or the answer to
    `digest_wanted`. None: the reader is busy, or, with `is_coming`, has begun and answers again."""

    digest: Annotated[str, Meta(min_length=64, max_length=64)] | None
    is_coming: bool = False


class VerifyMsg(Message, frozen=True, tag="verify"):
    """Ask whether the committed bytes are unaltered."""


class VerifiedMsg(Message, frozen=True, tag="verified"):
    """`expected` is None while the writer has not computed it."""

    epoch: str
    expected: str | None
    found: str
    reader: str


class DropMsg(Message, frozen=True, tag="drop"):
    """Take the committed epoch out of service."""

    epoch: Name | None = None
    even_if_mapped: bool = False


class DroppedMsg(Message, frozen=True, tag="dropped"):
    """Done; its memory is freed when the last of `readers` leaves."""

    epoch: str
    readers: tuple[str, ...]


class OffloadMsg(Message, frozen=True, tag="offload"):
    """Free the committed epoch, which nobody maps and of which host memory has a sealed copy."""


class OffloadedMsg(Message, frozen=True, tag="offloaded"):
    """The device's memory is proven free; epoch `copy` in host memory stands for the weights."""

    copy: str
    size_bytes: Bytes


class InspectMsg(Message, frozen=True, tag="inspect"):
    """Ask for every epoch with its slabs, readers and tensors."""


class InspectReplyMsg(Message, frozen=True, tag="inspect_reply"):
    document: dict[str, Any]


CATALOGUE = Catalogue(*messages_in(globals()), frame_bytes_max=MANIFEST_FRAME_BYTES_MAX)
