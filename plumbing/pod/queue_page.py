"""Which requests an engine has queued and not scheduled yet, on a page that survives a SIGKILL.

The gateway names each of its attempts at a request. The engine's scheduling process adds an attempt
when it queues it, and removes it before its first step. After a death the gateway reads the page:
an attempt on it had no part in the death, so its request is no suspect. Whatever goes wrong (no
file, another layout, a death in the middle of a change, more than `SLOTS` queued) leaves attempts
out, and their requests stay suspects.

The surprising thing: the gateway opens the file when the engine greets it. Each incarnation makes a
file of its own at the same path, so what the gateway has open is the page of the one that died.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from array import array
from collections.abc import Iterator

ATTEMPT_BYTES = 16  # of a gateway process, drawn at random, and a number, which is never 0
SLOTS = 1024  # newer attempts take the place of the oldest
MAGIC = int.from_bytes(b"usqueue1", "little")  # the first word; the second: it is being changed
HEADER_WORDS = 2
PAGE_BYTES = HEADER_WORDS * 8 + SLOTS * ATTEMPT_BYTES

logger = logging.getLogger(__name__)


class QueuePage:
    """The engine's side; one thread's."""

    def __init__(self, path: str) -> None:
        """Create the file and replace an earlier one. Without a file the gateway sees no queue."""
        self._slots: dict[bytes, int] = {}
        self._attempts: list[bytes] = [b""] * SLOTS
        self._next = 0
        page: mmap.mmap | bytearray
        try:
            page = _make(path) if path else bytearray(PAGE_BYTES)
        except OSError as error:
            logger.warning("waiting requests count as suspects: cannot create %s: %s", path, error)
            page = bytearray(PAGE_BYTES)
        self._words = memoryview(page).cast("Q")  # aligned, so each is written in one piece
        self._words[0] = MAGIC

    def add(self, attempt: bytes) -> None:
        """It is queued. One that is added twice has several parts, and is not on the page."""
        if len(attempt) != ATTEMPT_BYTES:
            return
        if attempt in self._slots:
            self.remove(attempt)
            return
        slot = self._next
        self._next = (slot + 1) % SLOTS
        self._slots.pop(self._attempts[slot], None)
        self._attempts[slot], self._slots[attempt] = attempt, slot
        process, number = array("Q", attempt)
        at = HEADER_WORDS + 2 * slot
        self._words[at + 1] = 0
        self._words[at] = process
        self._words[at + 1] = number

    def remove(self, attempt: bytes) -> None:
        """It is about to run, or over."""
        slot = self._slots.get(attempt)
        if slot is not None:
            self._words[HEADER_WORDS + 2 * slot + 1] = 0

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """A death before the end says nothing about anybody; nor does one after an error in it."""
        self._words[1] = 1
        yield
        self._words[1] = 0


class QueueReader:
    """The gateway's side: the page of one incarnation."""

    def __init__(self, path: str) -> None:
        """Raises OSError: there is none."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def queued(self, process: int) -> frozenset[int]:
        """The numbers of the attempts of gateway process `process`; none if that is not certain."""
        try:
            page = os.pread(self._fd, PAGE_BYTES, 0)
        except OSError:
            return frozenset()
        if len(page) != PAGE_BYTES:
            return frozenset()
        words = array("Q", page)
        if words[0] != MAGIC or words[1]:
            return frozenset()
        pairs = zip(words[2::2], words[3::2], strict=True)
        return frozenset(number for owner, number in pairs if number and owner == process)

    def close(self) -> None:
        os.close(self._fd)


def attempt_name(process: int, number: int) -> bytes:
    return array("Q", (process, number)).tobytes()


def _make(path: str) -> mmap.mmap:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, PAGE_BYTES)  # a full disk must not be a SIGBUS later
        return mmap.mmap(fd, PAGE_BYTES)
    finally:
        os.close(fd)
