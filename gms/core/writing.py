"""A writer's life: from the grant to the commit, slab by slab.

Pure. Losing the writer loses its staging epoch and nothing else; the committed epoch stays until
the new one is on disk. The surprising thing: nothing slow is done here. A slab is created when it
fits (`grants.py`); the driver's thread checks manifests and seals memory.
"""

from __future__ import annotations

from gms import messages as msg
from gms.core import effects as fx
from gms.core import events as ev
from gms.core.device import Device
from gms.core.effects import Effects
from gms.core.events import SessionState
from gms.core.grants import Grants
from gms.core.identity import check_identity, first_mismatch, identity_hash
from gms.manifest import SLABS_MAX, check_size, layout_hash
from plumbing.errors import ProtocolError, UnderstudyError

# A full device has room again when a dead process has been reaped, which takes seconds if it had
# pinned memory; the driver does not report that, so the call is retried.
DEVICE_FULL_RETRY_MS = 250
DEVICE_FULL_WAIT_MS = 60_000.0
JOURNAL_RETRY_MS = 1000  # operators fix a full disk; once a second is soon enough


class Writing:
    """The requests of a device's writer session, and the driver's completions for it."""

    def __init__(self, device: Device, grants: Grants, stall_ms: float) -> None:
        self.device = device
        self._grants = grants
        self.stall_ms = stall_ms

    def allocate(self, event: ev.Received, message: msg.AllocateMsg, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.target(msg.AllocateMsg)
        if len(self.device.epoch_of(session).slab_sizes) >= SLABS_MAX:
            raise ProtocolError(
                "gms.too_many_slabs",
                f"this epoch has {SLABS_MAX} slabs, which is the limit; use larger ones",
            )
        session.move(msg.AllocateMsg, now_ms)
        session.request_id = event.request_id
        session.asked_bytes, session.is_issued = message.size_bytes, False
        session.deadline_ms = now_ms + self.stall_ms
        return []  # the grants create it as soon as it fits

    def progress(self, event: ev.Received, message: msg.ProgressMsg, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(msg.ProgressMsg, now_ms)
        if message.done_bytes > session.done_bytes:  # repeating a figure is not progress
            session.done_bytes = message.done_bytes
            if session.state is SessionState.WRITING:  # else the writer waits for us
                session.deadline_ms = now_ms + self.stall_ms
        session.total_bytes = message.total_bytes
        return []

    def commit(self, event: ev.Received, message: msg.CommitMsg, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.target(msg.CommitMsg)
        epoch = self.device.epoch_of(session)
        check_identity(message.identity)
        check_size(message.manifest)
        computed = layout_hash(epoch.slab_sizes, message.manifest)
        if message.layout_hash != computed:
            raise ProtocolError(
                "gms.layout_mismatch",
                f"the writer's layout hash is {message.layout_hash[:16]} and the server's is "
                f"{computed[:16]}: they do not describe the same memory",
            )
        if message.restaged_from is not None:
            self._check_restage(message)
        announced = session.request.identity
        if announced is not None:
            changed = first_mismatch(announced, message.identity)
            if changed is not None:
                raise UnderstudyError(
                    "gms.identity_changed",
                    f"the checkpoint changed while it was being loaded: {changed}; load it again",
                    field=changed.field,
                )
        session.move(msg.CommitMsg, now_ms)
        session.request_id, session.deadline_ms = event.request_id, None
        epoch.manifest, epoch.layout_hash = message.manifest, computed
        epoch.identity = dict(message.identity)
        session.is_restaging = message.restaged_from is not None
        if session.is_restaging and self.device.offloaded is not None:
            epoch.digest = self.device.offloaded.digest
        return [fx.SealEpoch(session.id, epoch.id, message.manifest)]

    def _check_restage(self, message: msg.CommitMsg) -> None:
        """What is committed must be the host copy that stands for this device's weights.

        Raises:
            UnderstudyError: `gms.stale_copy`.
        """
        copy = self.device.offloaded
        offered = (message.restaged_from, message.layout_hash, identity_hash(message.identity))
        if copy is None or offered != (copy.epoch, copy.layout_hash, copy.identity_hash):
            raise UnderstudyError(
                "gms.stale_copy",
                f"the host copy {message.restaged_from} does not stand for the weights of this "
                "device (any more); load them again",
            )

    # ------------------------------------------------------------------ completions

    def epoch_opened(self, event: ev.EpochOpened, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.EpochOpened, now_ms)
        session.deadline_ms = now_ms + self.stall_ms
        request_id, session.request_id = session.request_id, 0
        copy = self.device.offloaded  # of the requested identity, or it would not be granted
        is_wanted = copy is not None and not session.request.replace
        offered = copy.epoch if copy is not None and is_wanted else None
        return [fx.GrantWriting(session.id, request_id, str(session.epoch), offered)]

    def slab_created(self, event: ev.SlabCreated, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.SlabCreated, now_ms)
        request_id, session.request_id = session.request_id, 0
        session.asked_bytes = session.full = session.full_since_ms = None
        session.deadline_ms = now_ms + self.stall_ms
        session.reason = session.reason_message = ""
        sizes = self.device.epoch_of(session).slab_sizes
        return [fx.SendMessage(session.id, request_id, msg.AllocatedMsg(len(sizes) - 1, sizes[-1]))]

    def device_full(self, event: ev.DeviceFull, now_ms: float) -> Effects:
        """The driver has less memory than we counted: another program uses it. Wait, and say so."""
        session = self.device.session(event)
        session.move(ev.DeviceFull, now_ms)
        self.device.epoch_of(session).slab_sizes.pop()
        if session.full_since_ms is None:
            session.full_since_ms = now_ms
            self.device.oom_waits_total += 1
        session.is_issued = False
        session.retry_ms = now_ms + DEVICE_FULL_RETRY_MS
        session.deadline_ms = session.full_since_ms + DEVICE_FULL_WAIT_MS
        return self._grants.send_full(session, event.error)

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
        epoch = self.device.epoch_of(session)
        retired: Effects = []
        is_stale = self.device.is_journal_behind
        if self.device.committed is not None:
            retired, is_stale = self.device.retire(self.device.committed), True
        if self.device.offloaded is not None:
            # From here on the device has its own again, and may lose or condemn it.
            self.device.offloaded, is_stale = None, True
        epoch.turn("publish")
        epoch.readers.add(session.id)
        session.retry_ms = self.device.problem = None
        request_id, session.request_id = session.request_id, 0
        self.device.commits_total += 1
        self.device.restages_total += session.is_restaging
        how = (
            "brought the weights back from host memory as" if session.is_restaging else "committed"
        )
        return [
            fx.SendMessage(session.id, request_id, msg.CommittedMsg(epoch.id)),
            fx.RecordEvent(
                "gms.restaged" if session.is_restaging else "gms.commit",
                f"{session.label} {how} epoch {epoch.id}",
                {"epoch": epoch.id, "size_bytes": epoch.size_bytes, "tensors": epoch.tensors},
            ),
            *retired,
            # The replaced epoch is history from now on, also after a restart.
            *(self.device.journal() if is_stale else []),
        ]

    def journal_failed(self, event: ev.JournalFailed, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.JournalFailed, now_ms)
        session.retry_ms = now_ms + JOURNAL_RETRY_MS
        problem = f"a commit waits for the journal, which cannot be written: {event.why}"
        return self.device.note_problem("gms.commit", problem)
