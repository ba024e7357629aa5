"""The messages between the GPU memory service and its clients, for weights and for KV memory.

Their meaning only: `plumbing.wire` knows frames, `gms/core` what is legal. One `attach` may be
answered several times: `waiting` any number of times, then `writing` or `attached`. All repeat its
request id. Manifests are bytes, which `gms/manifest.py` encodes and decodes.

`borrow_pool` is answered by `waiting` any number of times, then by `granted_pool`, without memory.
The client holds a shared flock on that file before it asks for the
memory with `take`, so that no process ever maps a pool without the kernel knowing.

All memory of a region travels in one frame. `kept` answers `hand_back` once the server has checked
what came with it.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from gms.manifest import SLABS_MAX
from plumbing.errors import ProtocolError
from plumbing.pod.messages import EventMsg as EventMsg
from plumbing.pod.messages import StatusMsg as StatusMsg
from plumbing.pod.messages import StatusReplyMsg as StatusReplyMsg
from plumbing.pod.messages import WatchMsg as WatchMsg
from plumbing.wire.limits import FDS_PER_FRAME_MAX
from plumbing.wire.messages import Catalogue, Message, messages_in

# A manifest of 12,000 tensors is about 2 MiB of MessagePack; the largest checkpoints have ~90,000.
FRAME_BYTES_MAX = 16 << 20
BYTES_MAX = 2**62  # beyond any device, and sums of a few still fit 64 bits
WAIT_MS_MAX = 7 * 24 * 3600 * 1000  # a week: a longer wait is a mistaken unit
RANKS_MAX = 1024
DETAIL_LENGTH_MAX = 2048  # a message of a driver or a canary, not a core dump
COPIER = "gms"  # the engine as which the maker and the keeper of a host copy attach

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Bytes = Annotated[int, Meta(ge=0, le=BYTES_MAX)]

POOL_SLABS_MAX = SLABS_MAX - 1  # and the index
INDEX_BYTES_MAX = 1 << 30  # 64 bytes for each of 16 million blocks
TOKEN_MAX = 2**63 - 1
NO_ERA = "0" * 16  # of a lock server that knows no eras: its tokens compare with none

# What a holder reports about the content, in this order.
BEGUN = "begun"  # the memory is zero, on a GPU by the holder's hand; it is written from here on
ADOPTING = "adopting"  # blocks of an earlier holder are about to be believed
ADOPTED = "adopted"  # …and the canary has passed on them

Era = Annotated[str, Meta(min_length=1, max_length=32)]
Token = Annotated[int, Meta(ge=0, le=TOKEN_MAX)]
PoolBytes = Annotated[int, Meta(ge=1, le=BYTES_MAX)]
IndexBytes = Annotated[int, Meta(ge=1, le=INDEX_BYTES_MAX)]


class AttachMsg(Message, frozen=True, tag="attach"):
    """Ask for the device's memory."""

    engine: Name
    incarnation: Name
    mode: Annotated[str, Meta(pattern=r"^(ro|rw_or_ro)\Z")]
    identity: dict[str, Any] | None = None
    rank: Annotated[int, Meta(ge=0, le=RANKS_MAX)] = 0
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0


class WaitingMsg(Message, frozen=True, tag="waiting"):
    """Not yet: `reason` is a code, `message` names the cause. Sent at every change."""

    reason: str
    message: str


class EpochAttachedMsg(Message, frozen=True, tag="attached"):
    """The committed epoch, with read-only descriptors of its slabs."""

    FDS = (0, FDS_PER_FRAME_MAX)
    epoch: str
    identity: dict[str, Any]
    slab_sizes: tuple[int, ...]
    manifest: bytes

    @property
    def layout(self) -> tuple[tuple[int, ...], bytes]:
        """Where which tensor lies."""
        return self.slab_sizes, self.manifest


class WritingMsg(Message, frozen=True, tag="writing"):
    """RW is granted; hold a shared flock on the epoch's file before the first `allocate`."""

    epoch: str
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
    restaged_from: Name | None = None  # the `copy` of `writing`, if all bytes are from there


class CommittedMsg(Message, frozen=True, tag="committed"):
    """Published, sealed and on disk; the session continues as RO."""

    epoch: str


class HeldEpoch(Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that a process maps. `was_committed` is false for a writer whose commit was not
    answered."""

    was_committed: bool
    identity: dict[str, Any]


class HeldPool(Struct, frozen=True, forbid_unknown_fields=True):
    """KV memory that a process maps, as it was claimed."""

    token: Token
    era: Era
    size_bytes: PoolBytes
    index_bytes: IndexBytes
    mark: Annotated[str, Meta(max_length=32)] = ""  # the last one that this session reported
    discarded: Annotated[str, Meta(max_length=DETAIL_LENGTH_MAX)] = ""  # why, if it was


class HandBackMsg(Message, frozen=True, tag="hand_back"):
    """A session ended with its server: report the region that this process maps, an `epoch` or a
    `pool`, to hold it again. With the descriptors of its slabs; a pool's index comes first.
    """

    FDS = (0, FDS_PER_FRAME_MAX)
    engine: Name
    incarnation: Name
    region: Name
    slab_sizes: Annotated[tuple[Bytes, ...], Meta(max_length=SLABS_MAX)]
    rank: Annotated[int, Meta(ge=0, le=RANKS_MAX)] = 0
    epoch: HeldEpoch | None = None
    pool: HeldPool | None = None
    manifest: bytes = b""


class KeptMsg(Message, frozen=True, tag="kept"):
    """Registered: this session holds the region again."""

    region: str


class CondemnMsg(Message, frozen=True, tag="condemn"):
    """A canary has failed on these bytes. Has no answer: its sender is about to exit."""

    detail: Annotated[str, Meta(max_length=DETAIL_LENGTH_MAX)]


class DigestMsg(Message, frozen=True, tag="digest"):
    """SHA-256, in hex, of all slabs in order: from the writer after its commit. Has no answer."""

    digest: Annotated[str, Meta(min_length=64, max_length=64)]


class DropMsg(Message, frozen=True, tag="drop"):
    """Take the committed epoch out of service, or (`is_kv`) the KV memory, which no engine uses. A
    refusal leaves the connection as it is."""

    epoch: Name | None = None
    even_if_mapped: bool = False
    is_kv: bool = False


class DroppedMsg(Message, frozen=True, tag="dropped"):
    """Done; its memory is freed when the last of `readers` leaves."""

    region: str
    readers: tuple[str, ...] = ()
    size_bytes: Bytes = 0


class OffloadMsg(Message, frozen=True, tag="offload"):
    """Free the committed epoch, unmapped by all, and of which host memory has a sealed copy."""


class OffloadedMsg(Message, frozen=True, tag="offloaded"):
    """The device's memory is proven free; epoch `copy` in host memory stands for the weights."""

    copy: str
    size_bytes: Bytes


class BorrowPoolMsg(Message, frozen=True, tag="borrow_pool"):
    """Ask for the device's pool, as the holder of `active` under `token` of `era`. Every process of
    one incarnation asks with the same token and sizes."""

    engine: Name
    incarnation: Name
    token: Token
    era: Era
    size_bytes: PoolBytes
    index_bytes: IndexBytes
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0


class PoolGrantedMsg(Message, frozen=True, tag="granted_pool"):
    """The pool is this incarnation's: hold a shared flock on its file, then `take`."""

    pool: str


class TakeMsg(Message, frozen=True, tag="take"):
    """The flock is held."""


class PoolTakenMsg(Message, frozen=True, tag="taken"):
    """The descriptors, all writable: the index, then every slab in order. `is_fresh`: nothing was
    ever written; on a GPU its bytes are arbitrary until a holder has zeroed them (`begun`)."""

    FDS = (2, FDS_PER_FRAME_MAX)
    slab_sizes: tuple[int, ...]
    index_bytes: int
    is_fresh: bool


class MarkMsg(Message, frozen=True, tag="mark"):
    """`begun`, `adopting` or `adopted`. Has no answer: it is read before the end of its sender."""

    mark: Annotated[str, Meta(pattern=r"^(begun|adopting|adopted)\Z")]


class DiscardMsg(Message, frozen=True, tag="discard"):
    """The content cannot be trusted: this pool is not lent again, and its memory is freed once
    no process maps it. Has no answer, as `mark`."""

    why: Annotated[str, Meta(min_length=1, max_length=DETAIL_LENGTH_MAX)]


class GiveUpMsg(Message, frozen=True, tag="give_up"):
    """The engine rests: this process maps nothing any more and has left the pool's file. Free the
    memory, and answer by `pool_freed` when that is done; it needs the other processes of the
    engine to leave as well."""

    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)]


class PoolFreedMsg(Message, frozen=True, tag="pool_freed"):
    """The memory of the pool that was given up is free."""

    pool: str


def unexpected_answer(what: str, request: str) -> ProtocolError:
    return ProtocolError("gms.unexpected_answer", f"the service answered {request} with {what}")


CATALOGUE = Catalogue(*messages_in(globals()), frame_bytes_max=FRAME_BYTES_MAX)
