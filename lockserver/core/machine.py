"""The lock server without sockets: locks, supervisors, one token. Events in, effects out.

Theory of operation. A supervisor's `want` is the whole truth about it; `_wanted` makes the locks
agree with it. When a holder is lost (its want no longer names the lock, its connection closed, its
process ended, it fell silent), `evidence.probes_due` names its witness exactly when finding that
witness free would end the matter; the shell tries it and says `WitnessFree`. After every event the
ledger chooses the next grant, which is made once it is on disk.

A `Supervisor` record lasts from its first `want` until its process is gone (by pidfd; where there
is none, until its connection closes). That is what makes a second supervisor of the same engine
visible, and its absence is what makes a dead holder's witness decisive.

Rules that are here because leaving them out broke an invariant in the model: the newest connection
of a supervisor replaces the older ones, in whatever order they are read; an incarnation that is no
longer named has been reaped; a claim with a token is believed only where the state file could not
be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import singledispatchmethod

from lockserver.core import evidence, patience, sentences
from lockserver.core.events import (
    Announce,
    Beaten,
    Close,
    ConnectionClosed,
    DirectoryScanned,
    Effect,
    Forget,
    Holder,
    Input,
    Lend,
    Persisted,
    PersistFailed,
    ProcessGone,
    Record,
    Refuse,
    SendGrant,
    SwitchOverAsked,
    Tick,
    Wanted,
    WitnessFree,
)
from lockserver.core.ledger import Ledger
from lockserver.core.lock import Lock, LockState, Signal
from lockserver.core.queue import Waiter
from lockserver.core.roster import check_identity, holds_any, twins_of
from lockserver.core.supervisor import Supervisor
from lockserver.core.switchover import Switchovers
from lockserver.core.wants import check_want
from lockserver.witness import Probe, WitnessFile
from plumbing.errors import InvariantError

KINDS: Mapping[str, bool] = {"active": True, "loader": False}  # name → is it fenced

SILENT_MS = 3000.0
WINDOW_MS = 10_000.0


class Machine:
    """All locks of one directory."""

    def __init__(
        self,
        record: Record,
        now_ms: float,
        *,
        kinds: Mapping[str, bool] = KINDS,
        silent_ms: float = SILENT_MS,
        window_ms: float = WINDOW_MS,
    ) -> None:
        """Start from what is on disk: a holder on file is `recovering` until it is heard."""
        self.ledger = Ledger(record)
        self.silent_ms, self.window_ms = silent_ms, window_ms
        self.started_ms = self._ticked_ms = now_ms
        self.locks = {name: Lock(name, is_fenced) for name, is_fenced in kinds.items()}
        self.supervisors: dict[str, Supervisor] = {}
        self._speakers: dict[int, Supervisor] = {}  # by connection: a beat must not look at all
        self.switchovers = Switchovers()
        for name, lock in self.locks.items():
            holder = record.holders.get(name)
            if holder is not None or name in record.unknown:
                lock.state, lock.holder = LockState.RECOVERING, holder

    def handle(self, event: Input, now_ms: float) -> list[Effect]:
        """Take one event; the effects are to be carried out at once and in order.

        A `Persist` is always the last one; its outcome is the next event.
        """
        if self.ledger.is_writing and not isinstance(event, Persisted | PersistFailed):
            raise InvariantError(f"{type(event).__name__} while a grant is being written")
        effects = list(_handler_of(type(event))(self, event, now_ms))
        effects += self.switchovers.observe(self.locks, now_ms)
        return effects + self.ledger.next_write(self.locks, self.supervisors, now_ms)

    def begin(self, leftovers: Iterable[WitnessFile] = ()) -> list[Effect]:
        """What is to be said at start; `leftovers` are sealed witnesses of an earlier server."""
        for witness in leftovers:
            self.ledger.end(witness)
        locks = self.locks.values()
        return [sentences.recovering(k) for k in locks if k.state is LockState.RECOVERING]

    @singledispatchmethod
    def _on(self, event: Input, now_ms: float) -> Iterable[Effect]:
        raise InvariantError(f"unknown event {event!r}")

    # ------------------------------------------------------------------ a supervisor speaks

    @_on.register
    def _wanted(self, want: Wanted, now_ms: float) -> Iterable[Effect]:
        refusal = check_want(want, self.locks) or check_identity(
            want, self._speakers.get(want.conn), self.locks, self.supervisors
        )
        if refusal is not None:
            yield refusal
            return
        known = self.supervisors.get(want.supervisor)
        if known is not None and abs(want.conn) < abs(known.newest):
            yield Close(want.conn, "a newer connection has replaced this one")
            return  # what it says was true before what the newer one said
        yield from self._evict_twins(want)
        is_first = known is None or known.conn != want.conn
        if known is not None and known.conn is not None and is_first:
            yield Close(known.conn, "a newer connection replaces this one")
        supervisor = self._enrol(want, now_ms)
        yield from self._heard(supervisor, now_ms)
        yield from self._end_what_is_not_named(supervisor, now_ms)
        refused = False
        for lock in self._wanted_locks(want):
            for effect in self._ask(lock, want, refused, now_ms):
                refused = refused or isinstance(effect, Refuse)
                yield effect
        if refused:
            self._leave_queues(supervisor.id)
            if known is None and not holds_any(supervisor.id, self.locks):
                yield from self._drop(supervisor)  # it was never one of ours
        elif is_first:
            yield Lend(want.conn)
            yield from self._tell_who_holds(supervisor)

    def _evict_twins(self, want: Wanted) -> Iterable[Effect]:
        """A holder that returns late is in the right; who took its engine's id must leave."""
        for twin in twins_of(want, self.supervisors):
            if twin.conn is not None:
                yield sentences.engine_id_taken(twin.conn, want.engine, want.pid)
            yield from self._drop(twin)

    def _enrol(self, want: Wanted, now_ms: float) -> Supervisor:
        """The supervisor's record, made to say what its `want` says."""
        supervisor = self.supervisors.get(want.supervisor)
        if supervisor is None:
            supervisor = Supervisor(want.supervisor, want.engine, since_ms=now_ms, heard_ms=now_ms)
            self.supervisors[supervisor.id] = supervisor
        if supervisor.witness is not None and supervisor.incarnation != want.incarnation:
            self.ledger.end(supervisor.witness)
        if supervisor.conn != want.conn:
            supervisor.progress = -1
            self._hang_up(supervisor)
            self._speakers[want.conn] = supervisor
        supervisor.adopt(want)
        return supervisor

    def _end_what_is_not_named(self, supervisor: Supervisor, now_ms: float) -> Iterable[Effect]:
        """What this truth no longer names is over: places in queues, and locks once proven."""
        for lock in self.locks.values():
            lock.waiters = [
                waiter
                for waiter in lock.waiters
                if waiter.supervisor != supervisor.id
                or (waiter.incarnation == supervisor.incarnation and lock.name in supervisor.locks)
            ]
            holder = lock.holder
            if holder is None or holder.supervisor != supervisor.id or lock.is_ended:
                continue
            if holder.incarnation != supervisor.incarnation or lock.name not in supervisor.locks:
                yield from self._lose(lock, Signal.NOT_WANTED, now_ms)

    def _wanted_locks(self, want: Wanted) -> list[Lock]:
        """What it holds first: a refusal for another lock must not leave a holder unheard."""

        def is_elsewhere(lock: Lock) -> bool:
            return lock.holder is None or lock.holder.incarnation != want.incarnation

        return sorted((self.locks[name] for name in want.locks), key=is_elsewhere)

    def _ask(self, lock: Lock, want: Wanted, refused: bool, now_ms: float) -> Iterable[Effect]:
        """One wanted lock: the same grant again, a claim, a place in the queue, or a refusal."""
        assert want.incarnation is not None  # checked: no lock is wanted without one
        claimed, holder = want.tokens.get(lock.name), lock.holder
        is_proven = want.witness_file is not None and want.witness_state is Probe.HELD
        is_its_own = holder is not None and holder.incarnation == want.incarnation
        if is_its_own and not lock.is_ended:
            yield from self._confirm(lock, want.conn, now_ms)
        elif refused:
            return  # the connection is about to close: one reason is enough
        elif is_its_own:
            yield sentences.incarnation_ended(lock, want)
        elif claimed is not None and lock.is_unknown and is_proven:
            yield from self._accept_claim(lock, want, claimed, now_ms)
        elif claimed is not None:
            yield sentences.stale_claim(lock, want, claimed)
        elif want.witness_file is None or (lock.is_fenced and not is_proven):
            yield sentences.unproven(lock, want)
        elif not any(waiter.supervisor == want.supervisor for waiter in lock.waiters):
            waiter = Waiter(want.supervisor, want.engine, want.incarnation, now_ms)
            lock.waiters.append(waiter)
            yield sentences.queued(lock, waiter)

    def _confirm(self, lock: Lock, conn: int, now_ms: float) -> Iterable[Effect]:
        was_held, holder = lock.state is LockState.HELD, lock.holder
        assert holder is not None
        lock.fire(Signal.CONFIRMED, now_ms)
        yield SendGrant(conn, lock.name, holder)
        if not was_held:  # who came meanwhile has not been told who holds it
            yield Announce(lock.name, holder)
            yield sentences.confirmed(lock, holder)
            yield from self.switchovers.remind(lock, conn)

    def _accept_claim(
        self, lock: Lock, want: Wanted, token: int, now_ms: float
    ) -> Iterable[Effect]:
        """The state file is lost, and here is a living incarnation that knows its token."""
        assert want.incarnation is not None
        assert want.witness_file is not None
        holder = Holder(
            engine=want.engine,
            incarnation=want.incarnation,
            supervisor=want.supervisor,
            witness=want.witness_file,
            token=token,
            since_mono_ms=now_ms,
            lease=want.lease,
        )
        lock.fire(Signal.CLAIMED, now_ms, holder)
        self.ledger.claim(token)
        yield SendGrant(want.conn, lock.name, holder)
        yield Announce(lock.name, holder)
        yield sentences.claimed(lock, holder)

    def _tell_who_holds(self, supervisor: Supervisor) -> Iterable[Effect]:
        assert supervisor.conn is not None
        for lock in self.locks.values():
            holder = lock.holder
            if lock.state is LockState.HELD and holder and holder.supervisor != supervisor.id:
                yield SendGrant(supervisor.conn, lock.name, holder)

    # ------------------------------------------------------------------ signs of life and death

    @_on.register
    def _beaten(self, beat: Beaten, now_ms: float) -> Iterable[Effect]:
        supervisor = self._speakers.get(beat.conn)
        if supervisor is None:
            why = "a supervisor says `want` before it beats"
            return [Refuse(beat.conn, "lock.want_first", why)]
        if beat.progress == supervisor.progress:
            return []  # the same count again: whatever sends it does not work any more
        supervisor.progress = beat.progress
        return self._heard(supervisor, now_ms)

    def _hang_up(self, supervisor: Supervisor) -> None:
        """It has no connection any more, or not the one that it had."""
        if supervisor.conn is not None:
            del self._speakers[supervisor.conn]
            supervisor.conn = None

    def _heard(self, supervisor: Supervisor, now_ms: float) -> list[Effect]:
        supervisor.heard_ms = now_ms
        was_silent, supervisor.is_silent = supervisor.is_silent, False
        return [sentences.heard(supervisor)] if was_silent else []

    @_on.register
    def _connection_closed(self, event: ConnectionClosed, now_ms: float) -> Iterable[Effect]:
        supervisor = self._speakers.get(event.conn)
        if supervisor is None:
            return
        self._hang_up(supervisor)
        self._leave_queues(supervisor.id)
        if not supervisor.has_process:  # nothing else stands for it
            yield from self._drop(supervisor)
        yield from self._lose_all(supervisor, Signal.CONNECTION_CLOSED, now_ms)

    @_on.register
    def _process_gone(self, event: ProcessGone, now_ms: float) -> Iterable[Effect]:
        supervisor = self.supervisors.get(event.supervisor)
        if supervisor is None:
            return
        if supervisor.conn is not None:  # a stray copy in another process may keep it open
            yield Close(supervisor.conn, "its supervisor's process has ended")
        if supervisor.witness is not None:
            self.ledger.end(supervisor.witness)
        yield from self._drop(supervisor)
        yield from self._lose_all(supervisor, Signal.PROCESS_GONE, now_ms)

    def _drop(self, supervisor: Supervisor) -> Iterable[Effect]:
        self._leave_queues(supervisor.id)
        self._hang_up(supervisor)
        del self.supervisors[supervisor.id]
        yield Forget(supervisor.id)

    def _leave_queues(self, supervisor_id: str) -> None:
        for lock in self.locks.values():
            lock.waiters = [w for w in lock.waiters if w.supervisor != supervisor_id]

    def _lose_all(self, supervisor: Supervisor, signal: Signal, now_ms: float) -> Iterable[Effect]:
        for lock in self.locks.values():
            if lock.holder is not None and lock.holder.supervisor == supervisor.id:
                yield from self._lose(lock, signal, now_ms)

    def _lose(self, lock: Lock, signal: Signal, now_ms: float) -> Iterable[Effect]:
        holder, was_held = lock.holder, lock.state is LockState.HELD
        assert holder is not None
        lock.fire(signal, now_ms)
        if was_held or signal is Signal.NOT_WANTED:
            yield sentences.releasing(lock, holder)
        if not lock.is_fenced and (lock.is_ended or holder.supervisor not in self.supervisors):
            yield from self._free(lock, now_ms)

    # ------------------------------------------------------------------ evidence

    @_on.register
    def _witness_free(self, event: WitnessFree, now_ms: float) -> Iterable[Effect]:
        lock = self.locks[event.lock]
        holder = lock.holder
        if holder is None or holder.incarnation != event.incarnation:
            return
        if not evidence.is_decisive(lock, self.supervisors):
            return
        if lock.state is LockState.HELD:
            yield sentences.dead_in_silence(lock, holder, now_ms)
        yield from self._free(lock, now_ms)

    @_on.register
    def _directory_scanned(self, event: DirectoryScanned, now_ms: float) -> Iterable[Effect]:
        for name in evidence.scan_frees(self.locks, self.supervisors, event.held):
            yield from self._free(self.locks[name], now_ms)

    def _free(self, lock: Lock, now_ms: float) -> Iterable[Effect]:
        holder = lock.holder
        lock.fire(Signal.EVIDENCE_GONE, now_ms)
        if holder is not None:
            supervisor = self.supervisors.get(holder.supervisor)
            if supervisor is None or supervisor.incarnation != holder.incarnation:
                self.ledger.end(holder.witness)
        yield sentences.freed(lock, holder)

    @_on.register
    def _switch_over_asked(self, asked: SwitchOverAsked, now_ms: float) -> Iterable[Effect]:
        return self.switchovers.begin(asked, self.locks, self.supervisors, now_ms)

    # ------------------------------------------------------------------ the disk, and time

    @_on.register
    def _persisted(self, event: Persisted, now_ms: float) -> Iterable[Effect]:
        return self.ledger.written(self.locks, self.supervisors, now_ms)

    @_on.register
    def _persist_failed(self, event: PersistFailed, now_ms: float) -> Iterable[Effect]:
        return self.ledger.failed(event.reason, now_ms)

    @_on.register
    def _tick(self, event: Tick, now_ms: float) -> Iterable[Effect]:
        gap_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        if gap_ms > patience.STALL_MS:
            patience.forgive(self.supervisors, now_ms)
        yield from patience.fall_silent(self.locks, self.supervisors, now_ms - self.silent_ms)
        yield from patience.report_overdue(self.locks, now_ms, self.started_ms + self.window_ms)


# A singledispatchmethod makes a function anew at each call: a fifth of what an event costs.
_handler_of = Machine.__dict__["_on"].dispatcher.dispatch
