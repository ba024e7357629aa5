"""What the server knows of each supervisor process, and which `want` it accepts.

Each lock has its share of one slot of the state file. A want that would not fit is refused, so no
engine's grant ever depends on how much another's takes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

from lockserver.core.events import Holder, RefuseConnection, Wanted
from lockserver.core.lock import Lock, Signal
from lockserver.core.names import (
    ENGINE_ID,
    INCARNATION,
    ServingFile,
    WitnessFile,
    WitnessState,
    name_of,
)
from lockserver.messages import TOKEN_CLAIMED_MAX, WantMsg
from plumbing.pod.models import model_of

# A pod has a handful; a thousand may wait, at a few KiB each, because a heartbeat scans no others.
# Each may be remembered until its process ends.
SUPERVISORS_MAX = 1024
LOCKS_NAMED_MAX = 8  # in the refusal of one that there is not
LEASE = "lease"  # `process` of a supervisor over TCP: its lease counts instead
SINCE_MS_MAX = 1e12 + 0.001  # thirty years of a clock, with its fraction


@dataclass(slots=True)
class SupervisorRecord:
    """One supervisor, from its first `want` until its process is gone (by pidfd; without one, until
    its connection closes). It makes a second supervisor of the same engine visible, and its absence
    makes a dead holder's witness decisive."""

    id: str
    engine: str
    heard_ms: float
    conn: int | None = None
    newest: int = -1  # the most recently opened connection that it sent a `want` on
    pid: int = 0
    process: str = "none"  # where its pidfd came from, or "lease"; "none": its connection counts
    incarnation: str | None = None
    witness: WitnessFile | None = None
    witness_name: str | None = None
    lease_ms: int | None = None
    serving: ServingFile | None = None
    locks: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    over: Mapping[str, int] = field(default_factory=dict)
    continuation: str = ""
    is_leaving: bool = False
    is_announced: bool = False  # that it leaves
    succeeds: int = 0
    progress: int = -1
    is_silent: bool = False

    @property
    def has_process(self) -> bool:
        return self.process not in ("none", LEASE)

    @property
    def is_leased(self) -> bool:
        """Whether it is on another host, so that its lease counts instead of its process."""
        return self.process == LEASE

    def has_outrun(self, want: Wanted) -> bool:
        """Whether `want` was sent before what has been received of this supervisor. Over TCP a
        connection that was opened earlier may be accepted later."""
        if want.process == LEASE:
            return want.msg.progress < self.progress
        return want.conn < self.newest

    def may_wait_for(self, lock: str) -> bool:
        """Whoever was told to end keeps what it holds, and is granted nothing."""
        return lock in self.locks and not self.is_leaving

    def adopt(self, want: Wanted) -> None:
        """Replace what is known with what `want` says."""
        is_unseen = want.witness_state is WitnessState.UNSEEN and want.witness_file is None
        if not is_unseen or self.incarnation != want.msg.incarnation:
            self.witness = want.witness_file  # else it is the one that was seen before
        if want.process == LEASE:
            self.progress = want.msg.progress
        elif self.conn != want.conn:
            self.progress = -1
        self.conn, self.pid, self.process = want.conn, want.pid, want.process
        self.newest = want.conn
        self.incarnation, self.witness_name = want.msg.incarnation, want.msg.witness
        self.lease_ms, self.serving = want.lease_ms, want.serving
        self.locks, self.tokens = want.msg.locks, dict(want.msg.tokens)
        self.over = dict(want.msg.over)
        self.continuation = want.msg.continuation
        self.is_leaving, self.succeeds = want.msg.is_leaving, want.msg.succeeds


def claimant(want: Wanted, token: int, now_ms: float) -> Holder:
    """The holder that a claim with a token makes of its sender, whose witness was looked at."""
    msg, file = want.msg, want.witness_file
    assert msg.incarnation is not None
    assert file is not None
    return Holder(
        engine=msg.engine,
        incarnation=msg.incarnation,
        supervisor=msg.supervisor,
        witness=file,
        token=token,
        since_mono_ms=now_ms,
        lease_ms=want.lease_ms,
        serving=want.serving,
    )


Locks = Mapping[str, Lock]
Supervisors = Mapping[str, SupervisorRecord]


@dataclass(frozen=True, slots=True)
class SilentOnes:
    """The ids of the silent supervisors, looked up one by one: no event may scan a thousand."""

    supervisors: Supervisors

    def __contains__(self, supervisor: object) -> bool:
        return isinstance(supervisor, str) and self.supervisors[supervisor].is_silent


def can_continue(source: SupervisorRecord, other: SupervisorRecord) -> bool:
    """Whether the streams of one engine's backend could go on in the other's."""
    return source.continuation != "" and source.continuation == other.continuation


def check_want(conn: int, want: WantMsg, locks: Collection[str]) -> RefuseConnection | None:
    """Why this `want` is malformed, whoever holds what; None if it is not."""
    incarnation = INCARNATION.fullmatch(want.incarnation) if want.incarnation else None
    if not ENGINE_ID.fullmatch(want.engine):
        code, why = "lock.bad_engine_id", f"{want.engine!r} is not a valid engine id"
    elif want.incarnation is not None and (
        incarnation is None or incarnation["engine"] != want.engine
    ):
        code = "lock.bad_incarnation"
        why = (
            f"{want.incarnation!r} is not a valid incarnation of {want.engine}: it must be"
            f" {want.engine}-<16 hex digits>"
        )
    elif want.incarnation is None and (want.locks or want.tokens or want.witness):
        code = "lock.bad_want"
        why = "a `want` without an incarnation must not name a lock, a token or a witness"
    elif want.incarnation and want.witness and want.witness != name_of(want.incarnation):
        code = "lock.bad_witness_name"
        why = (
            f"the witness of {want.incarnation} must be named {name_of(want.incarnation)}, not"
            f" {want.witness}"
        )
    elif want.locks and not want.witness:
        code, why = "lock.bad_witness_name", "a `want` that names a lock must name a witness"
    elif unknown := [lock for lock in (*want.locks, *want.tokens) if lock not in locks]:
        code, why = "lock.unknown_lock", _unknown(unknown[0], locks)
    elif len({model_of(lock) for lock in want.locks}) > 1:
        code, why = "lock.bad_want", "a `want` must not name the locks of several models"
    elif len(set(want.locks)) != len(want.locks) or not set(want.tokens) <= set(want.locks):
        code = "lock.bad_want"
        why = "a `want` must name each lock once, and a token only for a lock that it names"
    else:
        return None
    return RefuseConnection(conn, code, why)


def _unknown(name: str, locks: Collection[str]) -> str:
    known = ", ".join(islice(locks, LOCKS_NAMED_MAX))
    more = ", …" if len(locks) > LOCKS_NAMED_MAX else ""
    return f"there is no lock named {name!r}, only {known}{more}: check --model-name"


def check_over(want: Wanted, locks: Locks, token: int) -> RefuseConnection | None:
    """Why what this `want` says is handed over in place cannot be so; None if it can.

    `token`: the largest one that was granted, unless a lock's holder is not on file.
    """
    for name, over in want.msg.over.items():
        lock = locks.get(name)
        if lock is None or not lock.is_fenced or want.msg.incarnation is None:
            code, why = "lock.bad_want", f"an engine cannot hand the {name!r} lock over in place"
        elif want.msg.tokens.get(name, over + 1) <= over:
            code = "lock.bad_want"
            why = f"a `want` must not claim the {name} lock with a token that it has handed over"
        elif over > token and not lock.is_unknown:
            code = "lock.stale_claim"
            why = (
                f"{want.msg.incarnation} has handed the {name} lock over under token {over}, which"
                f" this server never granted: its last token is {token}"
            )
        else:
            continue
        return RefuseConnection(want.conn, code, why, {"lock": name, "token": over})
    return None


def refuse(
    want: Wanted,
    sender: SupervisorRecord | None,
    locks: Locks,
    supervisors: Supervisors,
    token: int,
    share_bytes: int | None,
) -> RefuseConnection | None:
    """Why this `want` counts for nothing, or None; `sender`: who used its connection, `token`: the
    last one that was granted, `share_bytes`: what each lock may take of the file."""
    return (
        check_want(want.conn, want.msg, locks)
        or check_identity(want, sender, locks, supervisors)
        or check_over(want, locks, token)
        or check_fits(want, locks, share_bytes)
    )


def end_of(lock: Lock, holder: Holder, supervisor: SupervisorRecord) -> Signal | None:
    """What the last want of the holder's supervisor says of this lock's end, if that is news."""
    if holder.incarnation != supervisor.incarnation:  # reaped, whatever was said before
        return None if lock.is_ended and not lock.is_handed_over else Signal.NOT_WANTED
    if lock.is_ended:
        return None
    if supervisor.over.get(lock.name, 0) >= holder.token:
        return Signal.HANDED_OVER
    return None if lock.name in supervisor.locks else Signal.NOT_WANTED


def twins_of(want: Wanted, supervisors: Supervisors) -> list[SupervisorRecord]:
    """Other supervisors of the same engine."""
    others = supervisors.values()
    return [s for s in others if s.engine == want.msg.engine and s.id != want.msg.supervisor]


def rank(supervisor_id: str, locks: Locks) -> int:
    """Which of two supervisors of one engine stays: the one whose locks weigh more.

    Were it enough to hold any lock, two that hold different locks would evict each other forever.
    """
    held = [k for k in locks.values() if k.holder and k.holder.supervisor == supervisor_id]
    return max((1 + lock.is_fenced for lock in held), default=0)


def check_identity(
    want: Wanted, sender: SupervisorRecord | None, locks: Locks, supervisors: Supervisors
) -> RefuseConnection | None:
    """Why this `want` cannot be from whom it claims, or None; `sender`: who used its connection."""
    known = sender or supervisors.get(want.msg.supervisor)
    if known is not None and (known.id, known.engine) != (want.msg.supervisor, want.msg.engine):
        why = (
            f"this connection belongs to supervisor {known.id} of {known.engine} and cannot be used"
            " for another one"
        )
        return RefuseConnection(want.conn, "lock.identity_changed", why)
    if known is not None and known.has_process and want.pid and known.pid not in (0, want.pid):
        why = (
            f"supervisor {known.id} of {known.engine} is pid {known.pid}, which is alive; pid"
            f" {want.pid} cannot act for it"
        )
        return RefuseConnection(want.conn, "lock.identity_changed", why)
    is_full = known is None and len(supervisors) >= SUPERVISORS_MAX
    if is_full and not rank(want.msg.supervisor, locks):  # a holder on file is always let in
        why = f"the limit of {SUPERVISORS_MAX} supervisors is reached; stop some of them"
        return RefuseConnection(want.conn, "lock.too_many_waiters", why)
    twins = twins_of(want, supervisors)
    if twins and rank(want.msg.supervisor, locks) <= max(rank(twin.id, locks) for twin in twins):
        return engine_id_taken(want.conn, want.msg.engine, twins[0].pid)
    return None


def needs_a_look(want: Wanted, lock: Lock) -> bool:
    """Whether the answer to `want` depends on a witness that could not be looked at. Then nothing
    is decided, and its sender asks again."""
    if want.witness_state is not WitnessState.UNSEEN:
        return False
    if lock.name in want.msg.tokens:
        return lock.is_unknown  # else the claim is stale, whatever its witness shows
    return not lock.has_waiter(want.msg.supervisor) and not want.msg.is_leaving


def engine_id_taken(conn: int, engine: str, pid: int) -> RefuseConnection:
    who = f"pid {pid}" if pid else "on another host or in another container"
    return RefuseConnection(
        conn,
        "lock.engine_id_taken",
        f"engine {engine} already has a running supervisor, {who}; stop that one, or choose another"
        " ENGINE_ID",
        {"engine": engine, "pid": pid},
    )


def bytes_on_file(name: str, holder: Holder) -> int:
    """What this lock's holder takes in the file, with the comma behind it."""
    return len(json.dumps({name: holder.to_dict()}, separators=(",", ":")).encode())


def check_fits(want: Wanted, locks: Locks, share_bytes: int | None) -> RefuseConnection | None:
    """Why what is wanted anew could not be written if it were granted; None if it could."""
    if share_bytes is None or want.witness_file is None or want.msg.incarnation is None:
        return None
    longest = claimant(want, TOKEN_CLAIMED_MAX, SINCE_MS_MAX)
    for name in want.msg.locks:
        needed = bytes_on_file(name, longest)
        if needed > share_bytes and not locks[name].is_held_by(want.msg.incarnation):
            return RefuseConnection(
                want.conn,
                "lock.does_not_fit",
                f"{want.msg.engine} cannot be granted the {name} lock: its record takes {needed}"
                f" bytes, and each of the {len(locks)} locks has {share_bytes} bytes of the state"
                " file; use a shorter engine id, or fewer models",
                {"lock": name, "needed_bytes": needed, "share_bytes": share_bytes},
            )
    return None
