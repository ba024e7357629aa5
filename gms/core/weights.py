"""The machine of one place's weights: one writer, a commit, readers. Everything legal is decided
here.

The state that operators see (`empty`, `staging`, `committed`, `recovering`, `offloaded`) is derived
from the epochs, never stored. `decide`, from a request and the epochs to a verdict, is speculative
(called for every waiter at every change), so it changes nothing. The order of its checks is the
order of priorities: a committed epoch is never doubled or lost by accident, and no session writes
while memory without an owner may still be mapped.

Rules that are easy to break:
- At most one epoch is being written, by the one writer, while none is committed. Losing the writer
  loses only that.
- Nothing slow is done here. A slab is created when it fits; the driver's thread checks manifests
  and seals memory.
- Capacity: every epoch counts until the kernel says that no process maps it. Memory that a dying
  process still has is not free, whatever our own accounts say.

Crash without loss: a restarted server finds the epochs of earlier servers by their files, and in
the journal which of them was committed. Only that one is served again, once a survivor has handed
it back; one of another epoch is its reader again: it may be the active engine, so it is never
refused. A writer whose commit was not answered comes back, too; the journal says whether it had
committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import RegionPhase, S, Session
from gms.core.upkeep import Epoch, Upkeep, is_copy_of
from gms.manifest import (
    SLABS_MAX,
    check_identity,
    check_size,
    first_mismatch,
    identity_hash,
    layout_hash,
)
from plumbing.errors import ProtocolError, UnderstudyError, WaitTimeoutError
from plumbing.text import size as size_of

EPOCHS_MAX = 8  # one is committed, one superseded; each keeps a manifest of up to 15 MiB here
EPOCH_BYTES_MAX = 1 << 50  # no device has a pebibyte; sums over all sessions stay below 64 bits
# A full device has room again when a dead process has been reaped, which takes seconds if it had
# pinned memory; the driver does not report that, so the call is retried.
DEVICE_FULL_RETRY_MS = 250
DEVICE_FULL_WAIT_MS = 60_000.0
NO_JOURNAL = ev.LoadedJournal()


PHASES_SHOWN = {
    RegionPhase.MAKING: "staging",
    RegionPhase.SERVED: "committed",
    RegionPhase.RETIRED: "releasing",
    RegionPhase.FREEING: "releasing",
    RegionPhase.ORPHANED: "orphaned",
}


class WeightsMachine(Upkeep):
    """Events in, effects out; see the head of this file and `region.py`."""

    what: ClassVar[str] = "weights"
    again: ClassVar[str] = "read again"

    def __init__(
        self,
        *,
        capacity_bytes: int,
        granularity_bytes: int,
        stall_ms: float,
        new_epoch_id: Callable[[], str],
        orphans: Mapping[str, bool] | None = None,
        journal: ev.LoadedJournal = NO_JOURNAL,
        now_ms: float = 0.0,
    ) -> None:
        """`orphans`, `journal`: what an earlier server has left, as for `Upkeep`."""
        super().__init__(orphans or {}, journal, now_ms)
        self.capacity_bytes, self.granularity_bytes = capacity_bytes, granularity_bytes
        self.stall_ms = stall_ms
        self.kv_bytes = 0  # what else has of the capacity, as far as is known
        self.commits_total = self.restages_total = self.recoveries_total = 0
        self.exports_total = self.reclaims_total = self.oom_waits_total = 0
        self._new_epoch_id = new_epoch_id
        self._began_ms = now_ms

    @property
    def staging(self) -> Epoch | None:
        return next(iter(self._in_phase(RegionPhase.MAKING)), None)

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

    def phase_shown(self, epoch: Epoch) -> str:
        """`staging`, `committed`, `superseded`, `releasing` or `orphaned`: as operators see it."""
        return "superseded" if self.is_superseded(epoch) else PHASES_SHOWN[epoch.phase]

    # ------------------------------------------------------------------ events

    def received(self, event: ev.Received) -> None:
        if event.kv_bytes is not None:
            self.kv_bytes = event.kv_bytes
        super().received(event)

    def _called(self, effect: ev.Effect, result: Any, error: UnderstudyError | None) -> None:
        if isinstance(effect, ev.WriteJournal):
            self._journalled(effect.record, error)
            return
        session = self.writer
        assert isinstance(effect, ev.RegionEffect)
        if session is None or session.region != effect.region:
            return  # its writer has left: what it had is being given up
        if error is not None:
            if isinstance(effect, ev.CreateSlab) and error.code == "gms.device_full":
                self._device_full(session, error)
            else:
                self._refuse(session, error)
            return
        session.move(type(effect), self.now_ms)
        match effect:
            case ev.CreateSlab():
                self._slab_created(session)
            case ev.SealEpoch():
                self.region_of(session).tensors = result
                self.journal()

    def closed(self, session_id: int, reason: str = "") -> None:
        session = self.sessions.get(session_id)
        if session is not None:
            why = f": {reason}" if reason else ""
            self._tell_of(session, f"left{why}", incarnation=session.request.incarnation)
        super().closed(session_id, reason)
        self._offloaders.pop(session_id, None)

    def _tell_of(self, session: Session, what: str, severity: str = "info", **data: Any) -> None:
        engine = session.request.engine
        self.record("gms.session", f"{session.label} {what}", severity, engine=engine, **data)

    # ------------------------------------------------------------------ grants

    def on_attach(self, event: ev.Received, message: msg.AttachMsg) -> None:
        session = self._newcomer(event)
        check_identity(message.identity)
        self._admit(session, event, message.wait_ms)

    def _judge_waiting(self) -> None:
        self._settle_offloads()
        self._judge_allocation()  # before the others: refusing it may make RW free
        for session in self.waiting:
            match self.decide(session.request):
                case "read":
                    self._grant_read(session)
                case "write":
                    self._grant_write(session)
                case UnderstudyError() as error:
                    self._refuse(session, error)
        # Reasons last: a session earlier in the queue may now wait for one that was granted above.
        for session in self.waiting:
            verdict = self.decide(session.request)
            assert isinstance(verdict, tuple), verdict
            self._wait(session, *verdict)

    def decide(self, wish: msg.AttachMsg) -> Verdict | tuple[str, str]:
        """The verdict on `wish`: `read`, `write`, a refusal, or code and sentence of a wait."""
        committed, offloaded = self.committed, self.offloaded
        verdict = None
        if committed is not None:
            verdict = _on_committed(wish, committed)
        elif offloaded is not None:
            verdict = _on_offloaded(wish, offloaded)
        if verdict is not None:
            return verdict
        if self.orphans:
            return (
                "recovering",
                f"memory of the previous server is still mapped: {_held(self.orphans)}; it is freed"
                " when they exit",
            )
        if self.writer is not None:
            return "writer", f"{self.writer.label} is loading the weights"
        if wish.mode == "ro":
            if offloaded is not None:
                return (
                    "offloaded",
                    "the weights are offloaded to host memory until an engine that may write wakes"
                    " up",
                )
            return "not_committed", "nothing is committed and no engine is loading"
        if self.being_freed:
            return (
                "releasing",
                f"memory of a session that has ended is not free yet: {_held(self.being_freed)}",
            )
        if len(self.regions) >= EPOCHS_MAX:
            return (
                "epochs",
                f"{len(self.regions)} epochs of this device are still read, which is the limit;"
                " stop the engines that read superseded ones",
            )
        return "write"

    def _refuse(self, session: Session, error: UnderstudyError) -> None:
        super()._refuse(session, error)
        self._tell_of(session, f"was refused: {error.message}", "warning", error_code=error.code)

    def _grant_read(self, session: Session) -> None:
        epoch = self.committed
        assert epoch is not None, "RO granted with nothing committed"
        session.move("read", self.now_ms)
        session.region, session.deadline_ms = epoch.id, None
        self.exports_total += 1
        sizes = tuple(epoch.slab_sizes)
        grant = msg.EpochAttachedMsg(epoch.id, dict(epoch.identity or {}), sizes, epoch.manifest)
        self.do(ev.SendRegion(session.id, session.take_request_id(), epoch.id, grant))
        self._tell_of(session, f"reads epoch {epoch.id}", epoch=epoch.id)

    def _grant_write(self, session: Session) -> None:
        session.move("write", self.now_ms)
        epoch = Epoch(self._new_epoch_id(), RegionPhase.MAKING)
        self.regions[epoch.id] = epoch
        session.region, session.deadline_ms = epoch.id, self.now_ms + self.stall_ms
        session.reason = ""
        copy = self.offloaded  # of the requested identity, or it would not be granted
        sizes = self.capacity_bytes, self.free_bytes, self.granularity_bytes
        grant = msg.WritingMsg(epoch.id, *sizes, copy.epoch if copy is not None else None)
        self.do(ev.OpenEpoch(session.id, session.take_request_id(), grant, epoch.id))
        self._tell_of(session, f"writes epoch {epoch.id}", epoch=epoch.id)

    # ------------------------------------------------------------------ a writer's life

    def on_allocate(self, event: ev.Received, message: msg.AllocateMsg) -> None:
        session = self.session(event)
        session.accept(message)
        if len(self.region_of(session).slab_sizes) >= SLABS_MAX:
            raise ProtocolError(
                "gms.too_many_slabs",
                f"this epoch has {SLABS_MAX} slabs, which is the limit; use larger ones",
            )
        session.move(message, self.now_ms)
        session.request_id = event.request_id
        session.asked_bytes = message.size_bytes
        session.deadline_ms = self.now_ms + self.stall_ms  # created as soon as it fits

    def _judge_allocation(self) -> None:
        """Issue the writer's slab once it fits."""
        session = self.writer
        if session is None or session.state is not S.ALLOCATING or session.deadline_ms is None:
            return
        if session.retry_ms is not None:
            return  # the driver had no room a moment ago
        granularity = self.granularity_bytes
        size_bytes = -(-session.asked_bytes // granularity) * granularity
        missing = size_bytes - self.free_bytes
        if missing > sum(epoch.size_bytes for epoch in self.being_freed):
            self._refuse(session, self._out_of_memory(size_bytes))
        elif missing <= 0:
            session.deadline_ms = None
            # Counted from now on, so that it is promised once.
            self.region_of(session).slab_sizes.append(size_bytes)
            self.do(ev.CreateSlab(str(session.region), size_bytes))
        else:  # memory that was given up is being freed; the session's deadline is running
            self.oom_waits_total += session.reason != "releasing"
            kv = f"; KV memory takes {size_of(self.kv_bytes)}" if self.kv_bytes else ""
            what = _held(self.being_freed)
            self._wait(session, "releasing", f"memory is being freed: {what}{kv}")

    def on_progress(self, event: ev.Received, message: msg.ProgressMsg) -> None:
        session = self.session(event)
        session.move(message, self.now_ms)
        if message.done_bytes > session.done_bytes:  # repeating a figure is not progress
            session.done_bytes = message.done_bytes
            if session.state is S.WRITING:  # else the writer waits for us
                session.deadline_ms = self.now_ms + self.stall_ms
        session.total_bytes = message.total_bytes

    def on_commit(self, event: ev.Received, message: msg.CommitMsg) -> None:
        session = self.session(event)
        session.accept(message)
        epoch = self.region_of(session)
        check_identity(message.identity)
        check_size(message.manifest)
        computed = layout_hash(epoch.slab_sizes, message.manifest)
        copy = self.offloaded
        if message.restaged_from is not None:
            # It must be the host copy that stands for this device's weights.
            offered = (message.restaged_from, computed, identity_hash(message.identity))
            if copy is None or offered != (copy.epoch, copy.layout_hash, copy.identity_hash):
                raise UnderstudyError(
                    "gms.stale_copy",
                    f"the host copy {message.restaged_from} does not match the weights of this "
                    "device; load them again",
                )
        announced = session.request.identity
        changed = None if announced is None else first_mismatch(announced, message.identity)
        if changed is not None:
            raise UnderstudyError(
                "gms.identity_changed",
                f"the checkpoint changed while it was being loaded: {changed}; load it again",
                field=changed.field,
            )
        session.move(message, self.now_ms)
        session.request_id, session.deadline_ms = event.request_id, None
        epoch.manifest, epoch.layout_hash = message.manifest, computed
        epoch.identity = dict(message.identity)
        if message.restaged_from is not None and copy is not None:
            epoch.digest = copy.digest
        self.do(ev.SealEpoch(epoch.id, message.manifest))

    def _slab_created(self, session: Session) -> None:
        session.full = session.full_since_ms = None
        session.deadline_ms = self.now_ms + self.stall_ms
        session.reason = session.reason_message = ""
        sizes = self.region_of(session).slab_sizes
        self._send(session, msg.AllocatedMsg(len(sizes) - 1, sizes[-1]))

    def _device_full(self, session: Session, error: UnderstudyError) -> None:
        """The driver has less memory than we counted: another program uses it. Wait, and say so."""
        self.region_of(session).slab_sizes.pop()
        if session.full_since_ms is None:
            session.full_since_ms = self.now_ms
            self.oom_waits_total += 1
        session.retry_ms = self.now_ms + DEVICE_FULL_RETRY_MS
        session.deadline_ms = session.full_since_ms + DEVICE_FULL_WAIT_MS
        ours = "; ".join(self._who_holds()) or "nothing"
        session.full = UnderstudyError(
            "gms.out_of_memory",
            f"{error.message}. Held by this service: {ours}. Stop whatever "
            "else uses the device, or use a smaller model",
            **error.details,
        )
        self._wait(session, "device_full", session.full.message)

    def _publish(self, session: Session) -> None:
        epoch = self.region_of(session)
        session.move(ev.WriteJournal, self.now_ms)
        # The device has its own weights again, which may be lost or condemned.
        had_copy, self.offloaded = self.offloaded is not None, None
        is_restaged = epoch.digest is not None  # that of what it was copied from
        epoch.turn("serve")
        epoch.was_published = True
        self.problem = None
        self.commits_total += 1
        self.restages_total += is_restaged
        self._send(session, msg.CommittedMsg(epoch.id))
        how = "restored the weights from host memory as" if is_restaged else "committed"
        self.record(
            "gms.restaged" if is_restaged else "gms.commit",
            f"{session.label} {how} epoch {epoch.id}",
            epoch=epoch.id,
            size_bytes=epoch.size_bytes,
            tensors=epoch.tensors,
        )
        if had_copy:
            self.journal()

    def _left(self, session: Session, why: str) -> None:
        epoch = self.regions.get(session.region or "")
        if epoch is None:
            return
        if epoch.phase is RegionPhase.MAKING and isinstance(session.request, msg.AttachMsg):
            self.problem = None
            epoch.turn("retire")
            if epoch.layout_hash:  # its record may be on disk: restore the true one
                self.journal()
            lost = f"staging epoch {epoch.id} of {session.label} is lost: {why}"
            self.record("gms.reclaim", lost, "warning", epoch=epoch.id)

    # ------------------------------------------------------------------ time

    def _deadlines(self) -> Iterable[float | None]:
        yield from (session.retry_ms for session in self.sessions.values())
        yield self.journal_retry_ms

    def _due(self) -> None:
        if self.journal_retry_ms is not None and self.journal_retry_ms <= self.now_ms:
            self.journal()
        for session in self.sessions.values():
            if session.retry_ms is not None and session.retry_ms <= self.now_ms:
                session.retry_ms = None  # a slab is asked for again

    def _too_late(self, session: Session) -> UnderstudyError:
        if session.full is not None:
            return session.full
        if session.state is S.RETURNING:
            return WaitTimeoutError("gms.rejoin_timeout", f"{session.reason_message}; try again")
        if session.state is S.WAITING:
            return WaitTimeoutError(
                "gms.wait_timeout",
                f"waited {session.request.wait_ms / 1000:g} s for the weights: "
                f"{session.reason_message}",
                reason=session.reason,
            )
        return WaitTimeoutError(
            "gms.writer_stalled",
            f"no progress for {self.stall_ms / 1000:g} s, so this load is given up; a writer must "
            "report progress while it reads from disk",
        )

    # ------------------------------------------------------------------ survivors and orphans

    def is_awaited(self, region_id: str) -> bool:
        epoch = self.regions.get(region_id)
        if epoch is None:
            return False
        may_be_it = self.is_journal_lost and not epoch.is_history
        return (epoch.expected is not None or may_be_it) and super().is_awaited(region_id)

    def _check_survivor(self, message: msg.HandBackMsg) -> None:
        held, size_bytes = message.epoch, sum(message.slab_sizes)
        if held is None:
            raise ProtocolError("gms.bad_offer", "no epoch was handed back")
        if size_bytes > EPOCH_BYTES_MAX:
            raise ProtocolError(
                "gms.bad_epoch",
                f"the epoch has {size_bytes} bytes, and the limit is {EPOCH_BYTES_MAX}",
                limit=EPOCH_BYTES_MAX,
            )
        epoch = self.regions.get(message.region)
        if epoch is None or not self.is_awaited(message.region):
            return  # its word is enough: what came with it was not even kept
        expected = epoch.expected
        check_identity(held.identity)
        check_size(message.manifest)
        computed = layout_hash(message.slab_sizes, message.manifest)
        offered = computed, identity_hash(held.identity)
        if expected is not None and (expected.layout_hash, expected.identity_hash) != offered:
            raise ProtocolError(
                "gms.bad_offer",
                f"the memory offered as epoch {message.region} is not what was committed under that"
                " id; the server takes it from another survivor",
                epoch=message.region,
            )

    def _judge_survivor(self, session: Session, message: msg.HandBackMsg) -> None:
        epoch = self.regions.get(message.region)
        held = message.epoch
        assert held is not None
        if epoch is not None and epoch.phase is RegionPhase.MAKING:
            return  # its old connection has ended, which is about to be reported
        is_orphan = epoch is not None and epoch.phase is RegionPhase.ORPHANED
        if epoch is not None and is_orphan and self._may_publish(epoch, held):
            self._take_back(session, epoch, message)
            return
        if not held.was_committed and not (epoch is not None and epoch.was_published):
            error = UnderstudyError(
                "gms.not_committed",
                f"epoch {message.region} was not committed when the service died, so it is lost; "
                "load the weights again",
                epoch=message.region,
            )
            super()._refuse(session, error)
            return
        # An unknown epoch is history like any other: its file may have been removed.
        if epoch is None:
            epoch = self.regions[message.region] = Epoch(message.region, RegionPhase.ORPHANED)
        if epoch.phase is RegionPhase.ORPHANED:
            epoch.slab_sizes, epoch.was_published = list(message.slab_sizes), True
            self.retire(epoch)
        self._register(session)
        phase = "committed" if epoch.phase is RegionPhase.SERVED else "superseded"
        self._tell_of(session, f"is back as a reader of {phase} epoch {epoch.id}", epoch=epoch.id)

    def _may_publish(self, epoch: Epoch, held: msg.HeldEpoch) -> bool:
        """Without a journal the first survivor decides which epoch was committed."""
        if epoch.expected is not None:
            return True
        is_lost = self.is_journal_lost and not epoch.is_history
        return is_lost and held.was_committed and self.committed is None

    def _recovered(self, epoch: Epoch, offer: msg.HandBackMsg, tensors: int) -> None:
        """The driver holds it: committed again, as if nothing had happened."""
        held = offer.epoch
        assert held is not None
        epoch.identity, epoch.manifest = dict(held.identity), offer.manifest
        epoch.layout_hash = layout_hash(epoch.slab_sizes, offer.manifest)
        epoch.tensors, epoch.was_published = tensors, True
        epoch.digest = epoch.expected.digest if epoch.expected else None
        self.is_journal_lost, self.offloaded = False, None
        self.recoveries_total += 1
        took_ms = round(self.now_ms - self._began_ms)
        self.record(
            "gms.recovered",
            f"epoch {epoch.id} is back from {offer.engine}, {took_ms} ms after the start",
            epoch=epoch.id,
            duration_ms=took_ms,
        )
        self.journal()  # the record may be lost

    def _freed(self, region: Epoch, was: RegionPhase, copy: ev.JournalRecord | None) -> None:
        # Without orphans no survivor can replace a lost journal any more.
        is_over = self.is_journal_lost and not self.orphans
        if is_over or (was is RegionPhase.ORPHANED and region.expected is not None):
            self.is_journal_lost = False
            self._journalled_is_gone(region.expected, copy)

    def _journalled_is_gone(
        self, record: ev.JournalRecord | None, copy: ev.JournalRecord | None
    ) -> None:
        """The journalled epoch's file is free. A host copy of its bytes stands for it: its readers
        may have unmapped it to offload it when the server died."""
        if record is not None and copy is not None and is_copy_of(copy, record):
            self.offloaded = copy
            said = f"epoch {record.epoch} is lost from the device; using its host copy {copy.epoch}"
            size_bytes = record.size_bytes
            self.record(
                "gms.offloaded", said, epoch=record.epoch, copy=copy.epoch, size_bytes=size_bytes
            )
        self.journal()

    def _ended(self, region: Epoch) -> None:
        self.reclaims_total += 1
        said = f"the memory of epoch {region.id} is free"
        self.record("gms.reclaim", said, epoch=region.id, size_bytes=region.size_bytes)

    # ------------------------------------------------------------------ what an error says

    def _out_of_memory(self, size_bytes: int) -> UnderstudyError:
        shown, free = self._who_holds(), self.free_bytes
        return UnderstudyError(
            "gms.out_of_memory",
            f"a slab of {size_of(size_bytes)} does not fit: the device has "
            f"{size_of(self.capacity_bytes)}, {size_of(free)} of it free"
            + (f"; {'; '.join(shown)}" if shown else "")
            + ". Use a smaller model, a larger device (--device-bytes), or stop what holds the"
            " memory",
            capacity_bytes=self.capacity_bytes,
            needed_bytes=size_bytes,
            free_bytes=free,
            kv_bytes=self.kv_bytes,
        )

    def _who_holds(self) -> list[str]:
        """The holders of each epoch, and the KV memory."""
        shown = []
        for epoch in self.regions.values():
            if not epoch.size_bytes:
                continue
            users = [s.label for s in self.sessions.values() if s.region == epoch.id]
            users += [f"pid {pid}" for pid in epoch.pids]
            by = f" used by {', '.join(users)}" if users else " without users"
            what = f"{self.phase_shown(epoch)} epoch {epoch.id[:8]}"
            shown.append(f"{what} {size_of(epoch.size_bytes)}{by}")
        if self.kv_bytes:
            how = "`gms drop-kv` frees it if no engine uses it"
            shown.append(f"KV memory {size_of(self.kv_bytes)} ({how})")
        return shown


Verdict = Literal["read", "write"] | UnderstudyError


def _on_offloaded(wish: msg.AttachMsg, offloaded: ev.JournalRecord) -> UnderstudyError | None:
    """The verdict where other weights are offloaded than the requested ones; None: the same."""
    if wish.identity is None or identity_hash(wish.identity) == offloaded.identity_hash:
        return None
    return UnderstudyError(
        "gms.identity_mismatch",
        f"the weights that are offloaded to host memory as epoch {offloaded.epoch} are not the "
        "requested ones; start every engine with the same checkpoint and settings, or "
        "`gms drop` them",
        epoch=offloaded.epoch,
    )


def _on_committed(wish: msg.AttachMsg, committed: Epoch) -> Verdict:
    """The verdict where something is committed."""
    expected = committed.identity
    known = wish.identity is not None and expected is not None
    mismatch = first_mismatch(expected, wish.identity) if known else None
    if mismatch is None:
        return "read"
    return UnderstudyError(
        "gms.identity_mismatch",
        f"the committed weights are not the requested ones: {mismatch}; start every engine with "
        "the same checkpoint and settings, or `gms drop` the epoch",
        epoch=committed.id,
        field=mismatch.field,
        expected=mismatch.expected,
        offered=mismatch.offered,
    )


def _held(epochs: Iterable[Epoch]) -> str:
    return "; ".join(
        f"epoch {epoch.id}" + (f" by {epoch.holders_shown}" if epoch.pids else "")
        for epoch in epochs
    )
