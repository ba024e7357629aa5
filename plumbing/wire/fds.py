"""One owner per file descriptor, in a type.

A function that takes an `OwnedFd` owns it from then on and closes it whatever happens; a function
that borrows takes an `int`. A leaked descriptor keeps device memory alive, so leaks warn.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable


class OwnedFd:
    """A file descriptor with exactly one owner; closed once, by `close` or the `with` block."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        """Take ownership of `fd`."""
        if fd < 0:
            raise ValueError(f"not a file descriptor: {fd}")
        self._fd = fd

    def fileno(self) -> int:
        """Lend the number; it is valid while this object is open.

        Raises:
            ValueError: already closed or detached.
        """
        if self._fd < 0:
            raise ValueError("this file descriptor is closed")
        return self._fd

    @property
    def is_closed(self) -> bool:
        return self._fd < 0

    def detach(self) -> int:
        """Hand the number over; the caller must close it."""
        fd = self.fileno()
        self._fd = -1
        return fd

    def duplicate(self) -> OwnedFd:
        """A second descriptor of the same open file, close-on-exec, with its own owner."""
        return OwnedFd(os.dup(self.fileno()))

    def close(self) -> None:
        """Close the descriptor. Calling it again does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> OwnedFd:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            warnings.warn(f"file descriptor {self._fd} was never closed", ResourceWarning, 2)
            with contextlib.suppress(OSError):
                self.close()


def close_all(fds: Iterable[OwnedFd]) -> None:
    """Close every one of `fds`, whatever closing any of them raises."""
    failed: BaseException | None = None
    for fd in fds:  # no ExitStack: there may be thousands
        try:
            fd.close()
        except BaseException as error:
            failed = error
    if failed is not None:
        raise failed
