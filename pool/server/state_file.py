"""What the pool must know after a restart, on disk: one preallocated file, two slots of 1 MiB.

The bytes are `plumbing.service.files`'s, the meaning is `pool.core.saved`'s; here is what a lost
record leads to. Both slots are valid from the moment the file exists, so one bad slot means that
the newest record may be lost, and the other one must not be believed: goals that were told later
would come back with older generations. Then the file is put aside, and a new *era* begins: engines
replace what they remember, and the pool learns everything from those who hold it.

The surprising thing: decisions do not wait for the disk. What they are about (processes, memory,
doors) is gone after a power cut, and an engine whose file is newer than ours is caught up with
(`pool.core.reconcile`). Only what people have asked for must outlive the machine.
"""

from __future__ import annotations

import errno
import json
import os
from typing import Any

import msgspec

from plumbing.pod.paths import pool_state
from plumbing.service.files import SlotFile, SlotFormat, put_aside, state_faults

SCHEMA = 6
# A hundred models, each with two engines on 64 devices, and every setting changed. A write costs
# what is written, not the size of its slot.
SLOT_BYTES = 1024 * 1024
FORMAT = SlotFormat("understudy-pool 1", SLOT_BYTES)
FAULTS = {"in_use": "pool.state_in_use", "unwritable": "pool.state_unwritable"}


class PoolStateFile:
    """The open file, with what was on it: `record`, None if nothing can be believed, and then its
    `problem` and where it was put `aside`."""

    def __init__(self, directory: str) -> None:
        """Open it, or put an unreadable one aside and create a new one.

        Raises:
            UnderstudyError: `pool.state_unwritable`, `pool.state_in_use`.
        """
        self.path = pool_state(directory)
        self.record: dict[str, Any] | None = None
        self.problem = self.aside = None
        with state_faults(self.path, FORMAT, **FAULTS):
            if os.path.lexists(self.path):
                self.record, self.problem = _load(self.path)
                self.aside = None if self.problem is None else put_aside(self.path)
            if not os.path.lexists(self.path) or self.problem is not None:
                FORMAT.create(self.path, _text(None))
            self._file = SlotFile(self.path, FORMAT)

    def write(self, record: dict[str, Any], *, survives_power_cut: bool = True) -> None:
        """Write the next slot; as `SlotFile.write`. Values may be structs.

        Raises:
            OSError: it may or may not be on file; write again before anything depends on it. EFBIG:
                it does not fit.
        """
        text = _text(record)
        try:
            self._file.write(text, survives_power_cut=survives_power_cut)
        except ValueError as error:
            why = f"the state of so many models has {len(text)} bytes, and a slot {SLOT_BYTES}"
            raise OSError(errno.EFBIG, why) from error

    def close(self) -> None:
        self._file.close()


def _text(record: dict[str, Any] | None) -> bytes:
    return msgspec.json.encode({"schema": SCHEMA, "record": record})


def _load(path: str) -> tuple[dict[str, Any] | None, str | None]:
    """The record, and why there is none that can be believed."""
    raw = FORMAT.read(path)
    slots = [slot for slot in FORMAT.decode(raw) if slot is not None]
    if len(slots) < 2:
        return None, f"{2 - len(slots)} of its 2 slots cannot be read ({len(raw)} bytes)"
    body = json.loads(max(slots)[1])
    if body.get("schema") != SCHEMA:
        return None, f"it has schema {body.get('schema')}, and this pool reads {SCHEMA}"
    return body["record"], None  # None: a pool that has told nothing yet
