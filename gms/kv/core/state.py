"""The pools and borrowers of a KV machine, and the tables of their transitions.

Pure data. The tables are the enforcer: `move` and `turn` raise on a pair that is not in them and
change nothing. `docs/states.md` is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gms import kv_messages as msg
from gms.core.events import Closed, SessionEvent
from gms.core.transitions import next_state
from gms.kv.core import events as ev
from gms.kv.core.events import BorrowerState as S
from gms.kv.core.events import Claimant
from gms.kv.core.events import PoolPhase as P
from plumbing.errors import InvariantError
from plumbing.text import size
from plumbing.wire.messages import Message

BorrowerInput = type[SessionEvent] | type[Message]
ClaimMsg = msg.BorrowPoolMsg | msg.HandBackMsg

BORROWER_TRANSITIONS: Mapping[tuple[S, BorrowerInput], S] = {
    (S.OPEN, msg.BorrowPoolMsg): S.WAITING,
    (S.WAITING, ev.PoolLent): S.GRANTED,
    (S.GRANTED, msg.TakeMsg): S.HOLDING,
    (S.HOLDING, msg.MarkMsg): S.HOLDING,
    (S.HOLDING, msg.DiscardMsg): S.HOLDING,
    (S.HOLDING, msg.GiveUpMsg): S.LEAVING,
    (S.LEAVING, ev.BorrowerFreed): S.CLOSED,
    (S.OPEN, msg.HandBackMsg): S.RETURNING,
    (S.RETURNING, ev.BorrowerBack): S.HOLDING,
    (S.WAITING, ev.BorrowerRefused): S.CLOSED,
    (S.RETURNING, ev.BorrowerRefused): S.CLOSED,
    (S.LEAVING, ev.BorrowerRefused): S.CLOSED,
    **{(state, Closed): S.CLOSED for state in S if state is not S.CLOSED},
}

POOL_TURNS: Mapping[tuple[P, str], P] = {
    (P.MAKING, "keep"): P.KEPT,
    (P.MAKING, "fail"): P.GONE,
    (P.KEPT, "discard"): P.DISCARDED,
    (P.DISCARDED, "release"): P.RELEASING,
    (P.ORPHANED, "recover"): P.KEPT,
    (P.ORPHANED, "release"): P.RELEASING,
    (P.RELEASING, "end"): P.GONE,
}

# A process in one of these maps the pool, or is about to.
HOLDERS = frozenset({S.GRANTED, S.HOLDING, S.RETURNING})


class Pool(Struct):
    """One device's KV memory: slabs and an index, made and freed together."""

    id: str
    phase: P
    size_bytes: int = 0  # as claimed; the slabs have at least as much
    index_bytes: int = 0
    slab_sizes: tuple[int, ...] = ()
    has_begun: bool = False  # a holder has zeroed it and may have written
    is_certain: bool = True  # … and that is known: a survivor may not know of its neighbour
    holder: Claimant | None = None  # the last incarnation that it was lent to
    adopting: Claimant | None = None
    # In a row: a holder died between `adopting` and `adopted`. A restarted server counts from 0;
    # still no content kills every engine: the index itself counts its unproven adopters, before
    # their first step, in the memory that a survivor hands back (`engine.kv.adopter`). This count
    # is for an engine that dies before that, while it reads the index.
    failed_adoptions: int = 0
    discarded: str = ""  # why it was
    is_watched: bool = False
    is_free: bool = False  # the kernel has just said so, and nobody was granted it since
    returning: int | None = None  # the session whose memory the driver checks
    offer: msg.HandBackMsg | None = None  # what that session said
    pids: tuple[int, ...] = ()  # seen with its file open, while no session explains it

    @property
    def memory_bytes(self) -> int:
        return sum(self.slab_sizes) + (self.index_bytes if self.slab_sizes else 0)

    @property
    def why(self) -> tuple[str, str]:
        """Code and sentence of a wait for this pool."""
        name = f"KV pool {self.id[:8]}"
        pids = ", ".join(f"pid {pid}" for pid in self.pids)
        match self.phase:
            case P.MAKING:
                return "gms.kv_making", f"{size(self.size_bytes)} of KV memory is being allocated"
            case P.ORPHANED:
                text = f"{name} of the previous server has not been handed back yet"
                return "gms.kv_recovering", f"{text}; it is mapped by {pids or 'a process'}"
            case P.DISCARDED:
                by = f" by {pids}" if pids else ""
                return "gms.kv_busy", f"{name} was discarded ({self.discarded}), still mapped{by}"
            case P.KEPT:
                whom = pids or f"a process of {self.holder}"
                return "gms.kv_busy", f"{name} is still mapped by {whom}, whose session has ended"
        return "gms.kv_releasing", f"the memory of {name} is being freed"

    def note(self, claimant: Claimant, mark: str) -> None:
        """Record what a holder reports about the content."""
        self.has_begun = self.is_certain = True
        if mark == msg.ADOPTING:
            self.adopting = claimant
        elif mark == msg.ADOPTED:
            self.adopting, self.failed_adoptions = None, 0

    def turn(self, verb: str) -> None:
        """Move to the next phase, by the table."""
        target = POOL_TURNS.get((self.phase, verb))
        if target is None:
            raise InvariantError(f"pool {self.id} is {self.phase} and cannot {verb}")
        self.phase = target

    def fits(self, claim: ClaimMsg) -> bool:
        return (self.size_bytes, self.index_bytes) == (claim.size_bytes, claim.index_bytes)


class KvBorrower(Struct):
    """One connection that borrows, or has borrowed from an earlier server."""

    id: int
    state: S = S.OPEN
    claim: ClaimMsg | None = None
    pid: int = 0  # 0 where its PID namespace is not visible
    request_id: int = 0
    since_ms: float = 0.0
    deadline_ms: float | None = None
    reason: str = ""  # of the wait: a code, for programs
    reason_message: str = ""
    pool: str = ""

    @property
    def claimant(self) -> Claimant:
        if self.claim is None:
            raise InvariantError(f"session {self.id} has claimed nothing")
        claim = self.claim
        return Claimant(claim.engine, claim.incarnation, claim.token, claim.era)

    @property
    def label(self) -> str:
        """`engine-0 (token 5, pid 17)`."""
        pid = f", pid {self.pid}" if self.pid else ""
        return f"{self.claimant.engine} (token {self.claimant.token}{pid})"

    def target(self, kind: BorrowerInput) -> S:
        """The state that `kind` leads to; raises as `next_state`."""
        return next_state(BORROWER_TRANSITIONS, self.state, kind)

    def move(self, kind: BorrowerInput, now_ms: float) -> None:
        """Change state, by the table."""
        target = self.target(kind)
        if target is not self.state:
            self.state, self.since_ms = target, now_ms
