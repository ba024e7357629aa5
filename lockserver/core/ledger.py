"""The token, the next grant, and the one write under way.

A grant is chosen, written, and only then made: `next_write` chooses it and returns what must be on
disk; `written` makes it and sends it. In between nothing else may happen, so what is on disk is
never behind what was sent. After a write that fails, the grant is chosen again a second later.

The surprising thing: the same token may be written twice for different engines, if the first write
failed; it was never sent, so no engine has seen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lockserver.core import events as ev
from lockserver.core import sentences
from lockserver.core.events import Holder, LockEffect
from lockserver.core.lock import Lock, LockState, Signal, Waiter
from lockserver.core.supervisors import Locks, Supervisors, holder_of, next_of

RETRY_MS = 1000.0  # a grant that cannot be written is tried again this often


@dataclass(frozen=True, slots=True)
class _Grant:
    lock: Lock
    holder: Holder
    waiter: Waiter


class Ledger:
    """What is on disk and what will be next."""

    def __init__(self, record: ev.LockRecord) -> None:
        self.token, self.era = record.token, record.era
        self.problem: str | None = None  # why grants cannot be written, and since when
        self.problem_ms = 0.0
        self.is_writing = False
        self._grant: _Grant | None = None
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

    def next_write(self, locks: Locks, supervisors: Supervisors, now_ms: float) -> list[LockEffect]:
        """Choose the next grant, or nothing: what must be on disk before it is made."""
        if self.is_writing or (self.problem is not None and now_ms < self._retry_ms):
            return []
        self._grant = self._choose(locks, supervisors, now_ms)
        if self._grant is None and self._writes_due == 0:
            return []
        self.is_writing = True
        return [ev.Persist(self._record(locks))]

    def _choose(self, locks: Locks, supervisors: Supervisors, now_ms: float) -> _Grant | None:
        for lock in locks.values():
            if lock.state is not LockState.FREE:
                continue
            waiter = next_of(lock, supervisors)
            if waiter is None:
                continue
            want = supervisors[waiter.supervisor].want
            holder = holder_of(want, self.token + 1, now_ms)
            return _Grant(lock, holder, waiter)
        return None

    def _record(self, locks: Mapping[str, Lock]) -> ev.LockRecord:
        holders = {lock.name: lock.holder for lock in locks.values() if lock.holder is not None}
        token = self.token
        if self._grant is not None:
            holders[self._grant.lock.name] = self._grant.holder
            token = self._grant.holder.token
        return ev.LockRecord(
            token, holders, frozenset(k.name for k in locks.values() if k.is_unknown), self.era
        )

    def written(self, supervisors: Supervisors, now_ms: float) -> Iterable[LockEffect]:
        """The record is on disk: make the grant."""
        self.is_writing = False
        self._writes_due = max(0, self._writes_due - 1)
        if self.problem is not None:
            self.problem = None
            yield ev.Happened("lock.write_recovered", "grants can be written again")
        grant, self._grant = self._grant, None
        if grant is not None:
            yield from self._make(grant, supervisors, now_ms)

    def _make(self, grant: _Grant, supervisors: Supervisors, now_ms: float) -> Iterable[LockEffect]:
        lock, holder = grant.lock, grant.holder
        event = sentences.granted(lock, holder, grant.waiter, now_ms)
        lock.fire(Signal.GRANTED, now_ms, holder)
        lock.waiters.remove(grant.waiter)
        self.token = holder.token
        conn = supervisors[holder.supervisor].conn
        assert conn is not None  # a closed connection leaves the queue
        message = ev.grant_of(lock.name, holder, self.era)
        yield ev.Send(conn, message)
        yield ev.Announce(holder.supervisor, message)
        yield event

    def failed(self, reason: str, now_ms: float) -> Iterable[LockEffect]:
        """Nothing was written, or perhaps it was: nothing is sent."""
        self.is_writing, self._grant = False, None
        is_new = self.problem is None
        self.problem = f"grants cannot be written: {reason}; retrying every second"
        self._retry_ms = now_ms + RETRY_MS
        if is_new:
            self.problem_ms = now_ms
            yield ev.Happened("lock.write_failed", self.problem, "error")
