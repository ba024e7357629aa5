"""Carries out the effects of a device's machine: frames to clients, calls to the driver.

It decides nothing. Driver calls run on one thread, in order. Closes that free memory run on a
second one and exports of the committed epoch on a third: neither a dead engine's memory nor a
writer's slabs delay a newcomer. None of them maps memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from gms import epoch_file, names
from gms import messages as msg
from gms.core import effects as fx
from gms.core import events as ev
from gms.core.device import Device
from gms.server.driver_thread import DriverThread
from gms.server.journal import CommitJournal
from gms.server.vault import Vault
from gms.server.watch import EpochWatch
from gms.vmm.interface import Allocation, release_all
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.service.events import EventLog
from plumbing.shortage import explain
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import FDS_PER_FRAME_MAX, MANIFEST_FRAME_BYTES_MAX
from plumbing.wire.messages import Message

Handle = Callable[[ev.DeviceEvent], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Threads:
    """The threads of one device's server, so that no slow call runs on its loop."""

    driver: DriverThread
    lender: DriverThread
    closer: DriverThread


class DevicePerformer:
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
        watch: EpochWatch,
        journal: CommitJournal,
    ) -> None:
        self.protocol_errors_total = 0
        self._device, self._name = device, device_name
        self._connections = connections
        self._handle, self._log = handle, log
        self._driver, self._lender, self._closer = threads.driver, threads.lender, threads.closer
        self._vault, self._watch, self._journal = vault, watch, journal
        self._arrived: dict[int, OwnedFd] = {}  # a new slab's descriptor, until it is sent
        self._offered: dict[int, list[OwnedFd]] = {}  # by session, until they are adopted

    def perform(self, effects: fx.Effects) -> None:
        """Carry out every effect: one that fails costs the session that it answers, and never the
        effects behind it."""
        for effect in effects:
            try:
                self._perform(effect)
            except (UnderstudyError, OSError) as error:
                self._failed(effect, error)

    def _failed(self, effect: fx.DeviceEffect, error: UnderstudyError | OSError) -> None:
        what = type(effect).__name__
        self._log.record("gms.effect", f"{what} failed: {error}", severity="error")
        if isinstance(effect, fx.Respond) and effect.session in self._connections:
            self._connections[effect.session].close(f"it cannot be answered: {error}")

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
                data = {"device_uuid": self._name, **effect.data}
                self._log.record(effect.type, effect.message, effect.severity, data)

    def close(self) -> None:
        """Close the descriptors that were not passed on yet."""
        close_all(self._arrived.values())
        for fds in self._offered.values():
            close_all(fds)

    # ------------------------------------------------------------------ offers

    def take_offered(self, session: int, fds: list[OwnedFd], count_max: int) -> int:
        """Keep descriptors that a survivor hands back (taken); returns how many there are now.

        Raises:
            ProtocolError: `gms.bad_offer`, more than it has slabs.
        """
        kept = self._offered.setdefault(session, [])
        kept += fds
        if len(kept) > count_max:
            raise ProtocolError(
                "gms.bad_offer", f"{len(kept)} descriptors came for an epoch of {count_max} slabs"
            )
        return len(kept)

    def forget(self, session: int) -> None:
        """A connection has ended: close what it had offered so far."""
        fds = self._offered.pop(session, [])
        if fds:
            self._closer.submit(lambda: close_all(fds))

    # ------------------------------------------------------------------ responses

    def _send_message(self, effect: fx.SendMessage) -> None:
        if isinstance(effect.message, msg.WantedMsg):
            self._expect_manifest(effect.session)
        is_slab = isinstance(effect.message, msg.AllocatedMsg)
        fds = [self._arrived.pop(effect.session)] if is_slab else []
        self._send(effect, effect.message, *fds)

    def _grant_writing(self, effect: fx.GrantWriting) -> None:
        self._expect_manifest(effect.session)
        answer = msg.WritingMsg(
            epoch=effect.epoch,
            epoch_file=names.epoch_file(self._name, effect.epoch),
            capacity_bytes=self._device.capacity_bytes,
            free_bytes=self._device.free_bytes,
            granularity_bytes=self._device.granularity_bytes,
        )
        self._send(effect, answer)

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

    def _refuse(self, effect: fx.RefuseRequest) -> None:
        # A client's fault that was found late, on the driver's thread: a manifest, an offer.
        self.protocol_errors_total += isinstance(effect.error, ProtocolError)
        conn = self._connections.get(effect.session)
        if conn is not None:
            conn.fault(effect.error, effect.request_id)

    def _send(self, effect: fx.Respond, message: Message, *fds: OwnedFd) -> None:
        conn = self._connections.get(effect.session)
        if conn is None:
            self._closer.submit(lambda: close_all(fds))
        else:
            conn.send(message, effect.request_id, fds)

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

        self._driver.submit(lambda: self._journal.write(effect.record), done, failed)

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
            message = f"the driver did not take memory of epoch {epoch} back: {error.message}"
            self._log.record("gms.release", message, severity="error", data={"epoch": epoch})
            then()

        self._closer.submit(lambda: release_all(slabs), lambda _: then(), failed)


def check_held(path: str) -> None:
    """No slab before the flock: without it, nothing would show that the memory is in use.

    Raises:
        ProtocolError: `gms.epoch_not_held`.
        UnderstudyError: `gms.server_exhausted`, the file cannot be opened.
    """
    if not is_held(path):
        raise ProtocolError(
            "gms.epoch_not_held",
            "hold a shared flock on the epoch's file before the first allocation",
        )


def is_held(path: str) -> bool:
    """Whether any process holds the epoch's file.

    Raises:
        UnderstudyError: `gms.server_exhausted`, the file cannot be opened.
    """
    try:
        return epoch_file.is_held(path)
    except OSError as error:
        why = explain(error.errno, "the memory service")
        raise UnderstudyError(
            "gms.server_exhausted", f"the memory service cannot open {path}: {why}"
        ) from error
