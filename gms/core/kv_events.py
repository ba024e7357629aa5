"""The events and effects of the machine that owns one device's KV memory.

What a client asks for arrives as `Received`, and the end of its connection as `Closed`,
as in `gms.core.events`. A pool is named by a random hex string, never by a number: numbers restart
with the server and would bring stale memory back to life.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from gms.core.events import DeviceEffect, DeviceEvent, Respond, SessionEvent
from plumbing.errors import UnderstudyError


class PoolPhase(StrEnum):
    """What a pool's memory is to this server."""

    MAKING = "making"
    KEPT = "kept"  # ours to lend; its content stays between two holders
    DISCARDED = "discarded"  # never lent again; a process may still map it
    RELEASING = "releasing"  # nobody maps it; its memory is being freed
    ORPHANED = "orphaned"  # of an earlier server: its holders have it, and we do not
    GONE = "gone"


class BorrowerState(StrEnum):
    """The states of one process that borrows."""

    OPEN = "open"  # has asked for nothing yet
    WAITING = "waiting"
    GRANTED = "granted"  # the pool is its; it has no memory before it holds the flock
    HOLDING = "holding"  # has the descriptors
    LEAVING = "leaving"  # maps nothing any more; waits until the memory is free
    RETURNING = "returning"  # came back after a server's death; not registered yet
    CLOSED = "closed"


class Claimant(Struct, frozen=True):
    """One incarnation of an engine, as the holder of `active` under `token` of `era`."""

    engine: str
    incarnation: str
    token: int
    era: str

    def __str__(self) -> str:
        return f"{self.engine} (token {self.token})"


class KvPoolEvent(DeviceEvent, frozen=True):
    pool: str


class PoolMade(KvPoolEvent, frozen=True):
    """Its file and memory exist."""

    slab_sizes: tuple[int, ...]


class PoolNotMade(KvPoolEvent, frozen=True):
    """Nothing of it is left; `gms.device_full`: other processes may release some memory."""

    error: UnderstudyError


class PoolFree(KvPoolEvent, frozen=True):
    """The kernel says that no process holds its file."""


class PoolHoldersSeen(KvPoolEvent, frozen=True):
    """The processes that have its file open, where visible."""

    pids: tuple[int, ...]


class PoolReleased(KvPoolEvent, frozen=True):
    """Its file and memory are gone, or (`problem`) as far as the driver let go."""


class PoolTakenBack(KvPoolEvent, frozen=True):
    """The memory that a survivor handed back passed its checks, and the driver holds it."""


class PoolNotTakenBack(KvPoolEvent, frozen=True):
    """… it did not; that survivor's session ends with the error."""

    session: int
    error: UnderstudyError


# The machine's own verdicts on a session: rows of its table, never accepted from a shell.


class PoolLent(SessionEvent, frozen=True): ...


class BorrowerBack(SessionEvent, frozen=True): ...


class BorrowerRefused(SessionEvent, frozen=True): ...


class BorrowerFreed(SessionEvent, frozen=True): ...


class KvPoolEffect(DeviceEffect, frozen=True):
    pool: str


class MakePool(KvPoolEffect, frozen=True):
    """Make file, index and slabs; then `PoolMade` or `PoolNotMade`."""

    size_bytes: int
    index_bytes: int


class WatchPool(KvPoolEffect, frozen=True):
    """Watch its file until it is free, once: `PoolFree`."""


class UnwatchPool(KvPoolEffect, frozen=True):
    """It need not be known any more whether it is free."""


class MarkDiscarded(KvPoolEffect, frozen=True):
    """Mark its file, so that no restart brings it back; best effort."""


class ReleasePool(KvPoolEffect, frozen=True):
    """Remove its file and free its memory; then `PoolReleased`."""


class TakePoolBack(KvPoolEffect, frozen=True):
    """Check what `session` handed back and hold it; `PoolTakenBack` or `PoolNotTakenBack`."""

    session: int
    slab_sizes: tuple[int, ...]
    index_bytes: int


class GrantPool(Respond, frozen=True):
    """Send the name of the pool's file."""

    pool: str


class SendPool(Respond, frozen=True):
    """Send the descriptors."""

    pool: str
    is_fresh: bool


class KeepTokens(DeviceEffect, frozen=True):
    """Put the newest claim of each era on disk, for a restarted server; best effort."""

    newest: tuple[Claimant, ...]
