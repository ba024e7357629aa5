"""Offload: a device gives up its committed epoch, and a sealed copy in host memory stands for it.

Pure. The copy is an epoch of another server (`gms.names.offload_device`), which this machine does
not know; the shell says what is committed there and that a living process holds it. Rules:
- The copy must have the same identity, layout and bytes (digest) as the epoch. So it does not
  matter which epoch it was made of, and a condemned epoch's copy never comes back for other bytes.
- Nobody may map the epoch: sessions and the kernel are asked, as for a drop.
- The link is on disk with the epoch's end, and lasts until the next commit is on disk (or is
  dropped): a restage that breaks off at any step leaves it in force.
- A server that dies before the link is on disk leaves a record whose memory is gone. Its copy then
  stands for it, too (`recovery.py`): the reader may have unmapped it in order to offload it.
- "Offloaded" is answered when the kernel says that the memory is free, not when it was given up.
"""

from __future__ import annotations

from gms import messages as msg
from gms.core import effects as fx
from gms.core import events as ev
from gms.core.device import Device
from gms.core.effects import Effects
from gms.core.events import EpochPhase
from gms.core.state import Epoch
from plumbing.errors import UnderstudyError

# Memory that a process may map. That of a superseded epoch is its readers' affair.
HELD = (EpochPhase.STAGING, EpochPhase.RELEASING, EpochPhase.ORPHANED)


class Offload:
    """The requests to offload one device, and their answers."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._askers: dict[int, int] = {}  # request ids by session: who waits for the proof

    def ask(self, event: ev.Received, now_ms: float) -> Effects:
        """Somebody has no use for the device's copy at present; if it is a reader, it has unmapped
        it. That the kernel knows: what counts is who holds the epoch's file.

        Raises:
            UnderstudyError: `gms.epoch_mapped`, `gms.no_copy`, `gms.nothing_committed`, …
        """
        reader = self.device.sessions.get(event.session)
        if reader is None:
            return self._begin(event)
        reader.move(msg.OffloadMsg, now_ms)
        left = self.device.drop(reader, "it has unmapped the weights")
        try:
            return [*left, *self._begin(event)]
        except UnderstudyError as error:  # it has left all the same
            return [*left, fx.RefuseRequest(event.session, event.request_id, error)]

    def _begin(self, event: ev.Received) -> Effects:
        self._check_no_writer()
        if self.device.offloaded is not None and self.device.committed is None:
            self._askers[event.session] = event.request_id
            return []
        epoch = self.device.committed
        if epoch is None:
            raise UnderstudyError("gms.nothing_committed", "nothing is committed on this device")
        self._check_unmapped(epoch, is_mapped=event.is_mapped)
        copy = _checked(event.copy, epoch)
        self._askers[event.session] = event.request_id
        self.device.offloaded = copy
        self.device.offloads_total += 1
        epoch.turn("offload")
        return [
            # In this order: the driver's thread writes the link before it gives up the memory.
            *self.device.journal(),
            fx.MarkHistory(epoch.id),
            fx.ReleaseEpoch(epoch.id),
            fx.RecordEvent(
                "gms.offloaded",
                f"epoch {epoch.id} is offloaded: {copy.epoch} in host memory stands for it",
                {"epoch": epoch.id, "copy": copy.epoch, "size_bytes": epoch.size_bytes},
            ),
        ]

    def left(self, session: int) -> None:
        """A connection has ended."""
        self._askers.pop(session, None)

    def judge(self) -> Effects:
        """Answer once the memory is free and the link is on disk."""
        copy = self.device.offloaded
        if not self._askers:
            return []
        if copy is None or self.device.committed is not None:
            askers, self._askers = self._askers, {}
            changed = UnderstudyError(
                "gms.not_offloaded", "the weights were brought back or dropped meanwhile"
            )
            return [fx.RefuseRequest(*asker, changed) for asker in askers.items()]
        is_held = any(epoch.phase in HELD for epoch in self.device.epochs.values())
        if is_held or not self.device.is_journal_true:
            return []
        askers, self._askers = self._askers, {}
        answer = msg.OffloadedMsg(copy.epoch, copy.size_bytes)
        return [fx.SendMessage(*asker, answer) for asker in askers.items()]

    def _check_no_writer(self) -> None:
        writer = self.device.writer
        if writer is not None:
            raise UnderstudyError(
                "gms.writer", f"{writer.label} is loading weights; offload them once they are there"
            )

    def _check_unmapped(self, epoch: Epoch, *, is_mapped: bool) -> None:
        readers = [self.device.sessions[reader].label for reader in sorted(epoch.readers)]
        if readers or is_mapped:
            who = ", ".join(readers) or "a process without a session (it may be stopped)"
            raise UnderstudyError(
                "gms.epoch_mapped",
                f"epoch {epoch.id} is still mapped by {who}; its memory is freed once every engine "
                "has released it and offloads again",
                readers=readers,
            )


def is_copy_of(copy: ev.JournalRecord, epoch: ev.JournalRecord) -> bool:
    """Whether both have the same layout, identity and bytes; not as long as a digest is unknown."""
    if copy.digest is None or epoch.digest is None:
        return False
    return (copy.layout_hash, copy.identity_hash, copy.digest) == (
        epoch.layout_hash,
        epoch.identity_hash,
        epoch.digest,
    )


def _checked(copy: ev.JournalRecord | None, epoch: Epoch) -> ev.JournalRecord:
    """`copy`, if it is of the same bytes as `epoch`."""
    why = None
    if epoch.digest is None:
        why = "the digest of its bytes is not known yet"
    elif copy is None:
        why = "there is none, or only its server has it"
    elif copy.digest is None:
        why = "the digest of the copy is not known yet"
    elif not is_copy_of(copy, epoch.record()):
        why = f"epoch {copy.epoch} there has other bytes"
    if copy is None or why is not None:
        raise UnderstudyError(
            "gms.no_copy",
            f"epoch {epoch.id} has no sealed copy in host memory: {why}; a copy is made in the "
            "background where `gms serve` runs with --host-memory",
            epoch=epoch.id,
        )
    return copy
