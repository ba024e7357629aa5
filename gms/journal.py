"""What is committed on a device, on disk: read by a restarted server, written before a commit is
answered. Small (no manifest: that comes with the memory), and replaced in one step.

An unreadable journal is kept aside and counts as none: the epochs' files, and the flocks on them,
still say whether anybody maps something.
"""

from __future__ import annotations

import logging
import os

from gms import names
from gms.core.events import JournalRecord
from gms.core.manifest import LayoutHash
from understudy.errors import UnderstudyError
from understudy.service.files import read_json, write_atomic

SCHEMA = 1

BROKEN = (UnderstudyError, ValueError, KeyError, TypeError, OSError)

logger = logging.getLogger(__name__)


def read(path: str) -> JournalRecord | None:
    """The record in `path`; None where nothing is committed. A broken one is moved aside."""
    try:
        return _parse(path)
    except BROKEN as error:
        _keep_aside(path, error)
        return None


def peek(path: str) -> JournalRecord | None:
    """`read` for onlookers: it leaves everything as it is."""
    try:
        return _parse(path)
    except BROKEN:
        return None


def write(path: str, record: JournalRecord | None) -> None:
    """Put `record` on disk.

    Raises:
        UnderstudyError: `gms.journal_unwritable`, with the reason; what was there is untouched.
    """
    document: dict[str, object] = {"schema": SCHEMA, "epoch": None}
    if record is not None:
        document = {
            "schema": SCHEMA,
            "epoch": record.epoch,
            "slab_sizes": list(record.slab_sizes),
            "layout_hash": record.layout_hash,
            "identity": dict(record.identity),
        }
    try:
        write_atomic(path, document)
    except OSError as error:
        raise UnderstudyError(
            "gms.journal_unwritable", f"{path}: {error.strerror}; make room there", path=path
        ) from error


def _parse(path: str) -> JournalRecord | None:
    found = read_json(path)
    if found is None:
        return None
    if found["schema"] != SCHEMA:
        raise ValueError(f"its schema is {found['schema']!r}")
    if found["epoch"] is None:
        return None
    if not names.is_epoch_id(found["epoch"]):
        raise ValueError("it names no epoch")
    return JournalRecord(
        epoch=found["epoch"],
        slab_sizes=tuple(int(size) for size in found["slab_sizes"]),
        layout_hash=LayoutHash(str(found["layout_hash"])),
        identity=dict(found["identity"]),
    )


def _keep_aside(path: str, error: Exception) -> None:
    aside = f"{path}.unreadable"
    logger.warning("%s cannot be understood (%s); it is kept as %s", path, error, aside)
    try:
        os.replace(path, aside)
    except OSError as problem:
        logger.warning("%s could not be kept aside: %s", path, problem.strerror)
