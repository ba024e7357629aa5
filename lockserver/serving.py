"""The serving file: proof that an engine which handed its lock over in place cannot serve.

One file per incarnation, made beside its witness. Every process that accepts requests or maps KV
memory holds a shared flock on it from before it does either until after it can do neither. The lock
server tries it alone, and only after the holder has said that it handed over (`want.over`).

The surprising things:

- The file's **length is the last token that is over**. The server sets it while it holds the file
  alone, and a process joins for a token only while the length is below it. That is seal, fence and
  re-grant in one: an order to wake that arrives too late finds the file sealed, and the same file
  serves the engine's next term. A length needs no space, so a full disk prevents nothing.
- A process leaves by `dup2` and never by `LOCK_UN`, which would drop the lock for a forked child
  that still has the mapping. The descriptor is not inheritable: a helper must not keep it.
- The seat is reserved before the device is opened. A dying process closes its highest descriptors
  first, and must let go of this file after the device.
- A process joins only the file that was made with its incarnation, whatever is at the path now.
"""

from __future__ import annotations

import fcntl
import os

from lockserver import witness
from lockserver.core.names import SERVING_PREFIX as SERVING_PREFIX
from lockserver.core.names import ServingFile as ServingFile
from lockserver.core.names import WitnessState as WitnessState
from lockserver.core.names import serving_name_of
from plumbing.errors import UnderstudyError


def create(directory: str, incarnation: str) -> tuple[str, ServingFile]:
    """Create the serving file of a new incarnation, mode 0600, held by no process.

    Raises:
        OSError: the directory is missing or cannot be written.
    """
    name = serving_name_of(incarnation)
    path = os.path.join(directory, name)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    return path, ServingFile(name, found.st_dev, found.st_ino)


class ServingSeat:
    """One process's place on the serving file. Make it before the device is opened."""

    def __init__(self, path: str, file: ServingFile) -> None:
        """Reserve the descriptors.

        Raises:
            OSError: there are none left.
        """
        self._path, self._file = path, file
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # so that leaving cannot fail
        self._seat = os.dup(self._null)
        self.token = 0  # for which it is held

    def join(self, token: int) -> None:
        """Hold the file, before this process accepts or maps anything under `token`.

        Raises:
            UnderstudyError: `serving.over`, `serving.replaced`: it must do neither.
            OSError: likewise; the file cannot be opened.
        """
        try:
            # O_NONBLOCK: a foreign fifo of that name must not block it.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self._path, flags)
        except FileNotFoundError as error:
            raise self._replaced() from error
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)  # waits out the server's try, which takes microseconds
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != (self._file.dev, self._file.ino):
                raise self._replaced()
            if found.st_size >= token:
                raise UnderstudyError(
                    "serving.over",
                    f"this engine was to serve under token {token}, but according to {self._path}"
                    f" token {found.st_size} is over",
                    token=token,
                    over=found.st_size,
                )
            os.dup2(fd, self._seat, inheritable=False)
        finally:
            os.close(fd)  # the seat is the same open file: the lock stays
        self.token = token

    def leave(self) -> None:
        """Let go, after this process has stopped accepting and unmapped. Harmless to repeat."""
        os.dup2(self._null, self._seat, inheritable=False)
        self.token = 0

    def close(self) -> None:
        """Let go and give up the place."""
        os.close(self._seat)
        os.close(self._null)

    def _replaced(self) -> UnderstudyError:
        return UnderstudyError(
            "serving.replaced",
            f"the serving file {self._path} was removed or replaced, so nothing would prove that"
            " this engine has handed over",
            path=self._path,
        )


def find(directory: str, incarnation: str) -> ServingFile | None:
    """The file at the serving file's path, if there is one."""
    name = serving_name_of(incarnation)
    found = witness.stat_file(os.path.join(directory, name))
    return None if found is None else ServingFile(name, found.st_dev, found.st_ino)


def probe(path: str, file: ServingFile, token: int) -> WitnessState:
    """Try the file that was filed; found free, it is sealed at `token` before it is unlocked."""
    return witness.probe(path, file.dev, file.ino, token)
