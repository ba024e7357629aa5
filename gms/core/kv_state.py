"""The pools and borrowers of a KV machine: the tables of their transitions, who waits, what is
kept.

The tables are the enforcer: `move` and `turn` raise on a pair that is not in them and
change nothing. `docs/states.md` is generated from them.

`Borrowers` are the sessions: who claims, who waits, whose token is the newest. It decides whether a
claim may wait at all; the machine decides whether it is granted. `Pools` are those of one device:
at most one that can be lent, and what earlier ones left behind. It carries out what must not be
done by halves; the machine decides whether it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from gms import kv_messages as msg
from gms.core import events as ev
from gms.core import kv_events as kv
from gms.core.events import Closed, Effects, SessionEvent
from gms.core.kv_events import BorrowerState, Claimant, PoolPhase
from gms.core.kv_events import BorrowerState as S
from gms.core.kv_events import PoolPhase as P
from gms.core.state import next_state
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError
from plumbing.text import duration, size
from plumbing.wire.messages import Message

BorrowerInput = type[SessionEvent] | type[Message]
ClaimMsg = msg.BorrowPoolMsg | msg.HandBackMsg

BORROWER_TRANSITIONS: Mapping[tuple[S, BorrowerInput], S] = {
    (S.OPEN, msg.BorrowPoolMsg): S.WAITING,
    (S.WAITING, kv.PoolLent): S.GRANTED,
    (S.GRANTED, msg.TakeMsg): S.HOLDING,
    (S.HOLDING, msg.MarkMsg): S.HOLDING,
    (S.HOLDING, msg.DiscardMsg): S.HOLDING,
    (S.HOLDING, msg.GiveUpMsg): S.LEAVING,
    (S.LEAVING, kv.BorrowerFreed): S.CLOSED,
    (S.OPEN, msg.HandBackMsg): S.RETURNING,
    (S.RETURNING, kv.BorrowerBack): S.HOLDING,
    (S.WAITING, kv.BorrowerRefused): S.CLOSED,
    (S.RETURNING, kv.BorrowerRefused): S.CLOSED,
    (S.LEAVING, kv.BorrowerRefused): S.CLOSED,
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


ERAS_MAX = 8  # an era ends when a lock server has lost its state; older ones are forgotten
BORROWERS_WAITING_MAX = 64  # eight engines of eight processes; more is a client in a loop


class Borrowers:
    """Every session, in order of arrival."""

    def __init__(self, newest: Iterable[Claimant]) -> None:
        self.newest = {each.era: each for each in newest}  # by era, the last that was heard last
        self.stale_refusals_total = 0
        self._all: dict[int, KvBorrower] = {}

    @property
    def waiting(self) -> list[KvBorrower]:
        return [each for each in self._all.values() if each.state is BorrowerState.WAITING]

    @property
    def leaving(self) -> list[KvBorrower]:
        """Those that wait until the memory which they gave up is free."""
        return [each for each in self._all.values() if each.state is BorrowerState.LEAVING]

    @property
    def returning(self) -> list[KvBorrower]:
        return [each for each in self._all.values() if each.state is BorrowerState.RETURNING]

    @property
    def holders(self) -> list[KvBorrower]:
        """Those whose process maps a pool, or is about to."""
        return [each for each in self._all.values() if each.state in HOLDERS]

    def holders_of(self, pool: str) -> list[KvBorrower]:
        return [each for each in self.holders if each.pool == pool]

    def get(self, event: ev.Received) -> KvBorrower:
        """The session of `event`.

        Raises:
            ProtocolError: `gms.not_attached`.
        """
        session = self._all.get(event.session)
        if session is None:
            raise ProtocolError(
                "gms.not_attached", f"{event.message.TYPE} needs a session: borrow first"
            )
        return session

    def drop(self, session_id: int) -> KvBorrower | None:
        """Forget a session whose connection has ended."""
        return self._all.pop(session_id, None)

    def borrow(self, event: ev.Received, message: msg.BorrowPoolMsg, now_ms: float) -> Effects:
        """A claim: refuse it if it is stale, else let it wait to be judged."""
        session = self._all.get(event.session) or KvBorrower(event.session)
        session.target(msg.BorrowPoolMsg)
        claimant = Claimant(message.engine, message.incarnation, message.token, message.era)
        self._check_token(claimant)
        if len(self.waiting) >= BORROWERS_WAITING_MAX:
            raise UnderstudyError(
                "gms.too_many_waiters",
                f"{BORROWERS_WAITING_MAX} processes wait for this device's KV memory already, which"
                " is the limit; stop some of them and try again",
            )
        session.claim, session.pid, session.request_id = message, event.pid, event.request_id
        session.move(msg.BorrowPoolMsg, now_ms)
        session.deadline_ms = now_ms + message.wait_ms
        self._all[session.id] = session
        effects = self._heard(claimant)
        for older in self.waiting:
            error = self._stale(older.claimant)
            if error is not None:
                effects += self.refuse(older.id, error, now_ms)
        return effects

    def hand_back(self, event: ev.Received, message: msg.HandBackMsg, now_ms: float) -> Effects:
        """A survivor, which maps the pool whatever anybody says."""
        session = self._all.get(event.session) or KvBorrower(event.session)
        session.move(msg.HandBackMsg, now_ms)
        session.claim, session.pid, session.request_id = message, event.pid, event.request_id
        session.pool = message.pool
        self._all[session.id] = session
        return self._heard(session.claimant)

    def leave(self, event: ev.Received, message: msg.GiveUpMsg, now_ms: float) -> KvBorrower:
        """A holder gives its pool up. One whose token is stale may not: the pool is for the engine
        with the newer one.

        Raises:
            UnderstudyError: `gms.kv_stale_token`.
        """
        session = self.get(event)
        session.target(msg.GiveUpMsg)
        self._check_token(session.claimant)
        session.move(msg.GiveUpMsg, now_ms)
        session.request_id, session.deadline_ms = event.request_id, now_ms + message.wait_ms
        session.reason_message = "a process of this engine still maps it, or it is being freed"
        return session

    def freed(self, pool: Pool, now_ms: float) -> Effects:
        """Tell those who gave `pool` up that its memory is free."""
        effects: Effects = []
        for session in self.leaving:
            if session.pool == pool.id:
                session.move(kv.BorrowerFreed, now_ms)
                del self._all[session.id]
                answer = msg.PoolFreedMsg(pool.id, pool.memory_bytes)
                effects.append(ev.SendMessage(session.id, session.request_id, answer))
        return effects

    def wait(self, session: KvBorrower, reason: str, message: str) -> Effects:
        """Tell it why it waits, if that is news."""
        if (session.reason, session.reason_message) == (reason, message):
            return []
        session.reason, session.reason_message = reason, message
        return [ev.SendMessage(session.id, session.request_id, msg.WaitingMsg(reason, message))]

    def refuse(self, session_id: int, error: UnderstudyError, now_ms: float) -> Effects:
        """End a session that waits or returns with `error`; one that has left needs no answer."""
        session = self._all.pop(session_id, None)
        if session is None:
            return []
        session.move(kv.BorrowerRefused, now_ms)
        return [ev.RefuseRequest(session.id, session.request_id, error)]

    def end_overdue(self, now_ms: float, full: UnderstudyError | None) -> Effects:
        """Refuse whoever has waited for as long as it wanted, with the reason."""
        effects: Effects = []
        for session in (*self.waiting, *self.leaving):
            if session.deadline_ms is None:
                raise InvariantError(f"session {session.id} waits without a deadline")
            if session.deadline_ms > now_ms:
                continue
            waited = duration(now_ms - session.since_ms)
            if full is not None and session.reason == full.code:
                text = f"waited {waited}: {full.message}"
                error = UnderstudyError(full.code, text, **full.details)
            else:
                text = f"waited {waited} for the KV memory: {session.reason_message}"
                error = UnderstudyError("gms.kv_busy", text, reason=session.reason)
            effects += self.refuse(session.id, error, now_ms)
        return effects

    def _heard(self, claimant: Claimant) -> Effects:
        """Remember its token, if it is the newest of its era."""
        known = self.newest.get(claimant.era)
        if claimant.era == msg.NO_ERA or (known is not None and known.token >= claimant.token):
            return []
        self.newest.pop(claimant.era, None)
        while len(self.newest) >= ERAS_MAX:
            del self.newest[next(iter(self.newest))]
        self.newest[claimant.era] = claimant
        return [kv.KeepTokens(tuple(self.newest.values()))]

    def _check_token(self, claimant: Claimant) -> None:
        """
        Raises:
            UnderstudyError: `gms.kv_stale_token`.
        """
        error = self._stale(claimant)
        if error is not None:
            self.stale_refusals_total += 1
            raise error

    def _stale(self, claimant: Claimant) -> UnderstudyError | None:
        newest = self.newest.get(claimant.era)
        if newest is None or claimant == newest or claimant.token > newest.token:
            return None
        return UnderstudyError(
            "gms.kv_stale_token",
            f"{claimant.engine} asks for KV memory under token {claimant.token}, but"
            f" {newest.engine} has done so under token {newest.token} of the same era: it has lost"
            " the lock and must exit",
            engine=claimant.engine,
            token=claimant.token,
            newest_token=newest.token,
        )


class Pools:
    """By id; `orphans` as in `KvMachine`."""

    def __init__(self, orphans: Mapping[str, bool]) -> None:
        self.by_id = {
            each: Pool(
                each,
                PoolPhase.ORPHANED,
                has_begun=True,
                is_certain=False,
                discarded="before this server started" if is_discarded else "",
            )
            for each, is_discarded in orphans.items()
        }
        self.discards_total = self.given_up_total = self.recoveries_total = 0

    @property
    def current(self) -> Pool | None:
        """The pool that is lent, or will be."""
        phases = (PoolPhase.KEPT, PoolPhase.MAKING)
        return next((pool for pool in self.by_id.values() if pool.phase in phases), None)

    @property
    def unowned(self) -> list[Pool]:
        """The others, which must end before anything is lent or made."""
        return [pool for pool in self.by_id.values() if pool is not self.current]

    def discard(self, pool: Pool, why: str) -> Effects:
        """Never lend `pool` again; harmless to repeat."""
        if pool.phase not in (PoolPhase.KEPT, PoolPhase.ORPHANED):
            return []
        pool.discarded, pool.adopting = why, None
        if pool.phase is PoolPhase.ORPHANED:  # once it is here
            return [kv.MarkDiscarded(pool.id)]
        pool.turn("discard")
        self.discards_total += 1
        text = f"KV pool {pool.id} is discarded, and never lent again: {why}"
        record = ev.RecordEvent("gms.kv_discarded", text, {"pool": pool.id}, "warning")
        return [kv.MarkDiscarded(pool.id), record]

    def give_up(self, pool: Pool, by: Claimant) -> Effects:
        """Its engine rests: free its memory once no process maps it. One that was discarded before
        is on its way."""
        if pool.phase is not PoolPhase.KEPT:
            return []
        pool.discarded, pool.adopting = f"{by} rests", None
        pool.turn("discard")
        self.given_up_total += 1
        text = f"KV pool {pool.id} is given up: {pool.discarded}"
        data = {"pool": pool.id, "engine": by.engine, "token": by.token}
        return [kv.MarkDiscarded(pool.id), ev.RecordEvent("gms.kv_given_up", text, data)]

    def taken_back(self, pool: Pool) -> Effects:
        """The survivor that brought it may be gone again: the memory is here all the same."""
        offer = pool.offer
        if offer is None:
            raise InvariantError(f"pool {pool.id} came back without an offer")
        other = self.current
        pool.turn("recover")
        pool.returning = pool.offer = None
        pool.size_bytes, pool.index_bytes = offer.size_bytes, offer.index_bytes
        pool.slab_sizes = offer.slab_sizes
        pool.holder = Claimant(offer.engine, offer.incarnation, offer.token, offer.era)
        self.recoveries_total += 1
        text = f"KV pool {pool.id} was handed back by {pool.holder}"
        effects: Effects = [ev.RecordEvent("gms.kv_recovered", text, {"pool": pool.id})]
        if other is not None and not pool.discarded:
            pool.discarded = f"pool {other.id} has replaced it"
        return effects + (self.discard(pool, pool.discarded) if pool.discarded else [])

    def free(self, pool: Pool, *, has_holders: bool) -> Effects:
        """The kernel says that no process holds its file; a session may still be about to."""
        pool.is_watched, pool.pids = False, ()
        pool.is_free = pool.phase is PoolPhase.KEPT and not has_holders
        is_coming = pool.returning is not None or has_holders
        if is_coming or pool.phase not in (PoolPhase.DISCARDED, PoolPhase.ORPHANED):
            return []
        pool.turn("release")
        return [kv.ReleasePool(pool.id)]

    def watch(self, borrowers: Borrowers) -> Effects:
        """Ask the kernel about the files of those pools whose end, or next holder, hangs on it."""
        effects: Effects = []
        for pool in self.by_id.values():
            is_idle = not borrowers.holders_of(pool.id)
            wanted = {
                PoolPhase.ORPHANED: pool.returning is None,
                PoolPhase.DISCARDED: is_idle,
                PoolPhase.KEPT: is_idle and bool(borrowers.waiting),
            }.get(pool.phase, False)
            if wanted is not pool.is_watched:
                pool.is_watched = wanted
                effects.append(kv.WatchPool(pool.id) if wanted else kv.UnwatchPool(pool.id))
        return effects
