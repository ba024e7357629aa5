"""The size of the KV cache on which the engines of a model agree, and the record of it.

Owns `kv_layout.json`, or `kv_layout_<model>.json` in a pod with models. A supervisor whose backend
is prepared holds a shared flock on it until it exits. The first holder writes the record, all
others compare; `--kv-change` lets a newcomer replace it. So a record of dead engines binds no one,
and an engine that relaunches finds its own. The surprising thing: changing an exclusive flock into
a shared one releases it in between (man 2 flock), so the writer reads the record again once it
holds the shared one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

import msgspec

from plumbing.errors import UsageError, is_shortage
from plumbing.wire.fds import OwnedFd
from plumbing.wire.sockets import no_descriptors

NAME = "kv_layout.json"
RECORD_BYTES_MAX = 4096  # an engine's id is short: a longer file is not ours


class KvRecord(msgspec.Struct, frozen=True):
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

    def __init__(self, directory: str, engine: str, *, may_change: bool, model: str = "") -> None:
        name = f"kv_layout_{model}.json" if model else NAME
        # Which is instant unless that engine's supervisor is stopped.
        self._another = f"waiting for another engine to write {name}; is its supervisor stopped?"
        self._path = os.path.join(directory, name)
        self._engine = engine
        self._may_change = may_change
        self._fd: OwnedFd | None = None
        self._mine: KvRecord | None = None
        self.note: str | None = None  # for the user, in status and the log

    def agree(self, kv_bytes: int, ranks: int) -> str | None:
        """Agree on this size with the other engines. A sentence says for what that has to wait: ask
        again.

        Raises:
            UsageError: `engine.kv_differs`; this engine has agreed to nothing then.
        """
        mine = KvRecord(kv_bytes, ranks, self._engine)
        if self._mine is not None and mine.agrees_with(self._mine):
            return None
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(self.close)
                if not self._hold(mine):
                    return self._another
                self._compare(mine)
                self._mine = mine
                undo.pop_all()
        except OSError as error:
            if is_shortage(error):
                return no_descriptors(f"open {self._path}", error).message
            # A disk that fails must not keep an engine from standing by.
            self.note = f"the size of the KV cache is not compared: {error.strerror} ({self._path})"
        return None

    def close(self) -> None:
        """Withdraw from the agreement; harmless to repeat."""
        if self._fd is not None:
            self._fd.close()
        self._fd = self._mine = None

    def _hold(self, mine: KvRecord) -> bool:
        """Whether we hold the shared flock; our record is written if no other engine holds it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = fd = self._fd or OwnedFd(os.open(self._path, flags, 0o600))
        if _lock(fd, fcntl.LOCK_EX):
            _write(fd, mine)
        return _lock(fd, fcntl.LOCK_SH)

    def _compare(self, mine: KvRecord) -> None:
        assert self._fd is not None
        agreed = _read(self._fd)
        self.note = None
        if agreed is None:
            self.note = f"{self._path} is not valid, so the size of the KV cache is not compared"
        elif not mine.agrees_with(agreed):
            if not self._may_change:
                raise _differs(mine, agreed)
            self.note = (
                f"--kv-change: the KV cache is {mine} here and {agreed} on {agreed.engine};"
                " restart the other engines with this size, too"
            )
            _write(self._fd, mine)


def _differs(mine: KvRecord, agreed: KvRecord) -> UsageError:
    return UsageError(
        "engine.kv_differs",
        f"{mine.engine} has a KV cache of {mine}, but the running engines of this pod agreed on"
        f" {agreed}, set by {agreed.engine}: give every engine the same size"
        " (--kv-cache-memory-bytes of vLLM; --kv-bytes, --slots and --max-context of the reference"
        " backend), or pass --kv-change to `engine run` for an upgrade",
        mine=msgspec.structs.asdict(mine),
        theirs=msgspec.structs.asdict(agreed),
    )


def _lock(fd: OwnedFd, kind: int) -> bool:
    try:
        fcntl.flock(fd.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(fd: OwnedFd) -> KvRecord | None:
    """The record; None where it is not valid."""
    try:
        return msgspec.json.decode(os.pread(fd.fileno(), RECORD_BYTES_MAX, 0), type=KvRecord)
    except msgspec.MsgspecError:
        return None


def _write(fd: OwnedFd, record: KvRecord) -> None:
    """In place, since the flocks are on this very file. A write that fails leaves an empty file,
    which binds no one, rather than another engine's record."""
    os.ftruncate(fd.fileno(), 0)
    os.pwrite(fd.fileno(), msgspec.json.encode(record) + b"\n", 0)
