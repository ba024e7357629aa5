"""What is committed on a device, on disk: read by a restarted server, written before a commit is
answered. Small enough for a slot (no manifest, no identity: those come back with the memory).

One slot that cannot be read may have been the newest commit: then nobody knows what is committed,
which is said (`Loaded.is_lost`), and the survivors' word decides. The file is kept aside, and the
new one says the same until something is written: the next server may die before a survivor speaks.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from typing import Any

from gms import names
from gms.core.events import JournalRecord
from gms.core.manifest import LayoutHash
from plumbing.errors import UnderstudyError
from plumbing.service.slots import FILE_BYTES, SlotFile, SlotFormat, put_aside

FORMAT = SlotFormat("understudy-gms 1")
SCHEMA = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was found; `is_lost`: there was something, and it could not be read."""

    record: JournalRecord | None = None
    is_lost: bool = False


LOST = Loaded(is_lost=True)


class Journal:
    """The open file of one device. `write` is durable when it returns; used by one thread."""

    def __init__(self, path: str, *, has_epochs: bool = False) -> None:
        """Read it, or put an unreadable one aside and make a new one. `has_epochs`: there are
        epochs on disk, so that a journal that is not there was there before, and is lost.

        Raises:
            UnderstudyError: `gms.journal_unwritable`, `gms.journal_in_use`.
        """
        self.path = path
        try:
            is_there = os.path.lexists(path)
            found = _load(path) if is_there or not has_epochs else None
            self.loaded = LOST if found is None else found
            if found is None and is_there:
                logger.warning("%s cannot be read; it is kept as %s", path, put_aside(path))
            if found is None or not is_there:
                FORMAT.create(path, _text(self.loaded))
            self._file = SlotFile(path, FORMAT)
        except BlockingIOError as error:
            raise UnderstudyError(
                "gms.journal_in_use", f"another process has locked {path}", path=path
            ) from error
        except OSError as error:
            raise _unwritable(path, error) from error

    def write(self, record: JournalRecord | None) -> None:
        """Put `record` on disk.

        Raises:
            UnderstudyError: `gms.journal_unwritable`, with the reason; it may or may not be there.
        """
        try:
            self._file.write(_text(Loaded(record)))
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        self._file.close()


def peek(path: str) -> JournalRecord | None:
    """The record as a bystander sees it; None where there is none to be read. Changes nothing."""
    try:
        found = _load(path)
        return None if found is None else found.record
    except OSError:
        return None


def _load(path: str) -> Loaded | None:
    """What the file says; None where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            raw = stream.read(FILE_BYTES + 1)
    except FileNotFoundError:
        return Loaded()
    slots = FORMAT.decode(raw)
    known = [slot for slot in slots if slot is not None]
    if len(known) < len(slots):
        return None
    try:
        return _meaning(max(known)[1])
    except (ValueError, KeyError, TypeError):
        return None  # a checksum that fits: another version's file


def _text(said: Loaded) -> bytes:
    committed = None if said.record is None else asdict(said.record)
    body = {"schema": SCHEMA, "committed": committed, "is_lost": said.is_lost}
    return json.dumps(body, separators=(",", ":")).encode()


def _meaning(text: bytes) -> Loaded:
    body = json.loads(text)
    if body["schema"] != SCHEMA:
        raise ValueError(f"its schema is {body['schema']!r}")
    found = body["committed"]
    if found is None:
        return Loaded(is_lost=bool(body["is_lost"]))
    return Loaded(_record(found))


def _record(found: dict[str, Any]) -> JournalRecord:
    if not names.is_epoch_id(found["epoch"]):
        raise ValueError("it names no epoch")
    digest, previous = found["digest"], found["previous"]
    return JournalRecord(
        epoch=found["epoch"],
        size_bytes=int(found["size_bytes"]),
        layout_hash=LayoutHash(str(found["layout_hash"])),
        identity_hash=str(found["identity_hash"]),
        digest=None if digest is None else str(digest),
        previous=None if previous is None else _record(previous),
    )


def _unwritable(path: str, error: OSError) -> UnderstudyError:
    return UnderstudyError(
        "gms.journal_unwritable", f"{path}: {error.strerror}; make room there", path=path
    )
