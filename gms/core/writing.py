"""A writer's life: from the grant to the commit, slab by slab.

Pure. Losing the writer loses its staging epoch and nothing else; what was committed stays until the
new epoch is on disk. The surprising thing: nothing that takes long is decided here. A slab is made
when it fits (`grants.py`), a manifest is checked and memory is sealed by the driver's thread.
"""

from __future__ import annotations

from gms.core import capacity
from gms.core import effects as fx
from gms.core import events as ev
from gms.core.device import Device
from gms.core.effects import Effect
from gms.core.events import SessionState
from gms.core.grants import Grants
from gms.core.identity import check_identity, first_mismatch
from gms.core.manifest import check_size, layout_hash
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError

# A full device becomes free when a process that died has been reaped, which takes seconds where it
# had pinned memory; the driver does not say when, so it is asked again.
DEVICE_FULL_RETRY_MS = 250
DEVICE_FULL_WAIT_MS = 60_000.0
JOURNAL_RETRY_MS = 1000  # a full disk is mended by people; once a second is soon enough

Effects = list[Effect]


class Writing:
    """What the writer session of a device does, and what the driver answers for it."""

    def __init__(self, device: Device, grants: Grants, stall_ms: float) -> None:
        self.device = device
        self._grants = grants
        self.stall_ms = stall_ms

    def allocate(self, event: ev.Allocate, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.target(ev.Allocate)
        epoch = self.device.epoch_of(session)
        if len(epoch.slab_sizes) >= capacity.SLABS_MAX:
            raise ProtocolError(
                "gms.too_many_slabs",
                f"this epoch has {capacity.SLABS_MAX} slabs, which is the limit; use larger ones",
            )
        session.move(ev.Allocate, now_ms)
        session.asked, session.is_issued = event, False
        session.deadline_ms = now_ms + self.stall_ms
        return []  # it is made as soon as it fits

    def progress(self, event: ev.Progress, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.Progress, now_ms)
        if event.done_bytes > session.done_bytes:  # saying the same again is not progress
            session.done_bytes = event.done_bytes
            if session.state is SessionState.WRITING:  # else we are the ones who are slow
                session.deadline_ms = now_ms + self.stall_ms
        session.total_bytes = event.total_bytes
        return []

    def commit(self, event: ev.Commit, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.target(ev.Commit)
        epoch = self.device.epoch_of(session)
        check_identity(event.identity)
        check_size(event.manifest)
        computed = layout_hash(epoch.slab_sizes, event.manifest)
        if event.layout_hash != computed:
            raise ProtocolError(
                "gms.layout_mismatch",
                f"the layout hash is {event.layout_hash[:16]} there and {computed[:16]} here: the "
                "writer and the server do not mean the same memory",
            )
        announced = session.request.identity
        if announced is not None:
            changed = first_mismatch(announced, event.identity)
            if changed is not None:
                raise UnderstudyError(
                    "gms.identity_changed",
                    f"the checkpoint changed while it was being loaded: {changed}; load it again",
                    field=changed.field,
                )
        session.move(ev.Commit, now_ms)
        session.commit, session.deadline_ms = event, None
        epoch.manifest, epoch.layout_hash = event.manifest, computed
        epoch.identity = dict(event.identity)
        return [fx.SealEpoch(session.id, epoch.id, event.manifest)]

    # ------------------------------------------------------------------ what the driver says

    def epoch_opened(self, event: ev.EpochOpened, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.EpochOpened, now_ms)
        session.deadline_ms = now_ms + self.stall_ms
        return [fx.TellWriting(session.id, session.request.request_id, str(session.epoch))]

    def slab_created(self, event: ev.SlabCreated, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.SlabCreated, now_ms)
        asked, session.asked = session.asked, None
        session.deadline_ms = now_ms + self.stall_ms
        session.full = session.full_since_ms = None
        session.reason = session.reason_message = ""
        sizes = self.device.epoch_of(session).slab_sizes
        if asked is None:
            raise InvariantError(f"session {session.id} got a slab that it did not ask for")
        slab = len(sizes) - 1
        return [fx.TellAllocated(session.id, asked.request_id, slab, sizes[slab])]

    def device_full(self, event: ev.DeviceFull, now_ms: float) -> Effects:
        """The driver has less than our books say: somebody else's memory. Wait, and say so."""
        session = self.device.session(event)
        session.move(ev.DeviceFull, now_ms)
        self.device.epoch_of(session).slab_sizes.pop()
        if session.full_since_ms is None:
            session.full_since_ms = now_ms
            self.device.oom_waits_total += 1
        session.is_issued, session.full = False, event.error
        session.retry_ms = now_ms + DEVICE_FULL_RETRY_MS
        session.deadline_ms = session.full_since_ms + DEVICE_FULL_WAIT_MS
        return self._grants.tell_full(session)

    def sealed(self, event: ev.Sealed, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.Sealed, now_ms)
        session.may_be_journalled = True
        epoch = self.device.epoch_of(session)
        epoch.tensors = event.tensors
        return [self.device.journal_commit(session)]

    def journalled(self, event: ev.Journalled, now_ms: float) -> Effects:
        """On disk: publish. From here on the old epoch is history and the new one is readable."""
        session = self.device.session(event)
        session.move(ev.Journalled, now_ms)
        epoch, commit = self.device.epoch_of(session), session.commit
        if commit is None:
            raise InvariantError(f"session {session.id} was journalled without a commit")
        retired: Effects = []
        is_stale = self.device.is_journal_behind
        if self.device.committed is not None:
            retired, is_stale = self.device.retire(self.device.committed), True
        epoch.turn("publish")
        epoch.readers.add(session.id)
        session.commit = session.retry_ms = self.device.problem = None
        self.device.commits_total += 1
        return [
            fx.TellCommitted(session.id, commit.request_id, epoch.id),
            fx.Record(
                "gms.commit",
                f"{session.label} committed epoch {epoch.id}",
                {"epoch": epoch.id, "size_bytes": epoch.size_bytes, "tensors": epoch.tensors},
            ),
            *retired,
            # What was replaced is history from now on, also after a restart.
            *(self.device.journal() if is_stale else []),
        ]

    def journal_failed(self, event: ev.JournalFailed, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.JournalFailed, now_ms)
        session.retry_ms = now_ms + JOURNAL_RETRY_MS
        told = self.device.problem
        self.device.problem = (
            f"a commit waits for the journal, which cannot be written: {event.why}"
        )
        if told == self.device.problem:
            return []
        return [fx.Record("gms.commit", self.device.problem, severity="error")]
