"""The epochs and sessions of a device's machine, and the tables of their transitions.

The tables are the enforcer: `move` and `turn` raise on a pair that is not in them and
change nothing. `docs/states.md` is generated from them. A session moves on the messages of its
client and on the events of `events.py`.

`next_state` is also the KV machine's way to look up its tables: it says whether a message is legal,
the client's fault, or ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import Struct, field

from gms import messages as msg
from gms.core import events as ev
from gms.core.events import EpochPhase as P
from gms.core.events import SessionState as S
from gms.manifest import LayoutHash, identity_hash
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError
from plumbing.wire.messages import Message, type_of

StateT = TypeVar("StateT")


def next_state(
    table: Mapping[tuple[StateT, type[Any]], StateT], state: StateT, kind: type[Any]
) -> StateT:
    """The state that `kind`, a message or an event, leads to from `state`.

    Raises:
        ProtocolError: `gms.unexpected_message`, the client sent it at the wrong moment.
        InvariantError: our own mistake.
    """
    target = table.get((state, kind))
    if target is not None:
        return target
    if issubclass(kind, Message):
        raise ProtocolError(
            "gms.unexpected_message",
            f"{type_of(kind)} is not allowed now: this session is {state}",
            state=str(state),
        )
    raise InvariantError(f"{kind.__name__} in state {state}")


SessionInput = type[ev.SessionEvent] | type[Message]

# The states in which a driver call for the session is under way, and those that may be refused.
CALLS_DRIVER = (S.OPENING, S.ALLOCATING, S.SEALING, S.ADOPTING)
REFUSABLE = (S.WAITING, S.WRITING, S.ALLOCATING, S.REJOINING, S.OFFERING, S.ADOPTING)

SESSION_TRANSITIONS: Mapping[tuple[S, SessionInput], S] = {
    (S.OPEN, msg.AttachMsg): S.WAITING,
    (S.WAITING, ev.GrantedRead): S.READING,
    (S.WAITING, ev.GrantedWrite): S.OPENING,
    (S.OPENING, ev.EpochOpened): S.WRITING,
    (S.WRITING, msg.AllocateMsg): S.ALLOCATING,
    (S.ALLOCATING, ev.SlabCreated): S.WRITING,
    (S.ALLOCATING, ev.DeviceFull): S.ALLOCATING,
    (S.WRITING, msg.ProgressMsg): S.WRITING,
    (S.ALLOCATING, msg.ProgressMsg): S.ALLOCATING,
    (S.WRITING, msg.CommitMsg): S.SEALING,
    (S.SEALING, ev.Sealed): S.JOURNALLING,
    (S.JOURNALLING, ev.JournalFailed): S.JOURNALLING,
    (S.JOURNALLING, ev.Journalled): S.READING,
    (S.READING, msg.CondemnMsg): S.READING,
    (S.READING, msg.DigestMsg): S.READING,
    (S.READING, msg.OffloadMsg): S.CLOSED,  # it has unmapped: it is no reader any more
    (S.OPEN, msg.RejoinMsg): S.REJOINING,
    (S.REJOINING, ev.Rejoined): S.READING,
    (S.REJOINING, ev.AskedToOffer): S.OFFERING,
    (S.OFFERING, msg.OfferMsg): S.ADOPTING,
    (S.ADOPTING, ev.Adopted): S.READING,
    **{(state, ev.DriverFailed): S.CLOSED for state in CALLS_DRIVER},
    **{(state, ev.SessionRefused): S.CLOSED for state in REFUSABLE},
    **{(state, ev.Closed): S.CLOSED for state in S if state is not S.CLOSED},
}

# Completions may arrive after the session that asked has left: then they are ignored.
COMPLETIONS = (
    ev.EpochOpened, ev.SlabCreated, ev.DeviceFull, ev.Sealed, ev.Journalled, ev.JournalFailed,
    ev.Adopted, ev.DriverFailed,
)  # fmt: skip

EPOCH_TURNS: Mapping[tuple[P, str], P] = {
    (P.STAGING, "publish"): P.COMMITTED,
    (P.STAGING, "lose"): P.RELEASING,
    (P.COMMITTED, "supersede"): P.SUPERSEDED,
    (P.COMMITTED, "release"): P.RELEASING,
    (P.COMMITTED, "offload"): P.RELEASING,
    (P.SUPERSEDED, "release"): P.RELEASING,
    (P.ORPHANED, "recover"): P.COMMITTED,
    (P.ORPHANED, "adopt"): P.SUPERSEDED,
}

UNKNOWN_LAYOUT = LayoutHash("")

QUEUED = frozenset({S.WAITING, S.REJOINING})

HANDING_BACK = frozenset({S.OFFERING, S.ADOPTING})

WRITER_STATES = frozenset({S.OPENING, S.WRITING, S.ALLOCATING, S.SEALING, S.JOURNALLING})


class Epoch(Struct):
    """One generation of the device's memory, as far as this server knows it."""

    id: str
    phase: P
    slab_sizes: list[int] = field(default_factory=list)
    identity: Mapping[str, Any] | None = None
    manifest: bytes = b""
    tensors: int = 0  # how many the manifest lists; known once it is checked
    layout_hash: LayoutHash = UNKNOWN_LAYOUT
    readers: set[int] = field(default_factory=set)  # sessions
    holders: tuple[int, ...] = ()  # pids seen with its file open, while no session owns it
    expected: ev.JournalRecord | None = None  # what an offer of this orphan must match
    fallback: ev.JournalRecord | None = None  # the same, if the journalled one is gone
    is_history: bool = False  # its file is marked: out of service
    has_no_file: bool = False  # it was removed under its readers
    digest: str | None = None  # of the bytes, as its writer computed it
    failed_canaries: set[str] = field(default_factory=set)  # incarnations

    @property
    def size_bytes(self) -> int:
        return sum(self.slab_sizes)

    @property
    def is_being_freed(self) -> bool:
        """Given up, and no session reads it: it ends when its processes do."""
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


class Session(Struct):
    """One connection that asked to attach."""

    id: int
    state: S = S.OPEN
    attach: msg.AttachMsg | None = None  # of a survivor, what its rejoin amounts to
    pid: int = 0  # of the process; 0 where its PID namespace is not visible
    request_id: int = 0  # of the request that awaits its answer; 0: none
    since_ms: float = 0.0
    deadline_ms: float | None = None  # of the wait, or of the writer's next progress
    reason: str = ""  # of the wait: a code, for programs
    reason_message: str = ""  # the same as a sentence
    epoch: str | None = None
    asked_bytes: int | None = None  # of the slab that is being allocated, or waited for
    is_issued: bool = False  # that slab's driver call is under way
    has_waited: bool = False  # for room for a slab
    full: UnderstudyError | None = None  # the driver's error: it has no memory for that slab
    full_since_ms: float | None = None
    may_be_journalled: bool = False
    is_restaging: bool = False  # it has committed what it copied from the host copy
    rejoin: msg.RejoinMsg | None = None
    offer: msg.OfferMsg | None = None
    retry_ms: float | None = None  # when the journal, or the full device, is tried again
    done_bytes: int = 0
    total_bytes: int = 0

    def target(self, kind: SessionInput) -> S:
        """The state that `kind` leads to; raises as `next_state`."""
        return next_state(SESSION_TRANSITIONS, self.state, kind)

    def move(self, kind: SessionInput, now_ms: float) -> None:
        """Change state, by the table."""
        target = self.target(kind)
        if target is not self.state:
            self.state, self.since_ms = target, now_ms

    @property
    def request(self) -> msg.AttachMsg:
        """The request that opened this session; every session past OPEN has one."""
        if self.attach is None:
            raise InvariantError(f"session {self.id} is {self.state} without a request")
        return self.attach

    @property
    def label(self) -> str:
        """Its name in messages: `engine-0` or `engine-0 rank 1 (pid 123)`."""
        rank = f" rank {self.request.rank}" if self.request.rank else ""
        return f"{self.request.engine}{rank}" + (f" (pid {self.pid})" if self.pid else "")
