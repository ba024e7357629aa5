"""The messages between the owner of a device's KV memory and its clients.

Their meaning only: `plumbing.wire` knows frames, `gms/kv/core` what is legal. `borrow_pool` is
answered by `waiting` any number of times, then by `granted_pool`: the name of the pool's file and
no memory. The client holds a shared flock on that file before it asks for the memory with `take`,
so that no process ever maps a pool without the kernel knowing.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gms.messages import BYTES_MAX, DETAIL_LENGTH_MAX, WAIT_MS_MAX
from gms.messages import InspectMsg as InspectMsg
from gms.messages import InspectReplyMsg as InspectReplyMsg
from gms.messages import WaitingMsg as WaitingMsg
from plumbing.pod.messages import EventMsg as EventMsg
from plumbing.pod.messages import StatusMsg as StatusMsg
from plumbing.pod.messages import StatusReplyMsg as StatusReplyMsg
from plumbing.pod.messages import WatchMsg as WatchMsg
from plumbing.wire.limits import FDS_PER_FRAME_MAX
from plumbing.wire.messages import Catalogue, Message, messages_in

# The index and every slab travel in one frame. In slabs of 2 GiB that is 498 GiB, more than any
# device has.
SLABS_MAX = FDS_PER_FRAME_MAX - 1
INDEX_BYTES_MAX = 1 << 30  # 64 bytes for each of 16 million blocks
TOKEN_MAX = 2**63 - 1
NO_ERA = "0" * 16  # of a lock server that knows no eras: its tokens compare with none

# What a holder reports about the content, in this order.
BEGUN = "begun"  # the memory is zero, on a GPU by the holder's hand; it is written from here on
ADOPTING = "adopting"  # blocks of an earlier holder are about to be believed
ADOPTED = "adopted"  # …and the canary has passed on them

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Era = Annotated[str, Meta(min_length=1, max_length=32)]
Token = Annotated[int, Meta(ge=0, le=TOKEN_MAX)]
PoolBytes = Annotated[int, Meta(ge=1, le=BYTES_MAX)]
IndexBytes = Annotated[int, Meta(ge=1, le=INDEX_BYTES_MAX)]


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
    """The pool is this incarnation's: hold a shared flock on `pool_file`, then `take`."""

    pool: str
    pool_file: str  # a name in the service's directory


class TakeMsg(Message, frozen=True, tag="take"):
    """The flock is held."""


class PoolTakenMsg(Message, frozen=True, tag="taken"):
    """The descriptors, all writable: the index, then every slab in order. `is_fresh`: nothing was
    ever written; on a GPU its bytes are arbitrary until a holder has zeroed them (`begun`)."""

    FDS = (2, FDS_PER_FRAME_MAX)
    pool: str
    slab_sizes: tuple[int, ...]
    index_bytes: int
    is_fresh: bool


class MarkMsg(Message, frozen=True, tag="mark"):
    """`begun`, `adopting` or `adopted`. Has no answer: it is read before the end of its sender."""

    mark: Name


class DiscardMsg(Message, frozen=True, tag="discard"):
    """The content cannot be trusted: nobody borrows this pool again, and its memory is freed once
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
    pool_bytes: int


class DropPoolMsg(Message, frozen=True, tag="drop_pool"):
    """An operator wants the memory of a pool that no engine uses. Answered by `pool_dropped`."""


class PoolDroppedMsg(Message, frozen=True, tag="pool_dropped"):
    """Its memory is being freed."""

    pool: str
    pool_bytes: int


class HandBackMsg(Message, frozen=True, tag="hand_back"):
    """A session ended with its server: report the pool that this process maps, with all of its
    descriptors as in `taken`. Answered by `kept`."""

    FDS = (2, FDS_PER_FRAME_MAX)
    engine: Name
    incarnation: Name
    token: Token
    era: Era
    size_bytes: PoolBytes
    index_bytes: IndexBytes
    pool: Name
    slab_sizes: Annotated[tuple[PoolBytes, ...], Meta(min_length=1, max_length=SLABS_MAX)]
    mark: Annotated[str, Meta(max_length=32)] = ""  # the last one that this session reported
    discarded: Annotated[str, Meta(max_length=DETAIL_LENGTH_MAX)] = ""  # why, if it was


class PoolKeptMsg(Message, frozen=True, tag="kept"):
    """Registered: this session holds the pool again."""

    pool: str


CATALOGUE = Catalogue(*messages_in(globals()))
