"""Small files that are never seen half-written: replaced in one step, or written in two slots.

A `SlotFile` is a small record that can be written even on a full disk: its two slots are allocated
and valid from the moment it exists. So one bad slot means that a record was lost, perhaps the
newest; the caller decides what follows. A failed write is repeated into the same slot.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from plumbing.errors import UnderstudyError
from plumbing.text import to_json

SLOT_BYTES = 4096  # one page
ASIDE_MAX = 20  # unreadable files kept; a loop of failing starts must not fill the disk

logger = logging.getLogger(__name__)


def write_atomic(path: str, content: bytes | str | dict[str, Any], mode: int = 0o600) -> None:
    """Replace `path`, which has one writer, in one step: readers see the old content or the new.

    A dict is written as JSON. The new file is written beside the old one, so it needs room for
    both. Nothing waits for the disk: these files mean nothing after a reboot. The directory may be
    shared with other users, such as /tmp: what is at the new file's name is never written to.

    Raises:
        OSError: no room, no permission; the old content is untouched and no file is left behind.
    """
    if isinstance(content, dict):
        content = to_json(content, indent=1) + "\n"
    payload = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    directory, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(directory, f".{name}.tmp")
    with contextlib.suppress(FileNotFoundError):  # of a writer that was killed in here
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, mode)
    try:
        with open(fd, "wb") as stream:
            stream.write(payload)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read_json(path: str) -> dict[str, Any] | None:
    """The JSON object in `path`; None if there is no such file.

    Raises:
        UnderstudyError: `service.broken_file`, the content is not a JSON object.
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            raw = stream.read()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(raw)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        return document
    except ValueError as error:  # also UnicodeDecodeError
        why = f"{path} is not valid: {error}"
        raise UnderstudyError("service.broken_file", why, path=path) from error


def sync_directory(directory: str) -> None:
    """Make the names in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class SlotFormat:
    """The layout of the slots of one kind of file; `magic` names the kind and its version."""

    magic: str
    slot_bytes: int = SLOT_BYTES  # a whole number of pages

    @property
    def file_bytes(self) -> int:
        return 2 * self.slot_bytes

    def encode(self, sequence: int, text: bytes) -> bytes:
        """What a slot begins with: a line with sequence and checksum, and the text. Spaces and a
        newline are behind it; `cat` shows it.

        Raises:
            ValueError: the text does not fit a slot.
        """
        head = f"{self.magic} sequence={sequence} sha256={_checksum(sequence, text)}\n".encode()
        slot = head + text
        if len(slot) >= self.slot_bytes:
            raise ValueError(f"a record of {len(text)} bytes does not fit {self.slot_bytes}")
        return slot

    def read(self, path: str) -> bytes:
        """The whole file at `path`, which may be larger; nothing of what is no regular file.

        Raises:
            OSError: there is none, it is a link, …
        """
        # O_NONBLOCK: a fifo of that name must not stop the program.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            return os.pread(fd, self.file_bytes + 1, 0) if is_file else b""
        finally:
            os.close(fd)

    def decode(self, raw: bytes) -> list[tuple[int, bytes] | None]:
        """Both slots of a whole file as (sequence, text); None where one cannot be trusted."""
        size = self.slot_bytes
        return [self._decode(raw[n * size : (n + 1) * size], n) for n in range(2)]

    def _decode(self, slot: bytes, number: int) -> tuple[int, bytes] | None:
        pattern = re.escape(self.magic.encode())
        pattern += rb" sequence=(\d{1,18}) sha256=([0-9a-f]{64})\n(\{.*\})"
        match = re.fullmatch(pattern, slot.rstrip()) if len(slot) == self.slot_bytes else None
        if match is None:
            return None
        sequence, text = int(match[1]), match[3]
        is_true = _checksum(sequence, text) == match[2].decode() and sequence % 2 == number
        return (sequence, text) if is_true else None

    def create(self, path: str, text: bytes) -> None:
        """Create the file with `text` in both slots; it gets its name when it is complete.

        Raises:
            OSError: no room, no permission; no file is left behind.
        """
        fresh = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):  # of a process that was killed here
            os.unlink(fresh)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(fresh, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, self.file_bytes)
            for sequence in (0, 1):
                slot = self.encode(sequence, text).ljust(self.slot_bytes - 1) + b"\n"
                os.pwrite(fd, slot, sequence * self.slot_bytes)
            os.fsync(fd)
            os.rename(fresh, path)
        except BaseException:
            os.unlink(fresh)
            raise
        finally:
            os.close(fd)
        sync_directory(os.path.dirname(path) or ".")


@contextlib.contextmanager
def state_faults(path: str, form: SlotFormat, *, in_use: str, unwritable: str) -> Iterator[None]:
    """An OSError in the block becomes one sentence on the file with slots at `path`.

    Raises:
        UnderstudyError: `in_use`: another process has it; `unwritable`: a full disk, a directory of
            that name, ….
    """
    try:
        yield
    except BlockingIOError as error:
        why = f"another process has locked {path}; stop that one first"
        raise UnderstudyError(in_use, why, path=path) from error
    except OSError as error:
        why = f"cannot keep the state in {path}: {error.strerror}; it needs {form.file_bytes} bytes"
        why += " on a disk that can be written to"
        raise UnderstudyError(unwritable, why, path=path) from error


class SlotFile:
    """An open file with slots, under flock. What was written outlives this process, and, unless
    told otherwise, the machine."""

    def __init__(self, path: str, form: SlotFormat) -> None:
        """Open and lock an existing file; the newest sequence counts.

        Raises:
            OSError: it cannot be opened; BlockingIOError: another process has locked it.
            ValueError: neither slot can be read.
        """
        self.path = path
        self._form = form
        self._fd = open_locked(path)
        try:
            raw, size = os.pread(self._fd, form.file_bytes + 1, 0), form.slot_bytes
            # Of each slot, what may be no space: a write costs what is in the slot, not its size.
            self._used_bytes = [len(raw[at : at + size].rstrip()) for at in (0, size)]
            self._sequence = max(slot[0] for slot in form.decode(raw) if slot is not None)
        except BaseException:
            os.close(self._fd)
            raise

    def write(
        self,
        text: bytes,
        check_place: Callable[[], None] | None = None,
        *,
        survives_power_cut: bool = True,
    ) -> None:
        """Write the next slot and wait for the disk; without `survives_power_cut` for nothing, and
        the kernel writes it a little later, whatever becomes of this process.

        A file that was removed or replaced meanwhile is created anew, unless `check_place` raises:
        a record in a file without a name would be lost with this process.

        Raises:
            OSError: it may or may not be on disk; write again before anything depends on it.
        """
        if not self._is_ours():
            if check_place is not None:
                check_place()
            logger.warning("%s was removed or replaced; it is created anew", self.path)
            self._replace(text)
            return
        sequence = self._sequence + 1
        number, slot = sequence % 2, self._form.encode(sequence, text)
        padded = slot.ljust(self._used_bytes[number])
        self._used_bytes[number] = len(padded)
        if os.pwrite(self._fd, padded, number * self._form.slot_bytes) != len(padded):
            raise OSError(errno.ENOSPC, "the slot was written in part")
        if survives_power_cut:
            os.fdatasync(self._fd)
        self._sequence, self._used_bytes[number] = sequence, len(slot)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is_ours(self) -> bool:
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._fd))

    def _replace(self, text: bytes) -> None:
        if os.path.lexists(self.path):
            os.close(open_locked(self.path))  # BlockingIOError: another process uses it
            put_aside(self.path)
        self._form.create(self.path, text)
        fd = open_locked(self.path)
        os.close(self._fd)
        self._fd, self._sequence = fd, 1  # `create` wrote 0 and 1
        self._used_bytes = [self._form.slot_bytes - 1] * 2


def put_aside(path: str) -> str:
    """Give an unreadable file a second name; a new file will take over its first name.

    Linked, not moved: a crash in between must not lose what is still readable in it.

    Raises:
        OSError: EISDIR: it is a directory, made or mounted there.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "it is a directory; remove it", path)
    names = [f"{path}.unreadable-{number}" for number in range(1, ASIDE_MAX + 1)]
    aside = next((name for name in names if not os.path.lexists(name)), names[-1])
    if os.path.lexists(aside):
        os.unlink(aside)
    os.link(path, aside, follow_symlinks=False)
    return aside


def open_locked(path: str, flags: int = 0) -> int:
    """Open a file, under an exclusive flock.

    Raises:
        OSError: it cannot be opened; BlockingIOError: another process has locked it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _checksum(sequence: int, text: bytes) -> str:
    return hashlib.sha256(b"%d\n%s" % (sequence, text)).hexdigest()
