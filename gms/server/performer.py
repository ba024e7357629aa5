"""What the machine of a device wants done, done: frames to peers, calls to the driver.

It decides nothing. Driver calls run on one thread, in order. The closes that free memory run on
another, and so does lending what is committed: neither a dead engine's memory nor a writer's slabs
delay a newcomer. None of them maps memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from gms import epoch_file, names
from gms import messages as msg
from gms.core import effects as fx
from gms.core import events as ev
from gms.core.device import Device
from gms.server.journal import Journal
from gms.server.vault import Vault
from gms.server.watch import EpochWatch
from gms.vmm.driver_thread import DriverThread
from gms.vmm.interface import Allocation
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import FDS_PER_FRAME_MAX, MANIFEST_FRAME_BYTES_MAX
from plumbing.wire.messages import Message

Handle = Callable[[ev.Event], None]


class Performer:
    """Performs effects for one device; completions go back to the machine as events."""

    def __init__(
        self,
        device_name: str,
        tag: str,
        device: Device,
        connections: Mapping[int, Connection],
        handle: Handle,
        log: EventLog,
        *,
        driver: DriverThread,
        lender: DriverThread,
        closer: DriverThread,
        vault: Vault,
        watch: EpochWatch,
        journal: Journal,
    ) -> None:
        self.protocol_errors_total = 0
        self._name, self._tag = device_name, tag
        self._device = device
        self._connections = connections
        self._handle = handle
        self._log = log
        self._driver, self._lender, self._closer = driver, lender, closer
        self._vault, self._watch, self._journal = vault, watch, journal
        self._arrived: dict[int, OwnedFd] = {}  # a new slab's descriptor, until it is sent
        self._offered: dict[int, list[OwnedFd]] = {}  # by session, until they are adopted
        self._perform_by: Mapping[type[fx.Effect], Callable[[Any], None]] = {
            fx.TellWaiting: lambda e: self._send(e, msg.Waiting(e.reason, e.message)),
            fx.TellWriting: self._tell_writing,
            fx.TellAttached: self._tell_attached,
            fx.TellAllocated: self._tell_allocated,
            fx.TellCommitted: lambda e: self._send(e, msg.Committed(e.epoch)),
            fx.TellRejoined: lambda e: self._send(e, msg.Rejoined(e.epoch)),
            fx.AskOffer: self._ask_offer,
            fx.TellDropped: lambda e: self._send(e, msg.Dropped(e.epoch, e.readers)),
            fx.AskDigest: lambda e: self._send(e, msg.DigestWanted(e.epoch)),
            fx.TellVerified: lambda e: self._send(
                e, msg.Verified(e.epoch, e.expected, e.found, e.reader)
            ),
            fx.Refuse: self._refuse,
            fx.OpenEpoch: self._open_epoch,
            fx.CreateSlab: self._create_slab,
            fx.SealEpoch: self._seal_epoch,
            fx.AdoptEpoch: self._adopt_epoch,
            fx.DiscardOffer: lambda e: self._release(e.epoch, lambda: None),
            fx.Unwatch: lambda e: self._watch.discard(e.epoch),
            fx.MarkHistory: self._mark_history,
            fx.WriteJournal: self._write_journal,
            fx.ReleaseEpoch: lambda e: self._release(e.epoch, lambda: self._watch.add(e.epoch)),
            fx.Record: self._record,
        }

    def perform(self, effect: fx.Effect) -> None:
        self._perform_by[type(effect)](effect)

    def close(self) -> None:
        """Let go of descriptors that were on their way somewhere."""
        close_all(self._arrived.values())
        for fds in self._offered.values():
            close_all(fds)

    # ------------------------------------------------------------------ offers

    def take_offered(self, session: int, fds: list[OwnedFd], count_max: int) -> int:
        """Keep descriptors that a survivor hands back (taken); how many there are by now.

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
        """A connection has ended: what it handed back by halves goes."""
        fds = self._offered.pop(session, [])
        if fds:
            self._closer.submit(lambda: close_all(fds))

    # ------------------------------------------------------------------ answers

    def _ask_offer(self, effect: fx.AskOffer) -> None:
        self._await_manifest(effect.session)
        self._send(effect, msg.Wanted(effect.epoch))

    def _await_manifest(self, session: int) -> None:
        """Nobody else may send us 16 MiB: neither a newcomer nor a reader has a reason to."""
        conn = self._connections.get(session)
        if conn is not None:
            conn.limit_frames(MANIFEST_FRAME_BYTES_MAX)

    def _tell_writing(self, effect: fx.TellWriting) -> None:
        self._await_manifest(effect.session)
        answer = msg.Writing(
            epoch=effect.epoch,
            epoch_file=names.epoch_file(self._name, effect.epoch, self._tag),
            capacity_bytes=self._device.capacity_bytes,
            free_bytes=self._device.free_bytes,
            granularity_bytes=self._device.granularity_bytes,
        )
        self._send(effect, answer)

    def _tell_attached(self, effect: fx.TellAttached) -> None:
        self._lender.submit(
            lambda: self._vault.export(effect.epoch),
            lambda fds: self._send_epoch(effect, fds),
            lambda error: self._refuse(fx.Refuse(effect.session, effect.request_id, error)),
        )

    def _send_epoch(self, effect: fx.TellAttached, fds: list[OwnedFd]) -> None:
        conn = self._connections.get(effect.session)
        epoch = self._device.epochs.get(effect.epoch)
        if conn is None or epoch is None:
            # Perhaps the last copies: closing them may free, which is not for the loop.
            self._closer.submit(lambda: close_all(fds))
            return
        answer = msg.Attached(
            epoch=epoch.id,
            epoch_file=names.epoch_file(self._name, epoch.id, self._tag),
            identity=dict(epoch.identity or {}),
            layout_hash=epoch.layout_hash,
            slab_sizes=tuple(epoch.slab_sizes),
            manifest=epoch.manifest,
        )
        conn.send(answer, effect.request_id, fds[:FDS_PER_FRAME_MAX])
        for first in range(FDS_PER_FRAME_MAX, len(fds), FDS_PER_FRAME_MAX):
            more = fds[first : first + FDS_PER_FRAME_MAX]
            conn.send(msg.Slabs(epoch.id, first), effect.request_id, more)

    def _tell_allocated(self, effect: fx.TellAllocated) -> None:
        fd = self._arrived.pop(effect.session)
        self._send(effect, msg.Allocated(effect.slab, effect.size_bytes), fd)

    def _refuse(self, effect: fx.Refuse) -> None:
        # A peer's fault that was found late, on the driver's thread: a manifest, an offer.
        self.protocol_errors_total += isinstance(effect.error, ProtocolError)
        conn = self._connections.get(effect.session)
        if conn is not None:
            conn.fault(effect.error, effect.request_id)

    def _send(self, effect: fx.Answer, message: Message, *fds: OwnedFd) -> None:
        conn = self._connections.get(effect.session)
        if conn is None:
            self._closer.submit(lambda: close_all(fds))
        else:
            conn.send(message, effect.request_id, fds)

    # ------------------------------------------------------------------ the driver

    def _open_epoch(self, effect: fx.OpenEpoch) -> None:
        name = names.epoch_file(self._name, effect.epoch, self._tag)
        self._call(
            effect.session,
            lambda: self._vault.open_epoch(effect.epoch, name),
            lambda _: self._handle(ev.EpochOpened(effect.session)),
        )

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
        unclaimed = self._arrived.pop(session, None)  # its writer left in the meantime
        if unclaimed is not None:
            self._closer.submit(unclaimed.close)

    def _seal_epoch(self, effect: fx.SealEpoch) -> None:
        self._call(
            effect.session,
            lambda: self._vault.seal(effect.epoch, effect.manifest),
            lambda tensors: self._handle(ev.Sealed(effect.session, tensors)),
        )

    def _adopt_epoch(self, effect: fx.AdoptEpoch) -> None:
        fds = self._offered.pop(effect.session, [])
        self._call(
            effect.session,
            lambda: self._vault.adopt(effect.epoch, fds, effect.slab_sizes, effect.manifest),
            lambda tensors: self._handle(ev.Adopted(effect.session, tensors)),
        )

    def _call(self, session: int, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Have the driver work for a session, which a failure ends."""
        self._driver.submit(work, done, lambda error: self._handle(ev.DriverFailed(session, error)))

    def _mark_history(self, effect: fx.MarkHistory) -> None:
        name = names.epoch_file(self._name, effect.epoch, self._tag)

        def failed(error: UnderstudyError) -> None:  # the journal says it too
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
        """Take it from the vault (in order with other calls), let what is being lent of it be
        lent, and close it where that may last."""

        def failed(error: UnderstudyError) -> None:
            said = f"the driver did not take memory of epoch {epoch} back: {error.message}"
            self._log.record("gms.release", said, severity="error", data={"epoch": epoch})
            then()

        def close(slabs: list[Allocation]) -> None:
            with contextlib.ExitStack() as stack:
                for slab in slabs:
                    stack.callback(slab.release)

        def give_up(slabs: list[Allocation]) -> None:
            def is_lent(_: None) -> None:
                self._closer.submit(lambda: close(slabs), lambda _: then(), failed)

            self._lender.submit(lambda: None, is_lent)

        self._driver.submit(lambda: self._vault.take(epoch), give_up)

    def _record(self, effect: fx.Record) -> None:
        data = {"device_uuid": self._name, **effect.data}
        self._log.record(effect.type, effect.message, effect.severity, data)


def check_held(path: str) -> None:
    """No slab before the flock: without it, nothing would say that the memory is in use.

    Raises:
        ProtocolError: `gms.epoch_not_held`.
        UnderstudyError: `gms.server_exhausted`, it could not be looked at.
    """
    if not is_held(path):
        raise ProtocolError(
            "gms.epoch_not_held",
            "hold a shared flock on the epoch's file before the first allocation",
        )


def is_held(path: str) -> bool:
    """Whether any process holds the epoch's file.

    Raises:
        UnderstudyError: `gms.server_exhausted`, it could not be looked at.
    """
    try:
        return epoch_file.is_held(path)
    except OSError as error:
        raise UnderstudyError(
            "gms.server_exhausted",
            f"the memory service cannot open {path}: {error.strerror}; raise its limit of open"
            " files (ulimit -Hn), or end sessions",
        ) from error
