"""The lock server's state on disk: one preallocated file, two slots of 4 KiB written in turn.

Owns bytes and their checksums. Must not know what a record means, except how to write it down.

The surprising things:

- A write never needs room: the file has its full size from the start, so a full disk cannot stop a
  grant (writing a new file and renaming it did).
- Both slots are valid from the moment the file exists. So one bad slot means that something was
  lost, perhaps the newest grant, and the holder in the other slot cannot be trusted: the record is
  then *unknown*, as if the file were gone, but its token still counts. A write that was torn by a
  power cut looks the same, and costs nothing: after a power cut every witness is free.
- A failed write is repeated into the same slot; the other one is never touched in between.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lockserver import witness
from lockserver.core.events import Holder, Record
from understudy.errors import UnderstudyError
from understudy.wire.fds import OwnedFd

NAME = "lockserver.json"
SLOT_BYTES = 4096  # one page: two locks with the longest names take about 1 KiB
FILE_BYTES = 2 * SLOT_BYTES
logger = logging.getLogger(__name__)

ASIDE_MAX = 20  # unreadable files kept; a loop of failing starts must not fill the disk

_HEAD = re.compile(rb"understudy-lock 1 sequence=(\d{1,18}) sha256=([0-9a-f]{64})\n(\{.*\})\s*")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was found: the record to start from, and what was wrong if anything was."""

    record: Record
    problem: str | None = None
    aside: str | None = None  # where an unreadable file was put
    is_first: bool = False  # nobody was ever launched in this directory


class StateFile:
    """The open file. `write` is durable when it returns."""

    def __init__(self, directory: str, locks: Iterable[str]) -> None:
        """Open it, or put an unreadable one aside and make a new one.

        Raises:
            UnderstudyError: `lock.state_unwritable` (a full disk, a directory of that name, …),
                `lock.state_in_use`.
        """
        self.path = os.path.join(directory, NAME)
        try:
            self.loaded = _load(directory, tuple(locks))
            self._fd = self._open()
        except OSError as error:
            raise UnderstudyError(
                "lock.state_unwritable",
                f"cannot keep the lock's state in {self.path}: {error.strerror}; it needs"
                f" {FILE_BYTES} bytes on a disk that can be written to",
                path=self.path,
            ) from error

    def _open(self) -> OwnedFd:
        is_there = os.path.lexists(self.path)
        if is_there and self.loaded.problem is not None:
            self.loaded = replace(self.loaded, aside=_put_aside(self.path))
        if not is_there or self.loaded.problem is not None:
            _create(self.path, self.loaded.record)
        fd = OwnedFd(os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        try:
            fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            slots = _slots(os.pread(fd.fileno(), FILE_BYTES + 1, 0))
            self._sequence = max(slot[0] for slot in slots if slot is not None)
        except BlockingIOError as error:
            fd.close()
            raise UnderstudyError(
                "lock.state_in_use", f"another process has locked {self.path}", path=self.path
            ) from error
        except BaseException:
            fd.close()
            raise
        return fd

    def write(self, record: Record) -> None:
        """Write the next slot and wait for the disk.

        A file that was removed or replaced meanwhile is made anew: what goes to a file without a
        name is gone with this process, and its tokens would be granted again.

        Raises:
            OSError: it may or may not be on disk; write again before anything depends on it.
        """
        if not self._is_ours():
            logger.warning("%s was removed or replaced; it is made anew", self.path)
            self._replace(record)
            return
        sequence = self._sequence + 1
        slot = _encode(sequence, record)
        offset = sequence % 2 * SLOT_BYTES
        if os.pwrite(self._fd.fileno(), slot, offset) != SLOT_BYTES:
            raise OSError(errno.ENOSPC, "the slot was written in part")
        os.fdatasync(self._fd.fileno())
        self._sequence = sequence

    def _is_ours(self) -> bool:
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._fd.fileno()))

    def _replace(self, record: Record) -> None:
        if os.path.lexists(self.path):
            _put_aside(self.path)
        _create(self.path, record)
        fd = OwnedFd(os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        try:
            fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            fd.close()
            raise
        self._fd.close()
        self._fd, self._sequence = fd, 1  # `_create` wrote 0 and 1

    def close(self) -> None:
        self._fd.close()


def read(directory: str, locks: Iterable[str]) -> Loaded | None:
    """The state as a bystander sees it; None if there is no file. Changes nothing."""
    if not os.path.lexists(os.path.join(directory, NAME)):
        return None
    return _load(directory, tuple(locks))


def _load(directory: str, locks: tuple[str, ...]) -> Loaded:
    try:
        with open(os.path.join(directory, NAME), "rb") as stream:
            raw = stream.read(FILE_BYTES + 1)
    except FileNotFoundError:
        if not any(name.startswith(witness.PREFIX) for name in os.listdir(directory)):
            return Loaded(Record(), is_first=True)
        problem = "the state file is missing although engines were launched in this directory"
        return Loaded(_lost(0, locks), problem)
    slots = _slots(raw)
    known = [slot for slot in slots if slot is not None]
    if len(known) == len(slots):
        return Loaded(max(known, key=lambda slot: slot[0])[1])
    token = max((record.token for _, record in known), default=0)
    problem = f"{len(slots) - len(known)} of its 2 slots cannot be read ({len(raw)} bytes)"
    return Loaded(_lost(token, locks), problem)


def _lost(token: int, locks: tuple[str, ...]) -> Record:
    """Who holds what is not on file. The next token up may have been granted and lost: leave it
    out, in both slots of the new file, so that losing one of them again loses no token."""
    return Record(token=token + 1, unknown=frozenset(locks))


def _slots(raw: bytes) -> list[tuple[int, Record] | None]:
    return [_decode(raw[i * SLOT_BYTES : (i + 1) * SLOT_BYTES], i) for i in range(2)]


def _encode(sequence: int, record: Record) -> bytes:
    """One slot: a line with sequence and checksum, the JSON, spaces, a newline. `cat` shows it."""
    body = {
        "schema": 1,
        "token": record.token,
        "holders": {name: holder.to_dict() for name, holder in record.holders.items()},
        "unknown": sorted(record.unknown),
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    slot = b"understudy-lock 1 sequence=%d sha256=%s\n%s" % (
        sequence,
        _checksum(sequence, text),
        text,
    )
    assert len(slot) < SLOT_BYTES, "bounded by the lengths of engine ids and the locks there are"
    return slot.ljust(SLOT_BYTES - 1) + b"\n"


def _decode(slot: bytes, number: int) -> tuple[int, Record] | None:
    match = _HEAD.fullmatch(slot) if len(slot) == SLOT_BYTES else None
    if match is None:
        return None
    sequence, text = int(match[1]), match[3]
    if _checksum(sequence, text) != match[2] or sequence % 2 != number:
        return None
    try:
        body = json.loads(text)
        if body["schema"] != 1:
            return None
        holders = {str(name): Holder.from_dict(raw) for name, raw in body["holders"].items()}
        return sequence, Record(int(body["token"]), holders, frozenset(body["unknown"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # a checksum that fits and a meaning that does not: another version's file


def _checksum(sequence: int, text: bytes) -> bytes:
    return hashlib.sha256(b"%d\n%s" % (sequence, text)).hexdigest().encode()


def _create(path: str, record: Record) -> None:
    """Make the file whole before it has its name."""
    fresh = f"{path}.new"
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, FILE_BYTES)
        for sequence in (0, 1):
            os.pwrite(fd, _encode(sequence, record), sequence * SLOT_BYTES)
        os.fsync(fd)
        os.rename(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise
    finally:
        os.close(fd)
    _sync_directory(path)


def _put_aside(path: str) -> str:
    """Give what could not be read a second name; the first one goes when the new file takes it.

    Linked, not moved: a crash in between must not lose the highest token that can be read.
    """
    names = [f"{path}.unreadable-{number}" for number in range(1, ASIDE_MAX + 1)]
    aside = next((name for name in names if not os.path.lexists(name)), names[-1])
    if os.path.lexists(aside):
        os.unlink(aside)
    os.link(path, aside, follow_symlinks=False)
    return aside


def _sync_directory(path: str) -> None:
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
