"""Carries out the effects of a device's machine: frames to clients, calls to the driver.

It decides nothing. Driver calls run on one thread, in order. Closes that free memory run on a
second one and exports of the committed epoch on a third: neither a dead engine's memory nor a
writer's slabs delay a newcomer. None of them maps memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from gms import messages as msg
from gms import names
from gms.core import effects as fx
from gms.core import events as ev
from gms.core.device import Device
from gms.server.driver_thread import DriverThread
from gms.server.journal import CommitJournal
from gms.server.memory_performer import MemoryPerformer
from gms.server.vault import Vault
from gms.server.watch import MemoryWatch
from gms.vmm.interface import Allocation, release_all
from plumbing.errors import UnderstudyError
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import FDS_PER_FRAME_MAX, MANIFEST_FRAME_BYTES_MAX

Handle = Callable[[ev.DeviceEvent], None]
T = TypeVar("T")


class Threads(NamedTuple):
    """The threads of one device's server, so that no slow call runs on its loop; the closer is the
    last, since it releases what the driver gives up."""

    driver: DriverThread
    lender: DriverThread
    closer: DriverThread


class DevicePerformer(MemoryPerformer):
    """Performs effects for one device; completions go back to the machine as events."""

    def __init__(
        self,
        device: Device,
        device_name: str,
        connections: Mapping[int, Connection],
        handle: Handle,
        log: EventLog,
        threads: Threads,
        vault: Vault,
        watch: MemoryWatch,
        journal: CommitJournal,
    ) -> None:
        super().__init__(device_name, connections, log, threads.closer)
        self._device, self._handle = device, handle
        self._driver, self._lender = threads.driver, threads.lender
        self._vault, self._watch, self._journal = vault, watch, journal
        self._arrived: dict[int, OwnedFd] = {}  # a new slab's descriptor, until it is sent

    def _perform(self, effect: fx.DeviceEffect) -> None:
        match effect:
            case fx.SendMessage():
                self._send_message(effect)
            case fx.GrantWriting():
                self._grant_writing(effect)
            case fx.SendEpoch():
                self._export_epoch(effect)
            case fx.RefuseRequest():
                self._refuse(effect)
            case fx.OpenEpoch(session, epoch):
                name = names.epoch_file(self._name, epoch)
                self._call(
                    session,
                    lambda: self._vault.open_epoch(epoch, name),
                    lambda _: ev.EpochOpened(session),
                )
            case fx.CreateSlab():
                self._create_slab(effect)
            case fx.SealEpoch(session, epoch, manifest):
                self._call(
                    session,
                    lambda: self._vault.seal(epoch, manifest),
                    lambda tensors: ev.Sealed(session, tensors),
                )
            case fx.AdoptEpoch(session, epoch, sizes, manifest):
                fds = self._offered.pop(session, [])
                self._call(
                    session,
                    lambda: self._vault.adopt(epoch, fds, sizes, manifest),
                    lambda tensors: ev.Adopted(session, tensors),
                )
            case fx.DiscardOffer(epoch):
                self._release(epoch, lambda: None)
            case fx.ReleaseEpoch(epoch):
                self._release(epoch, lambda: self._watch.add(epoch))
            case fx.Unwatch(epoch):
                self._watch.discard(epoch)
            case fx.MarkHistory(epoch):
                self._mark_history(epoch)
            case fx.WriteJournal():
                self._write_journal(effect)
            case fx.RecordEvent():
                self._record(effect)

    def close(self) -> None:
        super().close()
        close_all(self._arrived.values())

    # ------------------------------------------------------------------ responses

    def _send_message(self, effect: fx.SendMessage) -> None:
        if isinstance(effect.message, msg.WantedMsg):
            self._expect_manifest(effect.session)
        is_slab = isinstance(effect.message, msg.AllocatedMsg)
        fds = [self._arrived.pop(effect.session)] if is_slab else []
        self._respond(effect, effect.message, fds)

    def _grant_writing(self, effect: fx.GrantWriting) -> None:
        self._expect_manifest(effect.session)
        answer = msg.WritingMsg(
            epoch=effect.epoch,
            epoch_file=names.epoch_file(self._name, effect.epoch),
            capacity_bytes=self._device.capacity_bytes,
            free_bytes=self._device.free_bytes,
            granularity_bytes=self._device.granularity_bytes,
            copy=effect.copy,
        )
        self._respond(effect, answer)

    def _expect_manifest(self, session: int) -> None:
        """Only a writer and an offering survivor may send frames of 16 MiB."""
        conn = self._connections.get(session)
        if conn is not None:
            conn.limit_frames(MANIFEST_FRAME_BYTES_MAX)

    def _export_epoch(self, effect: fx.SendEpoch) -> None:
        self._lender.submit(
            lambda: self._vault.export(effect.epoch),
            lambda fds: self._send_epoch(effect, fds),
            lambda error: self._refuse(fx.RefuseRequest(effect.session, effect.request_id, error)),
        )

    def _send_epoch(self, effect: fx.SendEpoch, fds: list[OwnedFd]) -> None:
        conn = self._connections.get(effect.session)
        epoch = self._device.epochs.get(effect.epoch)
        if conn is None or epoch is None:
            # These may be the last copies: closing them may free memory, which is not for the loop.
            self._closer.submit(lambda: close_all(fds))
            return
        answer = msg.EpochAttachedMsg(
            epoch=epoch.id,
            epoch_file=names.epoch_file(self._name, epoch.id),
            identity=dict(epoch.identity or {}),
            layout_hash=epoch.layout_hash,
            slab_sizes=tuple(epoch.slab_sizes),
            manifest=epoch.manifest,
        )
        conn.send(answer, effect.request_id, fds[:FDS_PER_FRAME_MAX])
        for first in range(FDS_PER_FRAME_MAX, len(fds), FDS_PER_FRAME_MAX):
            more = fds[first : first + FDS_PER_FRAME_MAX]
            conn.send(msg.SlabsMsg(epoch.id, first), effect.request_id, more)

    # ------------------------------------------------------------------ the driver

    def _create_slab(self, effect: fx.CreateSlab) -> None:
        def failed(error: UnderstudyError) -> None:
            is_full = error.code == "gms.device_full"
            kind = ev.DeviceFull if is_full else ev.DriverFailed
            self._handle(kind(effect.session, error))

        self._driver.submit(
            lambda: self._vault.create(effect.epoch, effect.size_bytes),
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

    def _mark_history(self, epoch: str) -> None:
        name = names.epoch_file(self._name, epoch)

        def failed(error: UnderstudyError) -> None:  # the journal records it too
            self._log.record("gms.epoch_file", error.message, severity="warning")

        self._driver.submit(lambda: self._vault.mark_history(name), failed=failed)

    def _write_journal(self, effect: fx.WriteJournal) -> None:
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
        """Give up an epoch's slabs, then call `then`: take them from the vault in order with other
        driver calls, wait for exports in flight, and close them on the closer's thread."""
        self._driver.submit(
            lambda: self._vault.take(epoch),
            lambda slabs: self._lender.submit(
                lambda: None, lambda _: self._close(epoch, slabs, then)
            ),
        )

    def _close(self, epoch: str, slabs: list[Allocation], then: Callable[[], None]) -> None:
        def failed(error: UnderstudyError) -> None:
            message = f"the driver could not free the memory of epoch {epoch}: {error.message}"
            self._log.record("gms.release", message, severity="error", data={"epoch": epoch})
            then()

        self._closer.submit(lambda: release_all(slabs), lambda _: then(), failed)
