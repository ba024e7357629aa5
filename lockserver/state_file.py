"""The lock server's state on disk: one preallocated file, two slots written in turn.

The largest pod's record fits a slot; a write costs what the record has, not what the slot has.

Owns what a record means on disk and what a lost one leads to; the bytes are `service.files`'s.

The surprising thing: both slots are valid from the moment the file exists. So one bad slot means
that something was lost, perhaps the newest grant, and the holder in the other slot cannot be
trusted: the record is then *unknown*, as if the file were gone, but its token still counts. A write
torn by a power cut looks the same and costs nothing: after a power cut every witness is free.

Where no slot can be read, tokens begin again, and so does their *era*: who remembers a larger
token sees by it that this is another series.

Two kinds of newer version are met after a downgrade. With a newer `schema` the slots are the same,
and whatever else a record holds, `token` is its largest token: tokens go on from there. A newer
number after `understudy-lock` means that the slots themselves have changed, so that the token may
be anywhere; started over it, tokens would begin again below what was granted. Then this server does
not start, and changes nothing: engines that serve go on, and only a person can know which
version wrote the file, or that nothing of it is alive. Every version's slots begin with these two
words, and every version must begin so.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed

from msgspec import DecodeError, ValidationError, convert, json
from msgspec.structs import asdict, replace

from lockserver import witness
from lockserver.core.events import LockRecord
from lockserver.messages import NO_ERA
from plumbing.errors import UnderstudyError
from plumbing.service.files import SlotFile, SlotFormat, put_aside, state_faults
from plumbing.wire.server import identity_of

NAME = "lockserver.json"
KIND = "understudy-lock"
SCHEMA, VERSION = 1, 3
FORMAT = SlotFormat(f"{KIND} {VERSION}", 128 << 10)
_ERA = re.compile("[0-9a-f]{16}")
_HEAD = re.compile(rf"{KIND} (\d{{1,9}})[ \n]".encode())


@dataclass(frozen=True, slots=True)
class LoadedRecord:
    """What was found: the record to start from, and what was wrong if anything was."""

    record: LockRecord
    problem: str | None = None
    aside: str | None = None  # where an unreadable file was put
    models: tuple[str, ...] = ()  # those that the last server had locks for
    is_first: bool = False  # no engine was ever launched in this directory


class LockStateFile:
    """The open file. `write` is durable when it returns."""

    def __init__(
        self,
        directory: str,
        locks: Iterable[str],
        *,
        models: Sequence[str] = (),
        may_be_elsewhere: bool = False,
    ) -> None:
        """Open it, or move an unreadable one aside and create a new one.

        `models`: whose locks these are, if the pod has models. `may_be_elsewhere`: holders on other
        hosts leave no witness here, so an empty directory may be a new one, or one whose state was
        lost while they live: then all locks are unknown.

        Raises:
            UnderstudyError: `lock.state_unwritable` (a full disk, a directory of that name, …),
                `lock.state_in_use`, `lock.state_newer`: a later version wrote it.
        """
        self.path = os.path.join(directory, NAME)
        self._directory = directory
        faults = {"in_use": "lock.state_in_use", "unwritable": "lock.state_unwritable"}
        with state_faults(self.path, FORMAT, **faults):
            self._identity = identity_of(os.path.join(directory, "."))
            self.loaded = _load(directory, tuple(locks), may_be_elsewhere=may_be_elsewhere)
            self._models = tuple(models)
            if self.loaded.record.era == NO_ERA:
                record = replace(self.loaded.record, era=secrets.token_hex(8))
                self.loaded = changed(self.loaded, record=record)
            self._file = self._open()

    def _open(self) -> SlotFile:
        is_there = os.path.lexists(self.path)
        if is_there and self.loaded.problem is not None:
            self.loaded = changed(self.loaded, aside=put_aside(self.path))
        if not is_there or self.loaded.problem is not None:
            FORMAT.create(self.path, self._text(self.loaded.record))
        return SlotFile(self.path, FORMAT)

    def _text(self, record: LockRecord) -> bytes:
        """About 2 KiB without models, which are named if there are any."""
        models = {"models": self._models} if self._models else {}
        unknown = sorted(record.unknown)
        return json.encode({"schema": SCHEMA, **asdict(record), "unknown": unknown, **models})

    def write(self, record: LockRecord) -> None:
        """Write the next slot and wait for the disk.

        Raises:
            OSError: it may or may not be on disk; write again before anything depends on it.
        """
        try:
            self._file.write(self._text(record), self._check_place)
        except ValueError as error:  # holders of a hundred removed models, all alive
            raise OSError(errno.EFBIG, str(error)) from error

    def _check_place(self) -> None:
        if identity_of(os.path.join(self._directory, ".")) != self._identity:
            raise OSError(errno.ESTALE, "the directory was removed or replaced")

    def close(self) -> None:
        self._file.close()


def read(directory: str, locks: Iterable[str]) -> LoadedRecord | None:
    """The state without a server, read-only; None if there is no file."""
    if not os.path.lexists(os.path.join(directory, NAME)):
        return None
    names = tuple(locks)
    try:
        return _load(directory, names)
    except UnderstudyError as error:
        return LoadedRecord(LockRecord(unknown=frozenset(names)), error.message)


def _load(
    directory: str, locks: tuple[str, ...], *, may_be_elsewhere: bool = False
) -> LoadedRecord:
    try:
        raw = FORMAT.read(os.path.join(directory, NAME))
    except FileNotFoundError:
        if not any(name.startswith(witness.PREFIX) for name in os.listdir(directory)):
            unknown = frozenset(locks) if may_be_elsewhere else frozenset[str]()
            return LoadedRecord(LockRecord(unknown=unknown), is_first=True)
        problem = "the state file is missing although engines were launched in this directory"
        return LoadedRecord(_lost(_Filed(), locks), problem)
    _check_version(os.path.join(directory, NAME), raw)
    slots = [_filed(*slot) for slot in FORMAT.decode(raw) if slot is not None]
    unread = 2 - sum(each.record is not None for each in slots)
    newest = max(slots, key=lambda each: each.sequence, default=_Filed())
    if not unread and newest.record is not None:
        return LoadedRecord(newest.record, models=newest.models)
    problem = f"{unread} of its 2 slots cannot be read ({len(raw)} bytes)"
    largest = max(slots, key=lambda each: each.token, default=_Filed())
    return LoadedRecord(_lost(largest, locks), problem)


def _check_version(path: str, raw: bytes) -> None:
    """By the first words of each slot.

    Raises:
        UnderstudyError: `lock.state_newer`, a slot is of a version whose slots are unknown here.
    """
    heads = (_HEAD.match(raw, start) for start in (0, FORMAT.slot_bytes))
    newest = max((int(head[1]) for head in heads if head is not None), default=0)
    if newest > VERSION:
        raise UnderstudyError(
            "lock.state_newer",
            f"{path} has version {newest}, but this lock server reads version {VERSION}: it cannot"
            " tell which tokens were granted, so it does not start. Start the version that wrote"
            " it; if that is not possible, stop every engine that uses this directory, move the"
            " file away and start again: then tokens begin again, too",
            path=path,
            version=newest,
        )


def _lost(filed: _Filed, locks: tuple[str, ...]) -> LockRecord:
    """A record without holders. The next token may have been granted and lost, so it is skipped, in
    both slots of the new file, so that losing one of them again loses no token."""
    return LockRecord(token=filed.token + 1, unknown=frozenset(locks), era=filed.era)


@dataclass(frozen=True, slots=True)
class _Filed:
    """What is read of a slot. Its token and era count also where the rest of it is a newer
    version's, and so no record of ours: tokens never go back."""

    sequence: int = 0
    token: int = 0
    era: str = NO_ERA
    record: LockRecord | None = None
    models: tuple[str, ...] = ()


def _filed(sequence: int, text: bytes) -> _Filed:
    try:
        body = dict(json.decode(text))
    except (DecodeError, TypeError, ValueError):
        return _Filed(sequence)
    token, era = body.get("token"), str(body.pop("era", NO_ERA))
    token = token if isinstance(token, int) and token > 0 else 0
    era = era if _ERA.fullmatch(era) else NO_ERA
    try:
        if body.get("schema") == SCHEMA:
            record = replace(convert(body, LockRecord), era=era)
            models = convert(body.get("models", ()), tuple[str, ...])
            return _Filed(sequence, token, era, record, models)
    except ValidationError:  # a valid checksum with unknown contents: another version's file
        pass
    return _Filed(sequence, token, era)
