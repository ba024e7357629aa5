"""The epochs of one place's weights: what the machine knows of them, what is on disk, and the
operations that must not be done by halves. It decides nothing.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from msgspec import field
from msgspec.structs import replace

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import WRITER_STATES, Machine, Region, RegionPhase, S, Session
from gms.manifest import LayoutHash, identity_hash
from plumbing.errors import InvariantError, UnderstudyError

UNKNOWN_LAYOUT = LayoutHash("")


class Epoch(Region):
    """One generation of the device's weights."""

    identity: Mapping[str, Any] | None = None
    manifest: bytes = b""
    tensors: int = 0  # how many the manifest lists; known once it is checked
    layout_hash: LayoutHash = UNKNOWN_LAYOUT
    was_published: bool = False  # committed once, here or by an earlier server
    expected: ev.JournalRecord | None = None  # what a survivor's memory must match
    fallback: ev.JournalRecord | None = None  # the same, if the journalled one is gone
    is_history: bool = False  # its file is marked: out of service
    digest: str | None = None  # of the bytes, as its writer computed it
    failed_canaries: set[str] = field(default_factory=set)  # incarnations

    def record(self) -> ev.JournalRecord:
        return ev.JournalRecord(
            epoch=self.id,
            size_bytes=self.size_bytes,
            layout_hash=self.layout_hash,
            identity_hash=identity_hash(self.identity or {}),
            digest=self.digest,
        )


class WeightsClient(Session):
    """A session of weights, with what a writer does."""

    asked_bytes: int | None = None  # of the slab that is being allocated, or waited for
    is_issued: bool = False  # that slab's driver call is under way
    has_waited: bool = False  # for room for a slab
    full: UnderstudyError | None = None  # the driver's error: it has no memory for that slab
    full_since_ms: float | None = None
    may_be_journalled: bool = False
    is_restaging: bool = False  # it has committed what it copied from the host copy
    retry_ms: float | None = None  # when the journal, or the full device, is tried again
    done_bytes: int = 0
    total_bytes: int = 0

    @property
    def wish(self) -> msg.AttachMsg:
        """What a newcomer asked for."""
        if not isinstance(self.request, msg.AttachMsg):
            raise InvariantError(f"session {self.id} has not attached")
        return self.request

    @property
    def may_replace(self) -> bool:
        return isinstance(self.request, msg.AttachMsg) and self.request.replace


class WeightsBooks(Machine[Epoch, WeightsClient], abc.ABC):
    """The state of `WeightsMachine`."""

    what: ClassVar[str] = "weights"
    back: type[ev.SessionEvent] = ev.ReaderBack
    session_type = WeightsClient

    def __init__(
        self,
        *,
        capacity_bytes: int,
        granularity_bytes: int,
        stall_ms: float,
        new_epoch_id: Callable[[], str],
        orphans: Iterable[Epoch] = (),
        is_journal_lost: bool = False,
        is_journal_behind: bool = False,
        offloaded: ev.JournalRecord | None = None,
        now_ms: float = 0.0,
    ) -> None:
        """`orphans` are the epochs of earlier servers whose files exist; the journalled one is
        `expected`. `is_journal_behind`: the epoch on disk is out of service, so the journal must be
        rewritten. `offloaded`: the host copy of what was committed, by the journal."""
        super().__init__(orphans)
        self.capacity_bytes, self.granularity_bytes = capacity_bytes, granularity_bytes
        self.stall_ms = stall_ms
        self.kv_bytes = 0  # what else has of the capacity, as far as is known
        self.is_journal_lost = is_journal_lost  # survivors say what was committed
        # The sealed copy in host memory of what was committed, until the next commit.
        self.offloaded = offloaded
        self.commits_total = self.offloads_total = self.restages_total = 0
        self.recoveries_total = self.condemnations_total = 0
        self.exports_total = self.reclaims_total = self.oom_waits_total = 0
        self.problem: str | None = None  # for operators to fix: a journal that cannot be written
        self.journal_retry_ms = now_ms if is_journal_behind else None
        self.is_journal_behind = False  # the truth is written after the commit under way
        self._journal_writes = 0  # under way, and no session waits for them
        self._new_epoch_id = new_epoch_id
        self._began_ms, self._is_reported = now_ms, not self.orphans
        # The journalled epoch that looked gone: its file may have been removed under its readers.
        self._late: ev.JournalRecord | None = None

    @property
    def committed(self) -> Epoch | None:
        return next(iter(self._in_phase(RegionPhase.SERVED)), None)

    @property
    def staging(self) -> Epoch | None:
        return next(iter(self._in_phase(RegionPhase.MAKING)), None)

    @property
    def writer(self) -> WeightsClient | None:
        return next(iter(self._in(*WRITER_STATES)), None)

    @property
    def orphans(self) -> list[Epoch]:
        return self._in_phase(RegionPhase.ORPHANED)

    @property
    def being_freed(self) -> list[Epoch]:
        """Given up, and no session reads them: they end when their processes do."""
        found = self._in_phase(RegionPhase.RETIRED, RegionPhase.FREEING)
        return [epoch for epoch in found if not self.is_held(epoch)]

    @property
    def state(self) -> str:
        """The place as `gms status` shows it."""
        if self.committed is not None:
            return "committed"
        if self.orphans:
            return "recovering"
        if self.staging is not None:
            return "staging"
        return "offloaded" if self.offloaded is not None else "empty"

    @property
    def free_bytes(self) -> int:
        """Never below zero: an orphan may exceed a smaller device."""
        used_bytes = sum(epoch.size_bytes for epoch in self.regions.values())
        return max(0, self.capacity_bytes - self.kv_bytes - used_bytes)

    def leave(self, event: ev.Received) -> None:
        """A reader that has unmapped its epoch is none any more."""
        session = self.session(event)
        session.move(msg.OffloadMsg, self.now_ms)
        self._forget(session, "it has unmapped the weights")

    def retire(self, epoch: Epoch) -> None:
        """Take the committed epoch out of service; its readers keep it until the last leaves, and
        a process without a session may map it: one that has been stopped since a restart."""
        epoch.turn("retire")
        self.do(ev.MarkRetired(epoch.id))

    # ------------------------------------------------------------------ the journal

    def journal(self) -> None:
        """Write what is true now, unless a commit is being written: that must not be overtaken,
        and it writes the same or corrects it afterwards."""
        self.is_journal_behind = bool(self._in(S.JOURNALLING))
        self.journal_retry_ms = None
        if not self.is_journal_behind:
            self._journal_writes += 1
            record = self.committed.record() if self.committed else None
            self.do(ev.WriteJournal(None, record, self.offloaded))

    def _journal_commit(self, session: WeightsClient) -> None:
        """Write the epoch that `session` commits, with the one that it replaces."""
        previous = self.committed.record() if self.committed else None
        record = replace(self.region_of(session).record(), previous=previous)
        self.do(ev.WriteJournal(session.id, record, self.offloaded))

    @property
    def is_journal_true(self) -> bool:
        """Whether the journal on disk is up to date."""
        is_retrying = self.journal_retry_ms is not None
        return not (self._journal_writes or self.is_journal_behind or is_retrying)

    def _note_problem(self, event_type: str, problem: str) -> None:
        """Show `problem` in the status, and log it if it is new."""
        if problem != self.problem:
            self.problem = problem
            self.record(event_type, problem, "error")

    def phase_shown(self, epoch: Epoch) -> str:
        """`staging`, `committed`, `superseded`, `releasing` or `orphaned`: as operators see it."""
        return "superseded" if self.is_superseded(epoch) else PHASES_SHOWN[epoch.phase]

    def is_superseded(self, epoch: Epoch) -> bool:
        """Out of service, and still read."""
        return epoch.phase is RegionPhase.RETIRED and self.is_held(epoch)


PHASES_SHOWN = {
    RegionPhase.MAKING: "staging",
    RegionPhase.SERVED: "committed",
    RegionPhase.RETIRED: "releasing",
    RegionPhase.FREEING: "releasing",
    RegionPhase.ORPHANED: "orphaned",
}
