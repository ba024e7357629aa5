"""What the machine of a device knows: its epochs, its sessions, its journal and its counters.

Pure data with the operations that must not be done by halves: `drop` (forget a session and give up
what it alone kept) and `retire` (take the committed epoch out of service). It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from gms.core import effects as fx
from gms.core import events as ev
from gms.core.capacity import free_bytes
from gms.core.effects import Effects
from gms.core.events import EpochPhase, SessionState
from gms.core.state import HANDING_BACK, WRITER_STATES, Epoch, Session
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError

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
        self.recoveries_total = 0
        self.condemnations_total = 0
        self.commits_total = 0
        self.offloads_total = 0
        self.restages_total = 0
        self.exports_total = 0
        self.reclaims_total = 0
        self.oom_waits_total = 0
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
            return [fx.DiscardOffer(session.epoch)]
        if epoch is None:
            return []
        if epoch.phase is EpochPhase.STAGING:
            self.problem = None
            epoch.turn("lose")
            lost = f"staging epoch {epoch.id} of {session.label} is lost: {why}"
            return [
                fx.ReleaseEpoch(epoch.id),
                # Its record may be on disk already; restore the true one.
                *(self.journal() if session.may_be_journalled else []),
                fx.RecordEvent("gms.reclaim", lost, {"epoch": epoch.id}, severity="warning"),
            ]
        epoch.readers.discard(session.id)
        if epoch.phase is EpochPhase.SUPERSEDED and not epoch.readers:
            epoch.turn("release")
            return [fx.ReleaseEpoch(epoch.id)]
        return []

    def retire(self, epoch: Epoch) -> Effects:
        """Take the committed epoch out of service; its readers keep it until the last leaves."""
        if epoch.readers:
            epoch.turn("supersede")
            return [fx.MarkHistory(epoch.id)]
        # A process without a session may map it: one that has been stopped since a restart.
        epoch.turn("release")
        return [fx.MarkHistory(epoch.id), fx.ReleaseEpoch(epoch.id)]

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
        return [fx.WriteJournal(None, record, self.offloaded)]

    def journal_commit(self, session: Session) -> fx.WriteJournal:
        """Write the epoch that `session` commits, with the one that it replaces."""
        previous = self.committed.record() if self.committed else None
        record = replace(self.epoch_of(session).record(), previous=previous)
        return fx.WriteJournal(session.id, record, self.offloaded)

    def journal_written(self) -> None:
        """A write that no session waits for has ended, successfully or not."""
        self._journal_writes -= 1

    def note_problem(self, event_type: str, problem: str) -> Effects:
        """Show `problem` in the status, and log it if it is new."""
        is_new, self.problem = problem != self.problem, problem
        return [fx.RecordEvent(event_type, problem, severity="error")] if is_new else []

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
