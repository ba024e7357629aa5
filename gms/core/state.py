"""The things a device's machine keeps: epochs and sessions, and the tables of what may follow what.

Pure data. The tables are the enforcer: `move` and `turn` raise on a pair that is not in them and
change nothing. `docs/states.md` is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gms.core import events as ev
from gms.core.events import EpochPhase as P
from gms.core.events import SessionState as S
from gms.core.identity import identity_hash
from gms.core.manifest import LayoutHash
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError

SESSION_TRANSITIONS: Mapping[tuple[S, type[ev.SessionEvent]], S] = {
    (S.OPEN, ev.Attach): S.WAITING,
    (S.WAITING, ev.GrantedRead): S.READING,
    (S.WAITING, ev.GrantedWrite): S.OPENING,
    (S.OPENING, ev.EpochOpened): S.WRITING,
    (S.WRITING, ev.Allocate): S.ALLOCATING,
    (S.ALLOCATING, ev.SlabCreated): S.WRITING,
    (S.ALLOCATING, ev.DeviceFull): S.ALLOCATING,
    (S.WRITING, ev.Progress): S.WRITING,
    (S.ALLOCATING, ev.Progress): S.ALLOCATING,
    (S.WRITING, ev.Commit): S.SEALING,
    (S.SEALING, ev.Sealed): S.JOURNALLING,
    (S.JOURNALLING, ev.JournalFailed): S.JOURNALLING,
    (S.JOURNALLING, ev.Journalled): S.READING,
    (S.READING, ev.Condemn): S.READING,
    (S.READING, ev.Digested): S.READING,
    (S.OPEN, ev.Rejoin): S.REJOINING,
    (S.REJOINING, ev.Rejoined): S.READING,
    (S.REJOINING, ev.AskedToOffer): S.OFFERING,
    (S.OFFERING, ev.Offer): S.ADOPTING,
    (S.ADOPTING, ev.Adopted): S.READING,
    (S.OPENING, ev.DriverFailed): S.CLOSED,
    (S.ALLOCATING, ev.DriverFailed): S.CLOSED,
    (S.SEALING, ev.DriverFailed): S.CLOSED,
    (S.ADOPTING, ev.DriverFailed): S.CLOSED,
    (S.WAITING, ev.Refused): S.CLOSED,
    (S.WRITING, ev.Refused): S.CLOSED,
    (S.ALLOCATING, ev.Refused): S.CLOSED,
    (S.REJOINING, ev.Refused): S.CLOSED,
    (S.OFFERING, ev.Refused): S.CLOSED,
    (S.ADOPTING, ev.Refused): S.CLOSED,
    (S.OPEN, ev.Closed): S.CLOSED,
    (S.WAITING, ev.Closed): S.CLOSED,
    (S.OPENING, ev.Closed): S.CLOSED,
    (S.WRITING, ev.Closed): S.CLOSED,
    (S.ALLOCATING, ev.Closed): S.CLOSED,
    (S.SEALING, ev.Closed): S.CLOSED,
    (S.JOURNALLING, ev.Closed): S.CLOSED,
    (S.READING, ev.Closed): S.CLOSED,
    (S.REJOINING, ev.Closed): S.CLOSED,
    (S.OFFERING, ev.Closed): S.CLOSED,
    (S.ADOPTING, ev.Closed): S.CLOSED,
}

# What a peer may say at the wrong moment: its fault. Any other illegal pair is ours.
FROM_PEERS = (
    ev.Attach, ev.Allocate, ev.Progress, ev.Commit, ev.Rejoin, ev.Offer, ev.Condemn, ev.Digested,
)  # fmt: skip

# Completions may come after the session that asked has left: then they mean nothing.
COMPLETIONS = (
    ev.EpochOpened, ev.SlabCreated, ev.DeviceFull, ev.Sealed, ev.Journalled, ev.JournalFailed,
    ev.Adopted, ev.DriverFailed,
)  # fmt: skip

EPOCH_TURNS: Mapping[tuple[P, str], P] = {
    (P.STAGING, "publish"): P.COMMITTED,
    (P.STAGING, "lose"): P.RELEASING,
    (P.COMMITTED, "supersede"): P.SUPERSEDED,
    (P.COMMITTED, "release"): P.RELEASING,
    (P.SUPERSEDED, "release"): P.RELEASING,
    (P.ORPHANED, "recover"): P.COMMITTED,
    (P.ORPHANED, "adopt"): P.SUPERSEDED,
}

UNKNOWN_LAYOUT = LayoutHash("")

QUEUED = frozenset({S.WAITING, S.REJOINING})

HANDING_BACK = frozenset({S.OFFERING, S.ADOPTING})

WRITER_STATES = frozenset({S.OPENING, S.WRITING, S.ALLOCATING, S.SEALING, S.JOURNALLING})


@dataclass(slots=True)
class Epoch:
    """One generation of the device's memory, as far as this server knows it."""

    id: str
    phase: P
    slab_sizes: list[int] = field(default_factory=list)
    identity: Mapping[str, Any] | None = None
    manifest: bytes = b""
    tensors: int = 0  # how many the manifest lists; known once it is checked
    layout_hash: LayoutHash = UNKNOWN_LAYOUT
    readers: set[int] = field(default_factory=set)  # sessions
    holders: tuple[int, ...] = ()  # pids seen with its file open, while nobody here owns it
    expected: ev.JournalRecord | None = None  # what an offer of this orphan must match
    fallback: ev.JournalRecord | None = None  # the same, should the journalled one be gone
    is_history: bool = False  # its file says that it was taken out of service
    has_no_file: bool = False  # it was removed under its readers
    digest: str | None = None  # of the bytes, as its writer computed it
    failed_canaries: set[str] = field(default_factory=set)  # incarnations

    @property
    def size_bytes(self) -> int:
        return sum(self.slab_sizes)

    @property
    def is_going(self) -> bool:
        """Given up, and nobody who is known here keeps it: it ends when its processes do."""
        return self.phase is P.RELEASING and not self.readers

    def turn(self, verb: str) -> None:
        """Move to the next phase, by the table."""
        target = EPOCH_TURNS.get((self.phase, verb))
        if target is None:
            raise InvariantError(f"epoch {self.id} is {self.phase} and cannot {verb}")
        self.phase = target

    def record(self) -> ev.JournalRecord:
        return ev.JournalRecord(
            epoch=self.id,
            size_bytes=self.size_bytes,
            layout_hash=self.layout_hash,
            identity_hash=identity_hash(self.identity or {}),
            digest=self.digest,
        )


@dataclass(slots=True)
class Session:
    """One connection that asked to attach."""

    id: int
    state: S = S.OPEN
    attach: ev.Attach | None = None
    since_ms: float = 0.0
    deadline_ms: float | None = None  # of the wait, or of the writer's next progress
    reason: str = ""  # of the wait: a code, for programs
    reason_message: str = ""  # and for people
    epoch: str | None = None
    asked: ev.Allocate | None = None  # the slab that is being allocated, or waited for
    is_issued: bool = False  # that slab's driver call is under way
    has_waited: bool = False  # for room for a slab
    full: UnderstudyError | None = None  # what the driver said: it has no memory for that slab
    full_since_ms: float | None = None
    commit: ev.Commit | None = None
    may_be_journalled: bool = False
    rejoin: ev.Rejoin | None = None
    offer: ev.Offer | None = None
    retry_ms: float | None = None  # when the journal, or the full device, is tried again
    done_bytes: int = 0
    total_bytes: int = 0

    def target(self, kind: type[ev.SessionEvent]) -> S:
        """The state that `kind` leads to.

        Raises:
            ProtocolError: `gms.unexpected_message`, the peer said it at the wrong moment.
            InvariantError: we did.
        """
        target = SESSION_TRANSITIONS.get((self.state, kind))
        if target is not None:
            return target
        if kind in FROM_PEERS:
            raise ProtocolError(
                "gms.unexpected_message",
                f"{kind.__name__.lower()} makes no sense now: this session is {self.state}",
                state=str(self.state),
            )
        raise InvariantError(f"{kind.__name__} in state {self.state}")

    def move(self, kind: type[ev.SessionEvent], now_ms: float) -> None:
        """Change state, by the table."""
        target = self.target(kind)
        if target is not self.state:
            self.state, self.since_ms = target, now_ms

    @property
    def request(self) -> ev.Attach:
        """The request that opened this session; every session past OPEN has one."""
        if self.attach is None:
            raise InvariantError(f"session {self.id} is {self.state} without a request")
        return self.attach

    @property
    def label(self) -> str:
        """How people are told of it: `engine-0` or `engine-0 rank 1 (pid 123)`."""
        request = self.request
        rank = f" rank {request.rank}" if request.rank else ""
        return f"{request.engine}{rank}" + (f" (pid {request.pid})" if request.pid else "")
