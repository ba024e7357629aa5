"""What the machine of a device knows, how much of the device is used, and the snapshot of both.

`Device` holds the epochs, the sessions, the journal and the counters, with the operations that must
not be done by halves: `drop` (forget a session and give up what it alone kept) and `retire` (take
the committed epoch out of service). It decides nothing.

Capacity: every epoch counts until the kernel says that no process maps it. Memory that a dying
process still has is not free, whatever our own accounts say.

The snapshot is one JSON-like object, for status, metrics and the CLI. Its instants are milliseconds
of the caller's clock, which the caller's function `at` turns into times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any

from msgspec.structs import replace

from gms.core import events as ev
from gms.core.events import Effects, EpochPhase, SessionState
from gms.core.state import HANDING_BACK, QUEUED, WRITER_STATES, Epoch, Session
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError
from plumbing.text import size

WAITERS_MAX = 64  # eight engines of eight ranks; more is a client that attaches in a loop


class Device:
    """Epochs and sessions of one device and tag."""

    def __init__(
        self,
        capacity_bytes: int,
        granularity_bytes: int,
        orphans: Iterable[Epoch] = (),
        *,
        is_journal_lost: bool = False,
        offloaded: ev.JournalRecord | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.granularity_bytes = granularity_bytes
        self.kv_bytes = 0  # of the capacity, as far as is known: KV memory has a server of its own
        self.epochs: dict[str, Epoch] = {epoch.id: epoch for epoch in orphans}
        self.sessions: dict[int, Session] = {}
        self.is_journal_lost = is_journal_lost  # survivors say what was committed
        # The sealed copy in host memory that stands for what was committed, until the next commit.
        self.offloaded = offloaded
        self.commits_total = self.offloads_total = self.restages_total = 0
        self.recoveries_total = self.condemnations_total = 0
        self.exports_total = self.reclaims_total = self.oom_waits_total = 0
        self.problem: str | None = None  # for operators to fix: a journal that cannot be written
        self.journal_retry_ms: float | None = None
        self._journal_writes = 0  # under way, and no session waits for them
        self.is_journal_behind = False  # the truth is written after the commit under way

    @property
    def committed(self) -> Epoch | None:
        return self._in_phase(EpochPhase.COMMITTED)

    @property
    def staging(self) -> Epoch | None:
        return self._in_phase(EpochPhase.STAGING)

    @property
    def writer(self) -> Session | None:
        return next((s for s in self.sessions.values() if s.state in WRITER_STATES), None)

    @property
    def waiting(self) -> list[Session]:
        return [s for s in self.sessions.values() if s.state is SessionState.WAITING]

    @property
    def orphans(self) -> list[Epoch]:
        return [e for e in self.epochs.values() if e.phase is EpochPhase.ORPHANED]

    @property
    def state(self) -> str:
        """`committed`, `recovering`, `staging`, `offloaded` or `empty`: the device as `gms status`
        shows it."""
        phases = {epoch.phase for epoch in self.epochs.values()}
        if EpochPhase.COMMITTED in phases:
            return "committed"
        if EpochPhase.ORPHANED in phases:
            return "recovering"
        if EpochPhase.STAGING in phases:
            return "staging"
        return "offloaded" if self.offloaded is not None else "empty"

    @property
    def free_bytes(self) -> int:
        return free_bytes(self.epochs.values(), self.capacity_bytes, self.kv_bytes)

    def drop(self, session: Session, why: str) -> Effects:
        """Forget a session that is closed, and give up what it alone kept."""
        del self.sessions[session.id]
        epoch = self.epochs.get(session.epoch or "")
        if epoch is not None and epoch.has_no_file and not self._is_handed_back(epoch):
            del self.epochs[epoch.id]  # there is no file whose watch could end it
        if session.offer is not None and session.epoch is not None:
            return [ev.DiscardOffer(session.epoch)]
        if epoch is None:
            return []
        if epoch.phase is EpochPhase.STAGING:
            self.problem = None
            epoch.turn("lose")
            lost = f"staging epoch {epoch.id} of {session.label} is lost: {why}"
            return [
                ev.ReleaseEpoch(epoch.id),
                # Its record may be on disk already; restore the true one.
                *(self.journal() if session.may_be_journalled else []),
                ev.RecordEvent("gms.reclaim", lost, {"epoch": epoch.id}, severity="warning"),
            ]
        epoch.readers.discard(session.id)
        if epoch.phase is EpochPhase.SUPERSEDED and not epoch.readers:
            epoch.turn("release")
            return [ev.ReleaseEpoch(epoch.id)]
        return []

    def retire(self, epoch: Epoch) -> Effects:
        """Take the committed epoch out of service; its readers keep it until the last leaves."""
        if epoch.readers:
            epoch.turn("supersede")
            return [ev.MarkHistory(epoch.id)]
        # A process without a session may map it: one that has been stopped since a restart.
        epoch.turn("release")
        return [ev.MarkHistory(epoch.id), ev.ReleaseEpoch(epoch.id)]

    def _is_handed_back(self, epoch: Epoch) -> bool:
        """Whether its end will be reported: by an offer's end, or by its readers'."""
        if epoch.phase is not EpochPhase.ORPHANED:
            return True
        return any(s.epoch == epoch.id for s in self.sessions.values() if s.state in HANDING_BACK)

    def journal(self) -> Effects:
        """Write what is true now, unless a commit is being written: that must not be overtaken,
        and it writes the same or corrects it afterwards."""
        self.is_journal_behind = any(
            s.state is SessionState.JOURNALLING for s in self.sessions.values()
        )
        self.journal_retry_ms = None
        if self.is_journal_behind:
            return []
        self._journal_writes += 1
        record = self.committed.record() if self.committed else None
        return [ev.WriteJournal(None, record, self.offloaded)]

    def journal_commit(self, session: Session) -> ev.WriteJournal:
        """Write the epoch that `session` commits, with the one that it replaces."""
        previous = self.committed.record() if self.committed else None
        record = replace(self.epoch_of(session).record(), previous=previous)
        return ev.WriteJournal(session.id, record, self.offloaded)

    def journal_written(self) -> None:
        """A write that no session waits for has ended, successfully or not."""
        self._journal_writes -= 1

    def note_problem(self, event_type: str, problem: str) -> Effects:
        """Show `problem` in the status, and log it if it is new."""
        is_new, self.problem = problem != self.problem, problem
        return [ev.RecordEvent(event_type, problem, severity="error")] if is_new else []

    @property
    def is_journal_true(self) -> bool:
        """Whether the journal on disk is up to date."""
        is_retrying = self.journal_retry_ms is not None
        return not (self._journal_writes or self.is_journal_behind or is_retrying)

    def check_waiters(self) -> None:
        """Check that one more session may wait for its grant. Survivors are not counted: the others
        wait for what they bring, and the number of connections bounds theirs.

        Raises:
            UnderstudyError: `gms.too_many_waiters`.
        """
        if len(self.waiting) >= WAITERS_MAX:
            raise UnderstudyError(
                "gms.too_many_waiters",
                f"{WAITERS_MAX} sessions wait for this device already, which is the limit; "
                "stop some of them and try again",
            )

    def session(self, event: ev.SessionEvent) -> Session:
        """The session of `event`.

        Raises:
            ProtocolError: `gms.not_attached`.
        """
        session = self.sessions.get(event.session)
        if session is None:
            what = event.message.TYPE if isinstance(event, ev.Received) else type(event).__name__
            raise ProtocolError("gms.not_attached", f"{what} needs a session: attach first")
        return session

    def epoch_of(self, session: Session) -> Epoch:
        epoch = self.epochs.get(session.epoch or "")
        if epoch is None:
            raise InvariantError(f"session {session.id} is {session.state} without an epoch")
        return epoch

    def _in_phase(self, phase: EpochPhase) -> Epoch | None:
        return next((e for e in self.epochs.values() if e.phase is phase), None)


EPOCHS_MAX = 8  # one is committed, one superseded; each keeps a manifest of up to 15 MiB here
EPOCH_BYTES_MAX = 1 << 50  # no device has a pebibyte; sums over all sessions stay below 64 bits


class Fit(Enum):
    NOW = auto()
    LATER = auto()  # when memory that was given up is free
    WITHOUT_COMMITTED = auto()  # the committed epoch has no readers and may be replaced


def free_bytes(epochs: Iterable[Epoch], capacity_bytes: int, kv_bytes: int) -> int:
    """The free bytes of the device; never below zero (an orphan may exceed a smaller device)."""
    return max(0, capacity_bytes - kv_bytes - sum(epoch.size_bytes for epoch in epochs))


def fit(
    size_bytes: int,
    epochs: Iterable[Epoch],
    capacity_bytes: int,
    sessions: Mapping[int, Session],
    *,
    may_replace: bool,
    kv_bytes: int = 0,
) -> Fit | UnderstudyError:
    """Whether `size_bytes` more fit, or what would make them fit; the error if nothing would."""
    everything = list(epochs)
    free = free_bytes(everything, capacity_bytes, kv_bytes)
    if size_bytes <= free:
        return Fit.NOW
    being_freed = sum(e.size_bytes for e in everything if e.is_being_freed)
    if size_bytes <= free + being_freed:
        return Fit.LATER
    committed = next((e for e in everything if e.phase is EpochPhase.COMMITTED), None)
    if (
        may_replace
        and committed is not None
        and not committed.readers
        and size_bytes <= free + being_freed + committed.size_bytes
    ):
        return Fit.WITHOUT_COMMITTED
    return _out_of_memory(size_bytes, free, everything, capacity_bytes, sessions, kv_bytes)


def device_full(
    error: UnderstudyError,
    epochs: Iterable[Epoch],
    sessions: Mapping[int, Session],
    kv_bytes: int = 0,
) -> UnderstudyError:
    """The driver's error for memory that should be free, with what our own sessions hold."""
    holders, shown = _holders(epochs, sessions, kv_bytes)
    ours, said = "; ".join(shown) or "nothing", error.details.get("said", error.message)
    return UnderstudyError(
        "gms.out_of_memory",
        f"{said}. Held by this service: {ours}. Stop whatever "
        "else uses the device, or use a smaller model",
        **{**error.details, "said": said, "holders": holders},
    )


def _out_of_memory(
    size_bytes: int,
    free: int,
    epochs: Iterable[Epoch],
    capacity_bytes: int,
    sessions: Mapping[int, Session],
    kv_bytes: int,
) -> UnderstudyError:
    holders, shown = _holders(epochs, sessions, kv_bytes)
    return UnderstudyError(
        "gms.out_of_memory",
        f"a slab of {size(size_bytes)} does not fit: the device has {size(capacity_bytes)}, "
        f"{size(free)} of it free"
        + (f"; {'; '.join(shown)}" if shown else "")
        + ". Use a smaller model, a larger device (--device-bytes), or stop what holds the memory",
        capacity_bytes=capacity_bytes,
        needed_bytes=size_bytes,
        free_bytes=free,
        kv_bytes=kv_bytes,
        holders=holders,
    )


def _holders(
    epochs: Iterable[Epoch], sessions: Mapping[int, Session], kv_bytes: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """The holders of each epoch: as data, and, with the KV memory, as phrases for a message."""
    holders: list[dict[str, Any]] = []
    shown = []
    for epoch in epochs:
        if not epoch.size_bytes:
            continue
        users = [s.label for s in sessions.values() if s.epoch == epoch.id]
        users += [f"pid {pid}" for pid in epoch.holders]
        known = {"epoch": epoch.id, "phase": str(epoch.phase), "size_bytes": epoch.size_bytes}
        holders.append({**known, "users": users})
        by = f" used by {', '.join(users)}" if users else " without users"
        shown.append(f"{epoch.phase} epoch {epoch.id[:8]} {size(epoch.size_bytes)}{by}")
    if kv_bytes:
        how = "`gms drop-kv` frees it if no engine uses it"
        shown.append(f"KV memory {size(kv_bytes)} ({how})")
    return holders, shown


TOTALS = (
    *("commits_total", "offloads_total", "restages_total", "recoveries_total"),
    *("condemnations_total", "exports_total", "reclaims_total", "oom_waits_total"),
)


def snapshot(device: Device, at: Callable[[float], str]) -> dict[str, Any]:
    """The device's state; `at` turns one of the machine's instants into RFC 3339."""
    committed, staging = device.committed, device.staging
    shown = committed or staging
    return {
        "state": device.state,
        "epoch": shown.id if shown else None,
        "offloaded": _offloaded(device),
        "identity": dict(shown.identity) if shown and shown.identity else None,
        "layout_hash": committed.layout_hash if committed else None,
        "digest": (committed.digest or "pending") if committed else None,
        "committed_bytes": committed.size_bytes if committed else 0,
        "staging_bytes": staging.size_bytes if staging else 0,
        "superseded_bytes": _bytes(device, EpochPhase.SUPERSEDED),
        "releasing_bytes": _bytes(device, EpochPhase.RELEASING, EpochPhase.ORPHANED),
        "capacity_bytes": device.capacity_bytes,
        "tensors": committed.tensors if committed else 0,
        "slabs": len(committed.slab_sizes) if committed else 0,
        "sessions": [_session(s, at) for s in device.sessions.values() if s.state not in QUEUED],
        "waiting": [_waiter(s, at) for s in device.sessions.values() if s.state in QUEUED],
        "unowned": [
            _unowned(e)
            for e in device.epochs.values()
            if e.phase in (EpochPhase.RELEASING, EpochPhase.ORPHANED)
        ],
        "problem": device.problem,
        **{name: getattr(device, name) for name in TOTALS},
    }


def epochs_in_full(device: Device) -> list[dict[str, Any]]:
    """Every epoch with its slabs, readers and manifest (as bytes): what `gms inspect` shows."""
    return [
        {
            "epoch": epoch.id,
            "phase": str(epoch.phase),
            "slab_sizes": list(epoch.slab_sizes),
            "layout_hash": epoch.layout_hash or None,
            "identity": dict(epoch.identity) if epoch.identity else None,
            "readers": [device.sessions[s].label for s in sorted(epoch.readers)],
            "holders": list(epoch.holders),
            "manifest": epoch.manifest,
        }
        for epoch in device.epochs.values()
    ]


def _who(session: Session) -> dict[str, Any]:
    return {
        "engine": session.request.engine,
        "incarnation": session.request.incarnation,
        "rank": session.request.rank,
        "pid": session.pid,
    }


def _session(session: Session, at: Callable[[float], str]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        **_who(session),
        "mode": "ro" if session.state is SessionState.READING else "rw",
        "state": str(session.state),
        "epoch": session.epoch,
        "since": at(session.since_ms),
    }
    if session.total_bytes and session.state is not SessionState.READING:
        shown["done_bytes"], shown["total_bytes"] = session.done_bytes, session.total_bytes
    return shown


def _waiter(session: Session, at: Callable[[float], str]) -> dict[str, Any]:
    return {
        **_who(session),
        "mode": str(session.request.mode),
        "reason": session.reason,
        "message": session.reason_message,
        "since": at(session.since_ms),
        "deadline": at(session.deadline_ms) if session.deadline_ms is not None else None,
    }


def _unowned(epoch: Epoch) -> dict[str, Any]:
    return {
        "epoch": epoch.id,
        "phase": str(epoch.phase),
        "size_bytes": epoch.size_bytes,
        "holders": list(epoch.holders),
    }


def _offloaded(device: Device) -> dict[str, Any] | None:
    """The host copy that stands for what was committed."""
    copy = device.offloaded
    if copy is None:
        return None
    return {"copy": copy.epoch, "size_bytes": copy.size_bytes, "digest": copy.digest}


def _bytes(device: Device, *phases: EpochPhase) -> int:
    return sum(e.size_bytes for e in device.epochs.values() if e.phase in phases)
