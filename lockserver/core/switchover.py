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

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from lockserver.core import events as ev
from lockserver.core import sentences
from lockserver.core.events import (
    Announce,
    Holder,
    LockEffect,
    SendGrant,
    SwitchOverAsked,
    TellStandby,
)
from lockserver.core.lock import Lock, LockState, Waiter, next_waiter
from lockserver.core.sentences import event, facts
from lockserver.core.supervisors import (
    Locks,
    SilentOnes,
    SupervisorRecord,
    Supervisors,
    can_continue,
)


@dataclass(slots=True)
class Switchover:
    """One under way. `ask` identifies the request, None once it has been answered."""

    ask: int | None
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


class Refusal(Exception):
    """Why a switchover may not begin. Nothing has changed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Switchovers:
    """At most one for each lock."""

    def __init__(self, *, resumes: bool = False) -> None:
        """`resumes`: there is a gateway, so that one engine may continue another's streams."""
        self.resumes = resumes
        self.under_way: dict[str, Switchover] = {}

    def begin(
        self, asked: SwitchOverAsked, locks: Locks, supervisors: Supervisors, now_ms: float
    ) -> Iterable[LockEffect]:
        """Ask the holder, or refuse."""
        try:
            lock, holder = self._check_holder(asked, locks, supervisors)
            if asked.to == holder.engine:
                yield ev.ReportSwitchOver(asked.ask, lock.name, holder.engine, holder, 0.0)
                return
            waiter = _find_target(asked, lock, supervisors)
        except Refusal as refusal:
            yield ev.RefuseSwitchOver(asked.ask, refusal.code, refusal.message)
            data = {"lock": asked.lock, "to": asked.to, "pid": asked.pid}
            by = sentences.requester(asked.pid)
            yield event("lock.switchover_refused", data, by=by, why=refusal.message)
            return
        found = Switchover(
            ask=asked.ask,
            pid=asked.pid,
            source=holder,
            to=waiter.engine,
            is_named=asked.to is not None,
            since_ms=now_ms,
            deadline_ms=now_ms + asked.timeout_ms,
            resume=self._may_resume(
                asked, supervisors[holder.supervisor], supervisors[waiter.supervisor]
            ),
        )
        self.under_way[lock.name] = found
        lock.preferred = found.to
        conn = supervisors[holder.supervisor].conn
        assert conn is not None  # checked: it is connected
        yield ev.SendHandOver(conn, lock.name, holder.incarnation, found.to, found.resume)
        more = {"pid": found.pid, "timeout_ms": round(asked.timeout_ms), "resume": found.resume}
        yield event(
            "lock.switchover",
            _facts(lock, found, holder) | more,
            by=sentences.requester(found.pid),
            streams=", which continues its streams" if found.resume else "",
        )

    def _may_resume(
        self, asked: SwitchOverAsked, holder: SupervisorRecord, target: SupervisorRecord
    ) -> bool:
        return self.resumes and not asked.drain and can_continue(holder, target)

    def _check_holder(
        self, asked: SwitchOverAsked, locks: Locks, supervisors: Supervisors
    ) -> tuple[Lock, Holder]:
        lock = locks.get(asked.lock)
        if lock is None or not lock.is_fenced:
            fenced = ", ".join(sorted(each.name for each in locks.values() if each.is_fenced))
            why = f"lock {asked.lock!r} cannot be switched over; only {fenced} can"
            raise Refusal("lock.unknown_lock", why)
        other = self.under_way.get(asked.lock)
        if other is not None and not other.is_overdue:
            why = (
                f"{other.source.engine} is already handing {lock.name} over to {other.to}, as"
                f" requested by {sentences.requester(other.pid)}; wait for that to end"
            )
            raise Refusal("lock.switchover_busy", why)
        holder = lock.holder
        if lock.state is not LockState.HELD or holder is None:
            last = f" (held by {holder.engine})" if holder is not None else ""
            why = f"{lock.name} is {lock.state}{last}: no engine can hand it over now"
            raise Refusal("lock.not_held", why)
        supervisor = supervisors.get(holder.supervisor)
        if supervisor is None or supervisor.conn is None or supervisor.is_silent:
            why = (
                f"{holder.engine} holds {lock.name} and is silent, so it cannot hand it over; see"
                " `lockserver status`"
            )
            raise Refusal("lock.not_held", why)
        return lock, holder

    def remind(self, lock: Lock, conn: int) -> Iterable[LockEffect]:
        """The holder has a new connection: the request may have been lost with the old one."""
        found = self.under_way.get(lock.name)
        if found is not None and not found.is_overdue and found.is_held_by_source(lock):
            yield ev.SendHandOver(conn, lock.name, found.source.incarnation, found.to, found.resume)

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
                yield ev.RefuseSwitchOver(
                    found.ask, "lock.switchover_failed", overdue.message, {"reason": "timeout"}
                )
                yield overdue
                found.ask = None


def _find_target(asked: SwitchOverAsked, lock: Lock, supervisors: Supervisors) -> Waiter:
    """The named engine, or the first one waiting; all of its processes must be alive.

    Raises:
        Refusal: there is none; with what is wrong with each.
    """
    if asked.to is not None and not any(s.engine == asked.to for s in supervisors.values()):
        known = ", ".join(sorted({s.engine for s in supervisors.values()}))
        why = f"there is no engine {asked.to!r}; known engines: {known}"
        raise Refusal("lock.unknown_engine", why)
    waiters = [w for w in lock.waiters if asked.to in (None, w.engine)]
    objections = [_objection(waiter, supervisors, asked.whole) for waiter in waiters]
    for waiter, objection in zip(waiters, objections, strict=True):
        if objection is None:
            return waiter
    who = "no engine is" if asked.to is None else f"{asked.to} is not"
    why = (
        "; ".join(each for each in objections if each) or f"{who} waiting for the {lock.name} lock"
    )
    raise Refusal(
        "lock.no_standby",
        f"{why}: a switchover needs an engine in standby with all its processes alive; see"
        " `understudy status`",
    )


def _objection(waiter: Waiter, supervisors: Supervisors, whole: Container[str]) -> str | None:
    """Why this waiter cannot take over now, or None."""
    if supervisors[waiter.supervisor].is_silent:
        return f"{waiter.engine} is waiting, but silent"
    if waiter.incarnation not in whole:
        return f"{waiter.engine} is waiting, but some of its processes are gone"
    return None


def _ended(lock: Lock, holder: Holder, found: Switchover, now_ms: float) -> Iterable[LockEffect]:
    """The lock has been granted again: was the outcome the requested one?"""
    took_ms = now_ms - found.since_ms
    failure = None
    if holder.engine == found.source.engine:
        failure = (
            f"{holder.engine} was granted the {lock.name} lock again, because no other engine was"
            " ready"
        )
    elif not found.is_released:
        failure = (
            f"{found.source.engine} ended before it handed the {lock.name} lock over;"
            f" {holder.engine} took"
            " over as in any failover"
        )
    elif found.is_named and holder.engine != found.to:
        failure = (
            f"{found.to} was gone when the {lock.name} lock became free; {holder.engine} holds it"
            " now"
        )
    if failure is None:
        if found.ask is not None:
            yield ev.ReportSwitchOver(found.ask, lock.name, found.source.engine, holder, took_ms)
    elif found.ask is not None:
        details = {"reason": "not_as_asked", "engine": holder.engine, "token": holder.token}
        yield ev.RefuseSwitchOver(
            found.ask, "lock.switchover_failed", f"{failure}, token {holder.token}", details
        )
    kind = "lock.switched_over" if failure is None else "lock.switchover_failed"
    data = facts(lock, holder) | {"from": found.source.engine, "to": holder.engine}
    yield event(kind, data | {"took_ms": round(took_ms, 3)}, why=failure)


def _facts(lock: Lock, found: Switchover, holder: Holder) -> dict[str, Any]:
    return facts(lock, holder) | {"from": found.source.engine, "to": found.to}


def tell_standbys(
    locks: Locks, supervisors: Supervisors, era: str, *, resumes: bool
) -> list[LockEffect]:
    """News for the holders of fenced locks, and of those that were told to end, where there is
    any."""
    effects: list[LockEffect] = []
    for lock in locks.values():
        holder = lock.holder if lock.state is LockState.HELD and lock.is_fenced else None
        supervisor = supervisors.get(holder.supervisor) if holder is not None else None
        if holder is None or supervisor is None or supervisor.conn is None:
            continue
        if supervisor.is_leaving and not supervisor.is_announced:
            supervisor.is_announced = True
            effects.append(Announce(lock.name, holder, era, is_leaving=True))
            effects.append(sentences.of_holder("lock.told_to_end", lock, holder))
        standby, is_settled = _standby(lock, supervisors), False
        if supervisor.is_leaving:
            is_settled = standby is None or standby.succeeds == holder.token
            standby = standby if is_settled else None
        is_ready = standby is not None
        continues = resumes and standby is not None and can_continue(supervisor, standby)
        news = (supervisor.conn, holder.token, is_ready, continues, is_settled)
        if news != lock.told:
            lock.told = news
            effects.append(
                TellStandby(supervisor.conn, lock.name, holder, is_ready, continues, is_settled)
            )
    return effects


def tell_holders(
    supervisor: SupervisorRecord, locks: Locks, supervisors: Supervisors, era: str
) -> list[LockEffect]:
    """Who holds which lock, for a supervisor that has just connected."""
    assert supervisor.conn is not None
    return [
        SendGrant(
            supervisor.conn, lock.name, lock.holder, era, _is_leaving(lock.holder, supervisors)
        )
        for lock in locks.values()
        if lock.state is LockState.HELD
        and lock.holder is not None
        and lock.holder.supervisor != supervisor.id
    ]


def _is_leaving(holder: Holder, supervisors: Supervisors) -> bool:
    supervisor = supervisors.get(holder.supervisor)
    return supervisor is not None and supervisor.is_leaving


def _standby(lock: Lock, supervisors: Supervisors) -> SupervisorRecord | None:
    """Who would be granted the lock next; a silent waiter would not be."""
    waiter = next_waiter(lock.waiters, SilentOnes(supervisors), lock.preferred)
    return supervisors[waiter.supervisor] if waiter is not None else None
