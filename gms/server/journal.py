"""The committed epoch of a device, on disk: read by a restarted server, written before a commit is
answered. Small enough for a slot (no manifest, no identity: those come back with the memory).

One unreadable slot may have held the newest commit: then the journal is lost
(`LoadedJournal.is_lost`), and the survivors decide. The file is kept aside, and the new one is lost
too until a record is written: the next server may die before a survivor rejoins.

Beside it, for KV memory, are the newest claims, so that an older token is refused after a restart.
"""

from __future__ import annotations

import logging
import os

import msgspec

from gms import names
from gms.core.events import Claimant, JournalRecord, LoadedJournal
from plumbing.service.files import SlotFile, SlotFormat, put_aside, state_faults, write_atomic

FORMAT = SlotFormat("understudy-gms 1")
FAULTS = {"in_use": "gms.journal_in_use", "unwritable": "gms.journal_unwritable"}

logger = logging.getLogger(__name__)


LOST = LoadedJournal(is_lost=True)


class CommitJournal:
    """The open file of one device. `write` is durable when it returns; used by one thread."""

    def __init__(self, path: str, *, has_epochs: bool = False) -> None:
        """Read it, or put an unreadable one aside and create a new one. `has_epochs`: there are
        epochs on disk, so a missing journal is a lost one.
        """
        self.path = path
        with state_faults(path, FORMAT, **FAULTS):
            is_there = os.path.lexists(path)
            found = _load(path) if is_there or not has_epochs else None
            self.loaded = LOST if found is None else found
            if found is None and is_there:
                logger.warning("%s cannot be read; it is kept as %s", path, put_aside(path))
            if found is None or not is_there:
                FORMAT.create(path, msgspec.json.encode(self.loaded))
            self._file = SlotFile(path, FORMAT)

    def write(self, record: JournalRecord | None, offloaded: JournalRecord | None = None) -> None:
        """Put `record` on disk."""
        with state_faults(self.path, FORMAT, **FAULTS):
            self._file.write(msgspec.json.encode(LoadedJournal(record, offloaded=offloaded)))

    def close(self) -> None:
        self._file.close()


def peek(path: str) -> JournalRecord | None:
    """The record, read without a lock; None if there is none. Changes nothing."""
    try:
        found = _load(path)
        return None if found is None else found.record
    except OSError:
        return None


def _load(path: str) -> LoadedJournal | None:
    """The file's content; None if it cannot be read."""
    try:
        raw = FORMAT.read(path)
    except FileNotFoundError:
        return LoadedJournal()
    slots = FORMAT.decode(raw)
    known = [slot for slot in slots if slot is not None]
    if len(known) < len(slots):
        return None
    try:
        found = msgspec.json.decode(max(known)[1], type=LoadedJournal)
    except msgspec.MsgspecError:
        return None  # the checksum is right: another version's file
    records = (found.record, found.offloaded)
    return found if all(names.is_region_id(each.epoch) for each in records if each) else None


class KeptTokens(msgspec.Struct, frozen=True):
    newest: tuple[Claimant, ...] = ()
    schema: int = 1


def read_tokens(path: str) -> tuple[Claimant, ...]:
    """Read the newest claims of KV memory that an earlier server wrote; nothing if it cannot."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=KeptTokens).newest
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read, so older tokens are not refused: %s", path, error)
        return ()


def write_tokens(path: str, newest: tuple[Claimant, ...]) -> None:
    write_atomic(path, msgspec.json.encode(KeptTokens(newest)))
