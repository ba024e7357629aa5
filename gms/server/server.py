"""The server of one device's weights; `memory_server.py` says what such a server is.

Driver calls run on one thread, in order. Closes that free memory run on a second one and exports of
the committed epoch on a third: neither a dead engine's memory nor a writer's slabs delay a
newcomer. None of them maps memory.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from gms import epoch_file, names
from gms import messages as msg
from gms.core import events as ev
from gms.core.device import epochs_in_full, snapshot
from gms.core.machine import DeviceMachine
from gms.server.devices import DeviceUsage
from gms.server.journal import CommitJournal, bytes_elsewhere, left_behind, peek
from gms.server.memory_server import MemoryServer, MemoryWatch, is_held
from gms.server.slab_store import WeightsStore
from gms.vmm.interface import Allocation, DeviceMemory
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.pod.models import device_of
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import FDS_PER_FRAME_MAX, MANIFEST_FRAME_BYTES_MAX
from plumbing.wire.messages import Message

# How long a writer may make no progress. It reports per tensor; reading one from the slowest
# network file system takes seconds.
STALL_MS = 120_000.0

T = TypeVar("T")


class DeviceServer(MemoryServer[DeviceMachine]):
    """The weights of one device."""

    tag, service, catalogue = names.WEIGHTS, "gms", msg.CATALOGUE
    # The closer is the last, since it releases what the driver gives up.
    threads: ClassVar[Sequence[str]] = ("driver", "lender", "closer")

    def __init__(
        self,
        directory: str,
        device: str,
        memory: DeviceMemory,
        capacity_bytes: int,
        *,
        stall_ms: float = STALL_MS,
        restarts_total: int = 0,
        counts_kv: bool = True,
    ) -> None:
        """`counts_kv`: `capacity_bytes` is the limit of weights and KV memory together."""
        path = names.socket_path(directory, device)
        super().__init__(directory, device, memory, path, f"gms-{device}", restarts_total)
        self.capacity_bytes, self.stall_ms = capacity_bytes, stall_ms
        self._usage = None if names.is_host(device) else DeviceUsage(device_of(device))
        self.counts_kv = counts_kv
        self._arrived: dict[int, OwnedFd] = {}  # a new slab's descriptor, until it is sent

    def _begin(self) -> str:
        self._journal = CommitJournal(
            names.journal_path(self.directory, self.device),
            has_epochs=bool(names.epochs_on_disk(self.directory, self.device)),
        )
        self._lender = self._threads["lender"]
        self._store = WeightsStore(self.memory, self.directory)
        self._watch = MemoryWatch(
            self.clock,
            self._driver,
            self._epoch_path,
            lambda epoch: self._handle(ev.EpochFree(epoch, host_copy(self.directory, self.device))),
            lambda epoch, pids: self._handle(ev.HoldersSeen(epoch, pids)),
            lambda epoch, why: self.log.record("gms.epoch", why, "warning", {"epoch": epoch}),
        )
        found = self._journal.loaded
        orphans = left_behind(self.directory, self.device, found.record)
        self.machine = DeviceMachine(
            capacity_bytes=self.capacity_bytes,
            granularity_bytes=self.memory.granularity_bytes,
            stall_ms=self.stall_ms,
            new_epoch_id=lambda: uuid.uuid4().hex,
            orphans=orphans,
            is_journal_lost=found.is_lost,
            offloaded=found.offloaded,
            # A server may have died before it had written that this epoch is out of service.
            is_journal_behind=found.record is not None
            and epoch_file.is_history(self._epoch_path(found.record.epoch)),
            now_ms=self.clock.now_ms(),
        )
        for orphan in orphans:
            self._watch.add(orphan.id)
        return self.machine.device.state

    async def close(self) -> None:
        await super().close()
        close_all(self._arrived.values())
        self._store.close()
        self._journal.close()

    def _snapshot(self) -> dict[str, Any]:
        used_bytes = None if self._usage is None else self._usage.used_bytes()
        return {**snapshot(self.machine.device, self._at), "device_used_bytes": used_bytes}

    def _in_full(self) -> dict[str, Any]:
        return {"epochs": epochs_in_full(self.machine.device)}

    def opened(self, conn: Connection) -> None:
        super().opened(conn)
        conn.limit_frames(msg.REQUEST_BYTES_MAX)

    def _feed(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        is_mapped, kv_bytes, copy = False, None, None
        if self.counts_kv and isinstance(message, msg.AttachMsg | msg.AllocateMsg):
            kv_bytes = epoch_file.kv_bytes(self.directory, self.device)
            kv_bytes += bytes_elsewhere(self.directory, self.device)
        match message:
            case msg.SlabsMsg() | msg.OfferMsg():
                if not self._take_offer(conn, message, fds):
                    return
            case msg.AttachMsg():
                self._watch_process(conn)
            case msg.RejoinMsg(epoch=epoch):
                self._watch_process(conn)
                self._check_survivor(epoch)
            case msg.AllocateMsg():
                session = self.machine.device.sessions.get(conn.id)
                if session is not None and session.epoch is not None:
                    self._check_held(session.epoch)
            case msg.DropMsg(even_if_mapped=False) | msg.OffloadMsg():
                committed = self.machine.device.committed
                is_mapped = committed is not None and is_held(self._epoch_path(committed.id))
                copy = host_copy(self.directory, self.device)
        pid = conn.peer.pid
        self._handle(ev.Received(conn.id, request_id, message, pid, is_mapped, kv_bytes, copy))

    def _check_survivor(self, epoch: str) -> None:
        """It must hold the epoch's file, unless that was removed under all its holders.

        Raises:
            ProtocolError: `gms.bad_epoch`, `gms.epoch_not_held`.
            UnderstudyError: `gms.server_exhausted`.
        """
        if not names.is_epoch_id(epoch):
            raise ProtocolError("gms.bad_epoch", f"{epoch[:64]!r} is not an epoch id")
        if os.path.exists(self._epoch_path(epoch)):
            self._check_held(epoch)

    def _check_held(self, epoch: str) -> None:
        """No slab before the flock: without it, nothing would show that the memory is in use.

        Raises:
            ProtocolError: `gms.epoch_not_held`.
            UnderstudyError: `gms.server_exhausted`, the file cannot be opened.
        """
        if not is_held(self._epoch_path(epoch)):
            raise ProtocolError(
                "gms.epoch_not_held",
                "hold a shared flock on the epoch's file before the first allocation",
            )

    def _take_offer(
        self, conn: Connection, message: msg.SlabsMsg | msg.OfferMsg, fds: list[OwnedFd]
    ) -> bool:
        """Collect what a survivor hands back; returns whether the offer is complete."""
        session = self.machine.device.sessions.get(conn.id)
        is_asked = session is not None and session.state is ev.SessionState.OFFERING
        if session is None or session.rejoin is None or not is_asked:
            raise ProtocolError(
                "gms.unexpected_message", f"only a survivor that was asked may send {message.TYPE}"
            )
        count = len(session.rejoin.slab_sizes)
        have = self._take_offered(conn.id, fds)
        if have > count:
            raise ProtocolError(
                "gms.bad_offer", f"{have} descriptors came for an epoch of {count} slabs"
            )
        if isinstance(message, msg.SlabsMsg):
            return False
        if have != count or message.epoch != session.rejoin.epoch:
            raise ProtocolError(
                "gms.bad_offer", f"an offer of {count} slabs came with {have} descriptors"
            )
        return True

    def _epoch_path(self, epoch: str) -> str:
        return os.path.join(self.directory, names.epoch_file(self.device, epoch))

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: ev.DeviceEffect) -> None:
        match effect:
            case ev.SendMessage():
                self._send_message(effect)
            case ev.GrantWriting():
                self._grant_writing(effect)
            case ev.SendEpoch(epoch=epoch):
                self._lender.submit(
                    lambda: self._store.export(epoch, writable=False),
                    lambda fds: self._send_epoch(effect, fds),
                    lambda error: self._refuse(effect, error),
                )
            case ev.RefuseRequest():
                self._refuse(effect, effect.error)
            case ev.OpenEpoch(session, epoch):
                name = names.epoch_file(self.device, epoch)
                self._call(
                    session,
                    lambda: self._store.open_epoch(epoch, name),
                    lambda _: ev.EpochOpened(session),
                )
            case ev.CreateSlab():
                self._create_slab(effect)
            case ev.SealEpoch(session, epoch, manifest):
                self._call(
                    session,
                    lambda: self._store.seal(epoch, manifest),
                    lambda tensors: ev.Sealed(session, tensors),
                )
            case ev.AdoptEpoch(session, epoch, sizes, manifest):
                fds = self._offered.pop(session, [])
                self._call(
                    session,
                    lambda: self._store.adopt(epoch, fds, sizes, manifest),
                    lambda tensors: ev.Adopted(session, tensors),
                )
            case ev.DiscardOffer(epoch):
                self._release(epoch, lambda: None)
            case ev.ReleaseEpoch(epoch):
                self._release(epoch, lambda: self._watch.add(epoch))
            case ev.Unwatch(epoch):
                self._watch.discard(epoch)
            case ev.MarkHistory(epoch):  # the journal records it too
                self._driver.submit(
                    lambda: epoch_file.mark_history(self._epoch_path(epoch)),
                    failed=self._warn("gms.epoch_file", f"mark epoch {epoch} as out of service"),
                )
            case ev.WriteJournal():
                self._write_journal(effect)
            case ev.RecordEvent():
                self._record(effect)

    def _send_message(self, effect: ev.SendMessage) -> None:
        if isinstance(effect.message, msg.WantedMsg):
            self._expect_manifest(effect.session)
        is_slab = isinstance(effect.message, msg.AllocatedMsg)
        fds = [self._arrived.pop(effect.session)] if is_slab else []
        self._respond(effect, effect.message, fds)

    def _grant_writing(self, effect: ev.GrantWriting) -> None:
        self._expect_manifest(effect.session)
        answer = msg.WritingMsg(
            epoch=effect.epoch,
            epoch_file=names.epoch_file(self.device, effect.epoch),
            capacity_bytes=self.capacity_bytes,
            free_bytes=self.machine.device.free_bytes,
            granularity_bytes=self.memory.granularity_bytes,
            copy=effect.copy,
        )
        self._respond(effect, answer)

    def _expect_manifest(self, session: int) -> None:
        """Only a writer and an offering survivor may send frames of 16 MiB."""
        conn = self._conns.get(session)
        if conn is not None:
            conn.limit_frames(MANIFEST_FRAME_BYTES_MAX)

    def _send_epoch(self, effect: ev.SendEpoch, fds: list[OwnedFd]) -> None:
        epoch = self.machine.device.epochs.get(effect.epoch)
        if epoch is None:
            self._closer.submit(lambda: close_all(fds))
            return
        answer = msg.EpochAttachedMsg(
            epoch=epoch.id,
            epoch_file=names.epoch_file(self.device, epoch.id),
            identity=dict(epoch.identity or {}),
            layout_hash=epoch.layout_hash,
            slab_sizes=tuple(epoch.slab_sizes),
            manifest=epoch.manifest,
        )
        self._respond(effect, answer, fds[:FDS_PER_FRAME_MAX])
        for first in range(FDS_PER_FRAME_MAX, len(fds), FDS_PER_FRAME_MAX):
            more = fds[first : first + FDS_PER_FRAME_MAX]
            self._respond(effect, msg.SlabsMsg(epoch.id, first), more)

    def _create_slab(self, effect: ev.CreateSlab) -> None:
        def failed(error: UnderstudyError) -> None:
            is_full = error.code == "gms.device_full"
            kind = ev.DeviceFull if is_full else ev.DriverFailed
            self._handle(kind(effect.session, error))

        self._driver.submit(
            lambda: self._store.create(effect.epoch, effect.size_bytes),
            lambda fd: self._slab_created(effect.session, fd),
            failed,
        )

    def _slab_created(self, session: int, fd: OwnedFd) -> None:
        self._arrived[session] = fd
        self._handle(ev.SlabCreated(session))
        unclaimed = self._arrived.pop(session, None)  # its writer has left meanwhile
        if unclaimed is not None:
            self._closer.submit(unclaimed.close)

    def _call(
        self, session: int, work: Callable[[], T], completed: Callable[[T], ev.SessionEvent]
    ) -> None:
        """Call the driver for a session, which a failure ends."""
        self._driver.submit(
            work,
            lambda result: self._handle(completed(result)),
            lambda error: self._handle(ev.DriverFailed(session, error)),
        )

    def _write_journal(self, effect: ev.WriteJournal) -> None:
        session = effect.session

        def done(_: None) -> None:
            self._handle(ev.JournalKept() if session is None else ev.Journalled(session))

        def failed(error: UnderstudyError) -> None:
            if session is None:
                self._handle(ev.JournalBehind(error.message))
            else:
                self._handle(ev.JournalFailed(session, error.message))

        self._driver.submit(
            lambda: self._journal.write(effect.record, effect.offloaded), done, failed
        )

    def _release(self, epoch: str, then: Callable[[], None]) -> None:
        """Give up an epoch's slabs, then call `then`: take them from the store in order with other
        driver calls, wait for exports in flight, and close them on the closer's thread."""

        def taken(slabs: list[Allocation]) -> None:
            self._lender.submit(
                lambda: None, lambda _: self._close_slabs("epoch", epoch, slabs, then)
            )

        self._driver.submit(lambda: self._store.take(epoch), taken)


def host_copy(directory: str, device: str) -> ev.JournalRecord | None:
    """The host copy of the weights of `device`, if a living process besides its server holds it:
    a server can be killed at any moment, and its keeper then hands the copy back."""
    host = names.offload_device(device)
    record = peek(names.journal_path(directory, host))
    if record is None:
        return None
    path = os.path.join(directory, names.epoch_file(host, record.epoch))
    return record if is_held(path) and not epoch_file.is_history(path) else None
