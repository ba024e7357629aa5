"""Why a device has no memory server: from its supervisor to whoever asks the server in vain.

A file that its writer opens at the start and rewrites in place, because the usual reason is that no
descriptor is left. It is a hint: a moment old, and a killed writer leaves it behind.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

from plumbing.part.paths import gms_absence
from plumbing.wire.fds import OwnedFd


class AbsenceFile:
    """The file in `directory`, empty at first; without it, nothing is written and nobody fails."""

    def __init__(self, directory: str) -> None:
        self._path = gms_absence(directory)
        self._fd: OwnedFd | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            self._fd = OwnedFd(os.open(self._path, flags, 0o600))

    def write(self, reasons: Mapping[str, str]) -> None:
        """Put the reasons there, by device."""
        if self._fd is None:
            return
        content = json.dumps({"schema": 1, "pid": os.getpid(), "reasons": dict(reasons)}).encode()
        with contextlib.suppress(OSError):  # a full disk: the log and /status have them too
            os.pwrite(self._fd.fileno(), content, 0)
            os.ftruncate(self._fd.fileno(), len(content))

    def close(self) -> None:
        """Remove it."""
        if self._fd is not None:
            self._fd.close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def absences(directory: str) -> dict[str, str]:
    """What the supervisor in `directory` has written, as sentences by device; nothing if there is
    none, or while it writes."""
    try:
        with open(gms_absence(directory), encoding="utf-8") as stream:
            document = json.load(stream)
        pid = document["pid"]
        return {
            device: f"gms serve (pid {pid}): {why}" for device, why in document["reasons"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
