"""Handing a lock over: one switchover on request, and whether each holder has a standby.

**Switchover.** It changes nothing about safety: the holder drains, reaps and releases the lock by
its own `want`. A switchover only adds a message to the holder and a preference in the queue
(`Lock.preferred`). A holder that dies meanwhile is an ordinary failover, and a restarted server has
forgotten all of it. There is one at a time for each lock. It ends with the lock's next grant, to
any engine. Its deadline only ends the requester's wait, and the handover continues. From then on
another one may be requested, which replaces it.

The surprising thing: a released lock proves that the holder's tree was reaped, not that all its
requests were finished first. A backend that dies while it drains looks the same from here; the
engine's own events tell them apart.

**Standbys.** The server tells each holder whether another engine could take over at once, and
continue its streams: once per connection and grant, and again at every change. Only then is a slow
holder worth killing, and only then may one that leaves close its streams; its supervisor decides
both. A holder that was told to end has a standby only in an engine that *vouches* for it: its want
says that it knows of the order (`succeeds`) and does not say that it leaves, too. Where a whole pod
is told to end, each engine learns that at another moment, so an older want proves nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from lockserver.core import events as ev
from lockserver.core import sentences
from lockserver.core.events import Holder, LockEffect, SwitchOverAsked, grant_of
from lockserver.core.lock import Lock, LockState, Waiter
from lockserver.core.sentences import event, facts
from lockserver.core.supervisors import (
    Locks,
    SupervisorRecord,
    Supervisors,
    can_continue,
    next_of,
)
from lockserver.messages import SWITCHOVER_MS_MAX, HandOverMsg, StandbyMsg, SwitchedOverMsg
from plumbing.errors import UnderstudyError


@dataclass(slots=True)
class Switchover:
    """One under way."""

    ask: Hashable  # None once it has been answered
    pid: int
    source: Holder
    to: str
    is_named: bool  # `to` was requested by name, so no other engine will do
    since_ms: float
    deadline_ms: float
    resume: bool = False  # the target continues the holder's streams
    is_released: bool = False  # by the holder itself

    @property
    def is_overdue(self) -> bool:
        return self.ask is None

    def is_held_by_source(self, lock: Lock) -> bool:
        return lock.holder is not None and lock.holder.token == self.source.token

    def message(self, lock: Lock) -> HandOverMsg:
        return HandOverMsg(lock.name, self.source.incarnation, self.to, self.resume)


class Switchovers:
    """At most one for each lock."""

    def __init__(self) -> None:
        self.under_way: dict[str, Switchover] = {}

    def begin(
        self, asked: SwitchOverAsked, locks: Locks, supervisors: Supervisors, now_ms: float
    ) -> Iterable[LockEffect]:
        """Ask the holder, or refuse."""
        try:
            lock, holder = self._check_holder(asked, locks, supervisors)
            if asked.to == holder.engine:
                yield ev.AnswerSwitchOver(asked.ask, _report(lock, holder.engine, holder, 0.0))
                return
            waiter = _find_target(asked, lock, supervisors)
        except UnderstudyError as refusal:
            yield ev.AnswerSwitchOver(asked.ask, refusal)
            data = {"lock": asked.lock, "to": asked.to, "pid": asked.pid}
            by = sentences.requester(asked.pid)
            yield event("lock.switchover_refused", data, by=by, why=refusal.message)
            return
        source, target = supervisors[holder.supervisor], supervisors[waiter.supervisor]
        found = self.under_way[lock.name] = Switchover(
            ask=asked.ask,
            pid=asked.pid,
            source=holder,
            to=waiter.engine,
            is_named=asked.to is not None,
            since_ms=now_ms,
            deadline_ms=now_ms + asked.timeout_ms,
            resume=not asked.drain and can_continue(source, target),
        )
        lock.preferred = found.to
        assert source.conn is not None  # checked: it is connected
        yield ev.Send(source.conn, found.message(lock))
        data = facts(lock, holder) | {"from": holder.engine, "to": found.to, "pid": found.pid}
        yield event(
            "lock.switchover",
            data | {"timeout_ms": round(asked.timeout_ms), "resume": found.resume},
            by=sentences.requester(found.pid),
            streams=", which continues its streams" if found.resume else "",
        )

    def _check_holder(
        self, asked: SwitchOverAsked, locks: Locks, supervisors: Supervisors
    ) -> tuple[Lock, Holder]:
        lock = locks.get(asked.lock)
        if lock is None:
            known = ", ".join(sorted(locks))
            why = f"lock {asked.lock!r} cannot be switched over; only {known} can"
            raise UnderstudyError("lock.unknown_lock", why)
        other = self.under_way.get(asked.lock)
        if other is not None and not other.is_overdue:
            why = (
                f"{other.source.engine} is already handing {lock.name} over to {other.to}, as"
                f" requested by {sentences.requester(other.pid)}; wait for that to end"
            )
            raise UnderstudyError("lock.switchover_busy", why)
        holder = lock.holder
        if lock.state is not LockState.HELD or holder is None:
            last = f" (held by {holder.engine})" if holder is not None else ""
            why = f"{lock.name} is {lock.state}{last}: no engine can hand it over now"
            raise UnderstudyError("lock.not_held", why)
        supervisor = supervisors.get(holder.supervisor)
        if supervisor is None or supervisor.conn is None or supervisor.is_silent:
            why = (
                f"{holder.engine} holds {lock.name} and is silent, so it cannot hand it over; see"
                " `lockserver status`"
            )
            raise UnderstudyError("lock.not_held", why)
        return lock, holder

    def remind(self, lock: Lock, conn: int) -> Iterable[LockEffect]:
        """The holder has a new connection: the request may have been lost with the old one."""
        found = self.under_way.get(lock.name)
        if found is not None and not found.is_overdue and found.is_held_by_source(lock):
            yield ev.Send(conn, found.message(lock))

    def observe(self, locks: Locks, now_ms: float) -> Iterable[LockEffect]:
        """After every event: whether a switchover has ended or its deadline has passed."""
        for name, found in tuple(self.under_way.items()):
            lock = locks[name]
            found.is_released |= lock.is_ended and found.is_held_by_source(lock)
            if lock.holder is not None and not found.is_held_by_source(lock):
                del self.under_way[name]
                lock.preferred = None
                yield from _ended(lock, lock.holder, found, now_ms)
            elif found.ask is not None and now_ms >= found.deadline_ms:
                source, waited_s = found.source.engine, (now_ms - found.since_ms) / 1000
                data = {"lock": lock.name, "from": source, "to": found.to, "pid": found.pid}
                overdue = event("lock.switchover_overdue", data, waited_s=waited_s)
                yield ev.AnswerSwitchOver(found.ask, _failed(overdue.message, reason="timeout"))
                yield overdue
                found.ask = None


def _report(lock: Lock, source: str, holder: Holder, took_ms: float) -> SwitchedOverMsg:
    took = min(round(took_ms), SWITCHOVER_MS_MAX)
    return SwitchedOverMsg(lock.name, source, holder.engine, holder.token, took)


def _failed(why: str, **details: object) -> UnderstudyError:
    return UnderstudyError("lock.switchover_failed", why, **details)


def _find_target(asked: SwitchOverAsked, lock: Lock, supervisors: Supervisors) -> Waiter:
    """The named engine, or the first one waiting that is not silent.

    Raises:
        UnderstudyError: there is none; with what is wrong with each.
    """
    if asked.to is not None and not any(s.engine == asked.to for s in supervisors.values()):
        known = ", ".join(sorted({s.engine for s in supervisors.values()}))
        why = f"there is no engine {asked.to!r}; known engines: {known}"
        raise UnderstudyError("lock.unknown_engine", why)
    waiting = [waiter for waiter in lock.waiters if asked.to in (None, waiter.engine)]
    for waiter in waiting:
        if not supervisors[waiter.supervisor].is_silent:
            return waiter
    silent = "; ".join(f"{each.engine} is waiting, but silent" for each in waiting)
    who = "no engine is" if asked.to is None else f"{asked.to} is not"
    raise UnderstudyError(
        "lock.no_standby",
        f"{silent or f'{who} waiting for the {lock.name} lock'}: a switchover needs an engine in"
        " standby; see `understudy status`",
    )


def _ended(lock: Lock, holder: Holder, found: Switchover, now_ms: float) -> Iterable[LockEffect]:
    """The lock has been granted again: was the outcome the requested one?"""
    source, took_ms, failure = found.source.engine, now_ms - found.since_ms, None
    if holder.engine == source:
        failure = f"{source} was granted the {lock.name} lock again, because no other was ready"
    elif not found.is_released:
        failure = (
            f"{source} ended before it handed the {lock.name} lock over; {holder.engine} took over"
            " as in any failover"
        )
    elif found.is_named and holder.engine != found.to:
        failure = (
            f"{found.to} was gone when the {lock.name} lock became free; {holder.engine} holds it"
            " now"
        )
    if found.ask is not None and failure is None:
        yield ev.AnswerSwitchOver(found.ask, _report(lock, source, holder, took_ms))
    elif found.ask is not None:
        details = {"reason": "not_as_asked", "engine": holder.engine, "token": holder.token}
        yield ev.AnswerSwitchOver(found.ask, _failed(f"{failure}, token {holder.token}", **details))
    kind = "lock.switched_over" if failure is None else "lock.switchover_failed"
    data = facts(lock, holder, to=holder.engine, took_ms=round(took_ms, 3)) | {"from": source}
    yield event(kind, data, why=failure)


def tell_standbys(locks: Locks, supervisors: Supervisors, era: str) -> list[LockEffect]:
    """News for the holders, and of those that were told to end, where there is any."""
    effects: list[LockEffect] = []
    for lock in locks.values():
        holder = lock.holder if lock.state is LockState.HELD else None
        supervisor = supervisors.get(holder.supervisor) if holder is not None else None
        if holder is None or supervisor is None or supervisor.conn is None:
            continue
        if supervisor.said.is_leaving and not supervisor.is_announced:
            supervisor.is_announced = True
            grant = grant_of(lock.name, holder, era, is_leaving=True)
            effects.append(ev.Announce(supervisor.id, grant))
            effects.append(sentences.of_holder("lock.told_to_end", lock, holder))
        # Who would be granted the lock next; a silent waiter would not be.
        waiter = next_of(lock, supervisors)
        standby, is_settled = supervisors[waiter.supervisor] if waiter else None, False
        if supervisor.said.is_leaving:
            is_settled = standby is None or standby.said.succeeds == holder.token
            standby = standby if is_settled else None
        continues = standby is not None and can_continue(supervisor, standby)
        news = StandbyMsg(lock.name, holder.incarnation, standby is not None, continues, is_settled)
        if lock.told != (supervisor.conn, holder.token, news):
            lock.told = (supervisor.conn, holder.token, news)
            effects.append(ev.Send(supervisor.conn, news))
    return effects


def tell_holder(
    supervisor: SupervisorRecord, locks: Locks, supervisors: Supervisors, era: str
) -> Iterable[LockEffect]:
    """Who holds its lock, for a supervisor that has just connected."""
    assert supervisor.conn is not None
    lock = locks[supervisor.lock]
    holder = lock.holder if lock.state is LockState.HELD else None
    if holder is not None and holder.supervisor != supervisor.id:
        other = supervisors.get(holder.supervisor)
        is_leaving = other is not None and other.said.is_leaving
        message = grant_of(lock.name, holder, era, is_leaving=is_leaving)
        yield ev.Send(supervisor.conn, message)
