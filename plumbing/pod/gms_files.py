"""Two small files of the memory service (gms) for the other processes of its pod.

The device list names the pod's devices, in order. A pool file may number its devices; NVML, CUDA
and each container can count differently, so a number counts what gms serves, and all processes read
its list once, when they start.

The absence file says why a device has no memory server, for those who ask that server in vain. The
supervisor opens it at the start and rewrites it in place, because the usual reason is that no
descriptor is left. It is a hint: a moment old, and a killed writer leaves it behind.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence

from plumbing.pod.paths import device_list, gms_absence
from plumbing.service.files import write_atomic
from plumbing.wire.fds import OwnedFd

# How a backend learns its devices in host memory, by rank, with commas; HOST-0 … unless set.
HOST_DEVICES_ENV = "UNDERSTUDY_HOST_DEVICES"


def write_device_names(directory: str, names: Sequence[str]) -> None:
    """Put the list there. Without room for it there is none, rather than an old one: only a pool
    file with numbers needs it, and its readers say that it is missing."""
    path = device_list(directory)
    try:
        content = {"schema": 1, "pid": os.getpid(), "devices": list(names)}
        write_atomic(path, content, survives_power_cut=False)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)


def read_device_names(directory: str) -> tuple[str, ...]:
    """The list; empty if no memory service has written one."""
    try:
        with open(device_list(directory), encoding="utf-8") as stream:
            names = json.load(stream)["devices"]
        return tuple(map(str, names))
    except (OSError, ValueError, KeyError, TypeError):
        return ()


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
