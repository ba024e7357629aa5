"""The lock server without sockets: locks, supervisors, one token. Events in, effects out.

A supervisor's `want` is its complete state; `wanted` makes the locks agree
with it. When a holder is lost (its want no longer names the lock, its connection closed, its
process ended, it fell silent), `recovery.evidence_due` names its witness exactly when finding that
witness free would settle the matter, and the serving file of a holder that says that it handed over
and lives; the shell tries them and calls `evidence_gone`. Of an engine on another host its lease is
the evidence, which the machine has itself (`leases.py`).
After every event the ledger makes the next grants, each once it is on disk.

Rules that are here because leaving them out broke an invariant in the model: the newest message of
a supervisor counts, in whatever order its connections are read; an incarnation that is no longer
named has been reaped; a claim with a token is believed only where the state file could not
be read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Concatenate, ParamSpec

from lockserver.core import events as ev
from lockserver.core import recovery, sentences
from lockserver.core.events import Holder, LockEffect, SwitchOverAsked, Wanted
from lockserver.core.leases import Leases
from lockserver.core.lock import Lock, LockState, Signal, Waiter, locks_of
from lockserver.core.names import WitnessState
from lockserver.core.supervisors import (
    LEASE,
    Locks,
    SupervisorRecord,
    Supervisors,
    end_of,
    engine_id_taken,
    holder_of,
    holds_any,
    next_of,
    refuse,
    twins_of,
)
from lockserver.core.switchover import Switchovers, tell_holder, tell_standbys
from lockserver.messages import RenewedMsg

SILENT_MS = 3000.0
WINDOW_MS = 10_000.0
RETRY_MS = 1000.0  # a grant that cannot be written is tried again this often

# Puts the record on disk and returns; a sentence says why it may not be there.
Write = Callable[[ev.LockRecord], str | None]


class Ledger:
    """The token, and the only way to a grant: it is chosen, written, and only then made and sent,
    so what is on disk is never behind what was sent. After a write that fails, the grant is chosen
    again a second later.

    The surprising thing: the same token may be written twice for different engines, if the first
    write failed; it was never sent, so no engine has seen it.
    """

    def __init__(self, record: ev.LockRecord, write: Write) -> None:
        self.token, self.era = record.token, record.era
        self.problem: str | None = None  # why grants cannot be written, and since when
        self.problem_ms = 0.0
        self._write = write
        self._writes_due = 0  # without a grant: the record on disk is behind
        self._retry_ms = 0.0

    def claim(self, token: int) -> None:
        """A living holder has shown the token that a lost file did not have.

        The next one may have been granted and lost with the file, so it is skipped. Written twice:
        if only the newest slot had it, losing that slot would lose it again.
        """
        self.token, self._writes_due = max(self.token, token + 1), 2

    def reach(self, token: int) -> None:
        """This token is over, according to a serving file or to whom it was granted."""
        self.token = max(self.token, token)

    def write_next(
        self, locks: Locks, supervisors: Supervisors, now_ms: float
    ) -> list[LockEffect] | None:
        """Make the next grant, or only write what is true; None: there is nothing to write now."""
        if self.problem is not None and now_ms < self._retry_ms:
            return None
        granted = next(self._grants(locks, supervisors, now_ms), None)
        if granted is None and self._writes_due == 0:
            return None
        problem = self._write(self._record(locks, granted))
        if problem is not None:
            return self._failed(problem, now_ms)
        self._writes_due = max(0, self._writes_due - 1)
        effects: list[LockEffect] = []
        if self.problem is not None:
            self.problem = None
            effects.append(ev.Happened("lock.write_recovered", "grants can be written again"))
        if granted is not None:
            effects += self._make(*granted, supervisors, now_ms)
        return effects

    def _grants(
        self, locks: Locks, supervisors: Supervisors, now_ms: float
    ) -> Iterator[tuple[Lock, Waiter, Holder]]:
        """Those that can be made."""
        for lock in locks.values():
            waiter = next_of(lock, supervisors) if lock.state is LockState.FREE else None
            if waiter is not None:
                want = supervisors[waiter.supervisor].want
                yield lock, waiter, holder_of(want, self.token + 1, now_ms)

    def _record(self, locks: Locks, granted: tuple[Lock, Waiter, Holder] | None) -> ev.LockRecord:
        holders = {lock.name: lock.holder for lock in locks.values() if lock.holder is not None}
        token = self.token
        if granted is not None:
            lock, _, holder = granted
            holders[lock.name], token = holder, holder.token
        unknown = frozenset(lock.name for lock in locks.values() if lock.is_unknown)
        return ev.LockRecord(token, holders, unknown, self.era)

    def _make(
        self, lock: Lock, waiter: Waiter, holder: Holder, supervisors: Supervisors, now_ms: float
    ) -> Iterable[LockEffect]:
        event = sentences.granted(lock, holder, waiter, now_ms)
        lock.fire(Signal.GRANTED, now_ms, holder)
        lock.waiters.remove(waiter)
        self.token = holder.token
        conn = supervisors[holder.supervisor].conn
        assert conn is not None  # a closed connection leaves the queue
        message = ev.grant_of(lock.name, holder, self.era)
        yield ev.Send(conn, message)
        yield ev.Announce(holder.supervisor, message)
        yield event

    def _failed(self, reason: str, now_ms: float) -> list[LockEffect]:
        """Nothing was written, or perhaps it was: nothing is sent."""
        is_new = self.problem is None
        self.problem = f"grants cannot be written: {reason}; retrying every second"
        self._retry_ms = now_ms + RETRY_MS
        if not is_new:
            return []
        self.problem_ms = now_ms
        return [ev.Happened("lock.write_failed", self.problem, "error")]


P = ParamSpec("P")
On = Callable[Concatenate["LockMachine", float, P], Iterable[LockEffect]]


def entry(on: On[P]) -> Callable[Concatenate[LockMachine, float, P], list[LockEffect]]:
    """What the shell calls, with the time first, when this has happened. The effects must be
    carried out at once and in order; what they send is on disk."""

    @functools.wraps(on)
    def happen(
        self: LockMachine, now_ms: float, /, *said: P.args, **named: P.kwargs
    ) -> list[LockEffect]:
        effects: list[LockEffect] = []
        news: Iterable[LockEffect] | None = on(self, now_ms, *said, **named)
        while news is not None:
            effects += news
            effects += self.switchovers.observe(self.locks, now_ms)
            effects += self._free_expired(now_ms)  # afterwards: a switchover must see its release
            effects += tell_standbys(self.locks, self.supervisors, self.ledger.era)
            news = self.ledger.write_next(self.locks, self.supervisors, now_ms)
        return effects

    return happen


class LockMachine:
    """All locks of one directory."""

    def __init__(
        self,
        record: ev.LockRecord,
        write: Write,
        now_ms: float,
        *,
        models: Sequence[str] = (),
        silent_ms: float = SILENT_MS,
        window_ms: float = WINDOW_MS,
        leases: Leases | None = None,
    ) -> None:
        """Start from the record on disk: its holders are `recovering` until they reconnect. `write`
        puts the next one there. `models`: each has a lock; without any, the pod has one. `leases`:
        of engines on other hosts."""
        self.ledger = Ledger(record, write)
        self.silent_ms, self.window_ms = silent_ms, window_ms
        self.started_ms = self._ticked_ms = now_ms
        self.locks = {name: Lock(name) for name in locks_of(models, record)}
        self.supervisors: dict[str, SupervisorRecord] = {}
        self._by_conn: dict[int, SupervisorRecord] = {}  # heartbeats must not scan
        self.switchovers = Switchovers()
        self.leases = leases or Leases(now_ms)
        for lock in recovery.restore(self.locks.values(), record):
            if lock.holder is not None:
                self.leases.presume(lock.holder, now_ms)

    def begin(self) -> list[LockEffect]:
        """The events to record at start."""
        locks = self.locks.values()
        return [
            sentences.of_wait("lock.recovering", k)
            for k in locks
            if k.state is LockState.RECOVERING
        ]

    @entry
    def switch_over_asked(self, now_ms: float, asked: SwitchOverAsked) -> Iterable[LockEffect]:
        return self.switchovers.begin(asked, self.locks, self.supervisors, now_ms)

    # ------------------------------------------------------------------ a supervisor's want

    @entry
    def wanted(self, now_ms: float, want: Wanted) -> Iterable[LockEffect]:
        sender = self._by_conn.get(want.conn)
        refusal = None
        if want.process == LEASE:
            want, refusal = self.leases.vouched(want), self.leases.refuse(want, now_ms)
        now = self.locks, self.supervisors, self.ledger.token
        refusal = refusal or refuse(want, sender, *now)
        if refusal is not None:
            yield refusal
            return
        known = self.supervisors.get(want.msg.supervisor)
        if known is not None and known.has_outrun(want):
            yield ev.Close(want.conn, "a newer connection replaces this one")
            return  # it was sent before what the newer connection sent
        yield from self._evict_twins(want)
        is_first = known is None or known.conn != want.conn
        if known is not None and known.conn is not None and is_first:
            yield ev.Close(known.conn, "a newer connection replaces this one")
        supervisor = self._enrol(want, now_ms)
        if supervisor.is_leased:
            yield self._renew(supervisor, now_ms)
        self.ledger.reach(want.msg.over)  # it may be lost with the file
        yield from self._mark_heard(supervisor, now_ms)
        yield from self._end_unnamed(supervisor, now_ms)
        effects = list(self._ask(want, now_ms)) if want.msg.is_wanted else []
        yield from effects
        if any(isinstance(each, ev.RefuseConnection) for each in effects):
            self._leave_queue(supervisor)
            if known is None and not holds_any(supervisor.id, self.locks):
                yield from self._drop(supervisor)  # it was never accepted
        elif is_first:
            yield from tell_holder(supervisor, self.locks, self.supervisors, self.ledger.era)

    def _evict_twins(self, want: Wanted) -> Iterable[LockEffect]:
        """A holder that returns late stays; a supervisor that took its engine's id must leave."""
        for twin in twins_of(want, self.supervisors):
            if twin.conn is not None:
                taken = engine_id_taken(want.msg.engine, want.pid)
                yield ev.RefuseConnection(twin.conn, *taken)
            yield from self._drop(twin)

    def _enrol(self, want: Wanted, now_ms: float) -> SupervisorRecord:
        """The supervisor's record, updated from its `want`."""
        supervisor = self.supervisors.get(want.msg.supervisor)
        if supervisor is None:
            supervisor = SupervisorRecord(want, now_ms)
            self.supervisors[supervisor.id] = supervisor
        if supervisor.conn != want.conn:
            self._hang_up(supervisor)
            self._by_conn[want.conn] = supervisor
        supervisor.adopt(want)
        return supervisor

    def _end_unnamed(self, supervisor: SupervisorRecord, now_ms: float) -> Iterable[LockEffect]:
        """Give up what this want no longer names: places in queues, and locks once proven."""
        lock = self.locks[supervisor.lock]
        lock.remove_waiter(
            supervisor.id, but=supervisor.incarnation if supervisor.may_wait else None
        )
        if lock.holder is not None and lock.holder.supervisor == supervisor.id:
            signal = end_of(lock, lock.holder, supervisor)
            if signal is not None:
                yield from self._lose(lock, signal, now_ms)

    def _ask(self, want: Wanted, now_ms: float) -> Iterable[LockEffect]:
        """The wanted lock: repeat its grant, accept a claim, queue it, or refuse."""
        assert want.msg.incarnation is not None  # checked: no lock is wanted without one
        lock, claimed = self.locks[want.msg.lock], want.msg.token
        is_proven = want.witness_file is not None and want.witness_state is WitnessState.HELD
        is_its_own = lock.is_held_by(want.msg.incarnation)
        is_waiting = any(each.supervisor == want.msg.supervisor for each in lock.waiters)
        if is_its_own and not lock.is_ended:
            yield from self._confirm(lock, want.conn, now_ms)
        elif is_its_own and not (lock.is_handed_over and want.msg.over):
            yield sentences.incarnation_ended(lock, want)
        elif claimed and lock.is_unknown and is_proven:
            yield from self._claim(lock, want, claimed, now_ms)
        elif claimed:
            yield sentences.stale_claim(lock, want, claimed)
        elif not is_proven:
            yield sentences.unproven(lock, want)
        elif not (want.msg.is_leaving or is_waiting):
            waiter = Waiter(want.msg.supervisor, want.msg.engine, want.msg.incarnation, now_ms)
            lock.waiters.append(waiter)
            yield sentences.of_holder("lock.queue", lock, waiter)

    def _confirm(self, lock: Lock, conn: int, now_ms: float) -> Iterable[LockEffect]:
        was_held, holder = lock.state is LockState.HELD, lock.holder
        assert holder is not None
        lock.fire(Signal.CONFIRMED, now_ms)
        grant = ev.grant_of(lock.name, holder, self.ledger.era)
        yield ev.Send(conn, grant)
        if not was_held:  # supervisors that connected meanwhile have not been sent the holder
            yield ev.Announce(holder.supervisor, grant)
            yield sentences.of_holder("lock.confirmed", lock, holder)
            yield from self.switchovers.remind(lock, conn)

    def _claim(self, lock: Lock, want: Wanted, token: int, now_ms: float) -> Iterable[LockEffect]:
        """The state file is lost, and a living incarnation knows its token."""
        holder = holder_of(want, token, now_ms)
        lock.fire(Signal.CLAIMED, now_ms, holder)
        self.ledger.claim(token)
        grant = ev.grant_of(lock.name, holder, self.ledger.era)
        yield ev.Send(want.conn, grant)
        yield ev.Announce(holder.supervisor, grant)
        yield sentences.of_holder("lock.claimed", lock, holder)

    # ------------------------------------------------------------------ heartbeats and losses

    @entry
    def beaten(self, now_ms: float, conn: int, progress: int) -> Iterable[LockEffect]:
        supervisor = self._by_conn.get(conn)
        if supervisor is None:
            why = "a supervisor must send `want` before its first heartbeat"
            return [ev.RefuseConnection(conn, "lock.want_first", why)]
        if progress <= supervisor.progress:
            return []  # the same count again: the sender no longer makes progress
        supervisor.progress = progress
        heard = self._mark_heard(supervisor, now_ms)
        return [self._renew(supervisor, now_ms), *heard] if supervisor.is_leased else heard

    def _renew(self, supervisor: SupervisorRecord, now_ms: float) -> ev.Send:
        """Over TCP: answer the message that carried `progress`; its sender's lease restarts."""
        assert supervisor.conn is not None
        who = supervisor.engine, supervisor.id, supervisor.incarnation
        lease_ms = self.leases.renew(*who, now_ms)
        return ev.Send(supervisor.conn, RenewedMsg(supervisor.progress, lease_ms))

    def _hang_up(self, supervisor: SupervisorRecord) -> None:
        """Forget its connection: it closed, or another one replaces it."""
        if supervisor.conn is not None:
            del self._by_conn[supervisor.conn]
            supervisor.conn = None

    def _mark_heard(self, supervisor: SupervisorRecord, now_ms: float) -> list[LockEffect]:
        supervisor.heard_ms = now_ms
        was_silent, supervisor.is_silent = supervisor.is_silent, False
        return [sentences.of_supervisor("lock.heard", supervisor)] if was_silent else []

    @entry
    def connection_closed(self, now_ms: float, conn: int) -> Iterable[LockEffect]:
        supervisor = self._by_conn.get(conn)
        if supervisor is None:
            return
        self._hang_up(supervisor)
        self._leave_queue(supervisor)
        if not supervisor.has_process and not self.leases.of(supervisor.id):
            # The connection was all that proved it alive.
            yield from self._drop(supervisor)
        yield from self._lose_its(supervisor, Signal.CONNECTION_CLOSED, now_ms)

    @entry
    def process_gone(self, now_ms: float, supervisor: str) -> Iterable[LockEffect]:
        """The pidfd of a supervisor has become readable."""
        return self._end(supervisor, now_ms)

    def _end(self, supervisor_id: str, now_ms: float) -> Iterable[LockEffect]:
        supervisor = self.supervisors.get(supervisor_id)
        if supervisor is None:
            return
        if supervisor.conn is not None:  # a copy in another process may keep it open
            yield ev.Close(supervisor.conn, "its supervisor's process has exited")
        yield from self._drop(supervisor)
        yield from self._lose_its(supervisor, Signal.PROCESS_GONE, now_ms)

    def _drop(self, supervisor: SupervisorRecord) -> Iterable[LockEffect]:
        self._leave_queue(supervisor)
        self._hang_up(supervisor)
        del self.supervisors[supervisor.id]
        yield ev.Forget(supervisor.id)

    def _leave_queue(self, supervisor: SupervisorRecord) -> None:
        self.locks[supervisor.lock].remove_waiter(supervisor.id)

    def _lose_its(
        self, supervisor: SupervisorRecord, signal: Signal, now_ms: float
    ) -> Iterable[LockEffect]:
        lock = self.locks[supervisor.lock]
        if lock.holder is not None and lock.holder.supervisor == supervisor.id:
            yield from self._lose(lock, signal, now_ms)

    def _lose(self, lock: Lock, signal: Signal, now_ms: float) -> Iterable[LockEffect]:
        holder, was_held = lock.holder, lock.state is LockState.HELD
        assert holder is not None
        lock.fire(signal, now_ms)
        if was_held or signal in (Signal.NOT_WANTED, Signal.HANDED_OVER):
            yield sentences.releasing(lock, holder, lock.cause, lock.lost_ms)

    # ------------------------------------------------------------------ evidence

    @entry
    def evidence_gone(self, now_ms: float, evidence: recovery.DueEvidence) -> Iterable[LockEffect]:
        """A file that was due was found free and has been sealed."""
        if evidence in recovery.evidence_due(self.locks, self.supervisors):
            yield from self._free(self.locks[evidence.lock], now_ms)

    def _free_expired(self, now_ms: float) -> Iterable[LockEffect]:
        """Free the locks of holders whose lease was the evidence, and is over."""
        for lock in self.locks.values():
            is_gone = lock.holder is not None and self.leases.is_gone(lock.holder)
            if is_gone and recovery.is_decisive(lock, self.supervisors):
                yield from self._free(lock, now_ms)

    @entry
    def directory_scanned(
        self, now_ms: float, held: Collection[str], serving: Collection[str] = (), sealed: int = 0
    ) -> Iterable[LockEffect]:
        """The witnesses and serving files in the directory that are held. Unknown witnesses that
        are free have been sealed, and so have serving files, at `sealed`, if one look could settle
        it."""
        self.ledger.reach(sealed)
        for name in recovery.scan_frees(self.locks, self.supervisors, held, serving):
            yield from self._free(self.locks[name], now_ms)

    def _free(self, lock: Lock, now_ms: float) -> Iterable[LockEffect]:
        holder, is_handed_over = lock.holder, lock.is_handed_over
        if holder is not None and lock.state is LockState.HELD:
            yield sentences.releasing(lock, holder, "silent", now_ms)
        lock.fire(Signal.EVIDENCE_GONE, now_ms)
        yield sentences.freed(lock, holder, is_handed_over=is_handed_over)

    # ------------------------------------------------------------------ time

    @entry
    def time_passed(self, now_ms: float) -> Iterable[LockEffect]:
        """Called several times per `silent_ms`."""
        gap_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        is_stalled = gap_ms > recovery.STALL_MS
        if is_stalled:
            recovery.forgive(self.supervisors, now_ms)
        for lease in self.leases.tick(now_ms, is_stalled=is_stalled):
            yield sentences.of_supervisor("lock.lease_expired", lease)
            yield from self._end(lease.supervisor, now_ms)
        yield from recovery.fall_silent(self.locks, self.supervisors, now_ms - self.silent_ms)
        yield from recovery.report_overdue(self.locks, now_ms, self.started_ms + self.window_ms)
