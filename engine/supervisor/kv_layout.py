"""The size of the KV cache on which a pod's engines agree, and the record of it.

Owns `kv_layout.json` in the shared directory. Whoever has prepared a backend holds a shared flock
on it from then until its supervisor ends; who finds nobody else holding it writes the record, and
everybody else compares. So a record of the dead binds nobody, and two engines that could take over
from each other are of one size, unless `--kv-change` says that an upgrade is meant: then the
newcomer's size is the one that counts for all that come later. Must not know what a backend does
with its memory.

Two surprising things. The flock is of the supervisor, not of the backend: an engine whose backend
is being launched anew comes back with the same size, so it still has its say. And changing an
exclusive flock into a shared one lets go of it in between (man 2 flock): whoever has written reads
again what is there once the shared one is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass

from plumbing.errors import UsageError
from plumbing.wire.fds import OwnedFd

NAME = "kv_layout.json"
RECORD_BYTES_MAX = 4096  # an engine's id is short; more than this is not ours


@dataclass(frozen=True, slots=True)
class KvRecord:
    """`engine` prepared a KV cache of `kv_bytes`, over all its `ranks`."""

    kv_bytes: int
    ranks: int
    engine: str

    def agrees_with(self, other: KvRecord) -> bool:
        return (self.kv_bytes, self.ranks) == (other.kv_bytes, other.ranks)

    def __str__(self) -> str:
        return f"{self.kv_bytes} bytes on {self.ranks} rank{'s' * (self.ranks > 1)}"


class KvLayout:
    """One engine's part in the agreement."""

    def __init__(self, directory: str, engine: str, *, may_change: bool) -> None:
        self._path = os.path.join(directory, NAME)
        self._engine = engine
        self._may_change = may_change
        self._fd: OwnedFd | None = None
        self._mine: KvRecord | None = None
        self.note: str | None = None  # what people should know of it: status and the log show it

    def agree(self, kv_bytes: int, ranks: int) -> bool:
        """Hold to this size with the others; False while another engine is just writing the
        record, which takes it no time unless it is stopped: ask again.

        Raises:
            UsageError: `engine.kv_differs`; this engine holds to nothing then.
        """
        mine = KvRecord(kv_bytes, ranks, self._engine)
        if self._mine is not None and mine.agrees_with(self._mine):
            return True
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(self.close)
                is_held = self._hold(mine)
                if is_held:
                    self._compare(mine)
                    self._mine = mine
                    undo.pop_all()
                return is_held
        except OSError as error:
            # A disk that fails must not keep an engine from standing by.
            self.note = f"the size of the KV cache is not compared: {error.strerror} ({self._path})"
            return True

    def close(self) -> None:
        """Hold to nothing any more; harmless to repeat."""
        if self._fd is not None:
            self._fd.close()
        self._fd = self._mine = None

    def _hold(self, mine: KvRecord) -> bool:
        """Whether we hold the shared lock; if nobody else holds it, with our record written."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = fd = self._fd or OwnedFd(os.open(self._path, flags, 0o600))
        if _lock(fd, fcntl.LOCK_EX):
            _write(fd, mine)
        return _lock(fd, fcntl.LOCK_SH)

    def _compare(self, mine: KvRecord) -> None:
        assert self._fd is not None
        theirs = _read(self._fd)
        self.note = None
        if theirs is None:
            self.note = f"{self._path} cannot be understood, so the KV cache's size is not compared"
        elif not mine.agrees_with(theirs):
            if not self._may_change:
                raise _differs(mine, theirs)
            self.note = (
                f"--kv-change: the KV cache has {mine} here and {theirs} on {theirs.engine};"
                " restart the other engines with this size too"
            )
            _write(self._fd, mine)


def _differs(mine: KvRecord, theirs: KvRecord) -> UsageError:
    return UsageError(
        "engine.kv_differs",
        f"{mine.engine} has a KV cache of {mine}, and {theirs.engine} set {theirs} for the engines"
        " of this pod that live: give every engine the same size (--kv-cache-memory-bytes of vLLM;"
        " --kv-bytes, --slots and --max-context of the reference backend), or pass --kv-change to"
        " `engine run` if an upgrade is meant",
        mine=asdict(mine),
        theirs=asdict(theirs),
    )


def _lock(fd: OwnedFd, kind: int) -> bool:
    try:
        fcntl.flock(fd.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(fd: OwnedFd) -> KvRecord | None:
    """The record, None where it is none of ours."""
    try:
        found = json.loads(os.pread(fd.fileno(), RECORD_BYTES_MAX, 0))
        return KvRecord(int(found["kv_bytes"]), int(found["ranks"]), str(found["engine"]))
    except (ValueError, TypeError, KeyError):
        return None


def _write(fd: OwnedFd, record: KvRecord) -> None:
    """In place, since the locks are on this very file. A write that fails leaves an empty file,
    which binds nobody, rather than a record of somebody else's."""
    os.ftruncate(fd.fileno(), 0)
    os.pwrite(fd.fileno(), json.dumps(asdict(record)).encode() + b"\n", 0)
