"""What the server knows of each supervisor process, and which `want` it accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lockserver.core.events import Holder, RefuseConnection, Wanted
from lockserver.core.lock import Lock, Signal, Waiter
from lockserver.core.names import ENGINE_ID, INCARNATION, name_of
from lockserver.messages import WantMsg

# A pod has a handful; a thousand may wait, at a few KiB each, because a heartbeat scans no others.
# Each may be remembered until its process ends.
SUPERVISORS_MAX = 1024
LOCKS_NAMED_MAX = 8  # in the refusal of one that there is not
LEASE = "lease"  # `process` of a supervisor over TCP: its lease counts instead


@dataclass(slots=True)
class SupervisorRecord:
    """One supervisor, from its first `want` until its process is gone (by pidfd; without one, until
    its connection closes). It makes a second supervisor of the same engine visible, and its absence
    makes a dead holder's witness decisive."""

    want: Wanted  # the last one, of the connection that it opened last
    heard_ms: float
    conn: int | None = None
    progress: int = -1
    is_silent: bool = False
    is_announced: bool = False  # that it leaves

    @property
    def said(self) -> WantMsg:
        return self.want.msg

    @property
    def id(self) -> str:
        return self.want.msg.supervisor

    @property
    def engine(self) -> str:
        return self.want.msg.engine

    @property
    def lock(self) -> str:
        """The lock of its model, which it never changes."""
        return self.want.msg.lock

    @property
    def incarnation(self) -> str | None:
        return self.want.msg.incarnation

    @property
    def witness(self) -> str | None:
        """The name of its incarnation's witness."""
        return None if self.incarnation is None else name_of(self.incarnation)

    @property
    def has_process(self) -> bool:
        return self.want.process not in ("none", LEASE)

    @property
    def is_leased(self) -> bool:
        """Whether it is on another host, so that its lease counts instead of its process."""
        return self.want.process == LEASE

    def has_outrun(self, want: Wanted) -> bool:
        """Whether `want` was sent before one that has been adopted: connections are accepted, and
        read, in any order."""
        return want.msg.progress < self.progress

    @property
    def may_wait(self) -> bool:
        """A supervisor that was told to end keeps what it holds, and is granted nothing."""
        return self.said.is_wanted and not self.said.is_leaving

    def claims(self, lock: str) -> bool:
        return self.said.token > 0 and lock == self.lock

    def adopt(self, want: Wanted) -> None:
        """Replace what is known with what `want` says."""
        self.want, self.conn, self.progress = want, want.conn, want.msg.progress


def holder_of(want: Wanted, token: int, now_ms: float) -> Holder:
    """The holder that a grant, or a claim with a token, makes of its sender."""
    msg, file = want.msg, want.witness_file
    assert msg.incarnation is not None
    assert file is not None  # checked before it was queued, or its claim believed
    return Holder(
        engine=msg.engine,
        incarnation=msg.incarnation,
        supervisor=msg.supervisor,
        dev=file.dev,
        ino=file.ino,
        token=token,
        since_mono_ms=now_ms,
        lease_ms=want.lease_ms,
        serving_id=None if want.serving is None else (want.serving.dev, want.serving.ino),
    )


Locks = Mapping[str, Lock]
Supervisors = Mapping[str, SupervisorRecord]


def next_of(lock: Lock, supervisors: Supervisors) -> Waiter | None:
    """Who would be granted `lock` next: the engine that a switchover prefers, if it waits, else the
    first waiter. A silent one is skipped, not dropped. Nothing here touches safety."""
    heard = (each for each in lock.waiters if not supervisors[each.supervisor].is_silent)
    first = next(heard, None)  # without a preference no event scans a thousand waiters
    if first is None or lock.preferred in (None, first.engine):
        return first
    return next((each for each in heard if each.engine == lock.preferred), first)


def can_continue(source: SupervisorRecord, other: SupervisorRecord) -> bool:
    """Whether the streams of one engine's backend could go on in the other's."""
    return source.said.continuation != "" and source.said.continuation == other.said.continuation


def refuse(
    want: Wanted,
    sender: SupervisorRecord | None,
    locks: Locks,
    supervisors: Supervisors,
    token: int,
) -> RefuseConnection | None:
    """Why this `want` counts for nothing, or None; `sender`: who used its connection, `token`: the
    last one that was granted."""
    found = (
        _malformed(want.msg, locks)
        or _misplaced(want, sender, locks, supervisors)
        or _handed_over_wrongly(want, locks, token)
    )
    return None if found is None else RefuseConnection(want.conn, *found)


Refusal = tuple[str, str] | tuple[str, str, Mapping[str, Any]]  # code, sentence, details


def _malformed(want: WantMsg, locks: Locks) -> Refusal | None:
    """A want that contradicts itself in any state: no supervisor of ours sends one. Of a
    lock that there is not, a wrong flag is the cause."""
    match = INCARNATION.fullmatch(want.incarnation or "")
    is_its_own = match is not None and match["engine"] == want.engine
    is_sound = is_its_own if want.incarnation is not None else not (want.is_wanted or want.over)
    if not ENGINE_ID.fullmatch(want.engine) or not is_sound or (want.token and not want.is_wanted):
        return "lock.bad_want", f"the `want` of {want.engine!r} contradicts itself: {want}"[:500]
    if want.lock not in locks:
        known = ", ".join(islice(locks, LOCKS_NAMED_MAX))
        more = ", …" if len(locks) > LOCKS_NAMED_MAX else ""
        why = f"there is no lock named {want.lock!r}, only {known}{more}: check --model-name"
        return "lock.unknown_lock", why
    return None


def _handed_over_wrongly(want: Wanted, locks: Locks, token: int) -> Refusal | None:
    """What this `want` says is handed over in place cannot be so. `token`: the largest one that was
    granted, unless a lock's holder is not on file."""
    name, over = want.msg.lock, want.msg.over
    if 0 < want.msg.token <= over:
        code = "lock.bad_want"
        why = f"a `want` must not claim the {name} lock with a token that it has handed over"
    elif over > token and not locks[name].is_unknown:
        code = "lock.stale_claim"
        why = (
            f"{want.msg.incarnation} has handed the {name} lock over under token {over}, which"
            f" this server never granted: its last token is {token}"
        )
    else:
        return None
    return code, why, {"lock": name, "token": over}


def end_of(lock: Lock, holder: Holder, supervisor: SupervisorRecord) -> Signal | None:
    """What the last want of the holder's supervisor says of this lock's end, if that is news."""
    if holder.incarnation != supervisor.incarnation:  # reaped, whatever was said before
        return None if lock.is_ended and not lock.is_handed_over else Signal.NOT_WANTED
    if lock.is_ended:
        return None
    if supervisor.said.over >= holder.token:
        return Signal.HANDED_OVER
    return None if supervisor.said.is_wanted else Signal.NOT_WANTED


def twins_of(want: Wanted, supervisors: Supervisors) -> list[SupervisorRecord]:
    """Other supervisors of the same engine."""
    others = supervisors.values()
    return [s for s in others if s.engine == want.msg.engine and s.id != want.msg.supervisor]


def holds_any(supervisor_id: str, locks: Locks) -> bool:
    return any(k.holder and k.holder.supervisor == supervisor_id for k in locks.values())


def _misplaced(
    want: Wanted, sender: SupervisorRecord | None, locks: Locks, supervisors: Supervisors
) -> Refusal | None:
    """This `want` cannot be from whom it claims, or there is no room for its sender."""
    known = sender or supervisors.get(want.msg.supervisor)
    code, why = "lock.identity_changed", None
    who = want.msg.supervisor, want.msg.engine, want.msg.lock
    if known is not None and (known.id, known.engine, known.lock) != who:
        why = (
            f"this connection belongs to supervisor {known.id} of {known.engine} and cannot be used"
            f" for another one, or for another lock than {known.lock}"
        )
    elif (
        known is not None and known.has_process and want.pid and known.want.pid not in (0, want.pid)
    ):
        why = (
            f"supervisor {known.id} of {known.engine} is pid {known.want.pid}, which is alive; pid"
            f" {want.pid} cannot act for it"
        )
    elif known is None and len(supervisors) >= SUPERVISORS_MAX:
        code = "lock.too_many_waiters"
        if not holds_any(want.msg.supervisor, locks):  # a holder on file is always let in
            why = f"the limit of {SUPERVISORS_MAX} supervisors is reached; stop some of them"
    if why is not None:
        return code, why
    twins = twins_of(want, supervisors)
    may_stay = holds_any(want.msg.supervisor, locks)  # and evict a twin that holds nothing
    if twins and not (may_stay and not any(holds_any(twin.id, locks) for twin in twins)):
        return engine_id_taken(want.msg.engine, twins[0].want.pid)
    return None


def engine_id_taken(engine: str, pid: int) -> Refusal:
    who = f"pid {pid}" if pid else "on another host or in another container"
    return (
        "lock.engine_id_taken",
        f"engine {engine} already has a running supervisor, {who}; stop that one, or choose another"
        " ENGINE_ID",
        {"engine": engine, "pid": pid},
    )
