"""Errors as users and programs see them: a stable dotted code, one sentence, details.

    UnderstudyError            exit 1   the command failed
    ├── UsageError             exit 2   a bad flag, a missing path
    ├── UnreachableError       exit 3   nothing answers there
    ├── DegradedError          exit 4   it works, without redundancy
    ├── WaitTimeoutError       exit 5   a wait reached its deadline
    ├── GivenUpError           exit 69  a program ends because no restart of it can help
    ├── ProtocolError          exit 1   the peer's fault: closes its connection only
    └── RemoteError            exit 1   the peer answered with an error frame
    InvariantError             (not an UnderstudyError) our own fault: crash with a stack trace

The message names the holder or the limit, and the fix. HTTP, `--json` and the logs have the same
three fields.

The last section recognizes the machine's own shortages: descriptors, processes, threads, memory,
disks. They may end at any moment, so the caller reports what to raise or free, and retries. A
shortage never counts as an answer to a question, nor against the program that met it.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Any


class UnderstudyError(Exception):
    """An error with a stable `code`, a sentence, and machine-readable `details`."""

    exit_code = 1

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def to_dict(self) -> dict[str, Any]:
        """`{"code": …, "message": …, "details": {…}}`, the form of errors in JSON."""
        return {"code": self.code, "message": self.message, "details": self.details}

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


class UsageError(UnderstudyError):
    exit_code = 2


class UnreachableError(UnderstudyError):
    exit_code = 3


class DegradedError(UnderstudyError):
    exit_code = 4


class WaitTimeoutError(UnderstudyError):
    exit_code = 5


class GivenUpError(UnderstudyError):
    """A crash loop, or a fault that a restart does not cure: an init ends its container."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h, as in plumbing/service/init.py


class ProtocolError(UnderstudyError):
    """The peer broke the protocol; its connection is closed, and no other is affected."""


class RemoteError(UnderstudyError):
    """The peer answered with an error frame."""


class InvariantError(AssertionError):
    """Our own fault. Never caught: a process whose state is inconsistent must end."""


_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
DISK = "disk"  # in an error's details: whether a disk has caused it, which a peer cannot see
CAUSES_MAX = 8  # that are looked at: an error may even be its own cause


def is_disk_fault(error: BaseException | None) -> bool:
    """Whether a disk that is full, read-only or broken has caused `error`."""
    for _ in range(CAUSES_MAX):
        if error is None:
            break
        details = getattr(error, "details", {})  # of an `UnderstudyError`
        if DISK in details:
            return bool(details[DISK])
        if isinstance(error, OSError) and error.errno in _DISK:
            return True
        error = error.__cause__
    return False


def is_shortage(error: OSError) -> bool:
    """Whether `error` only means that descriptors or memory have run out: ask again later."""
    return error.errno in _SHORTAGES


def explain_shortage(number: int | None, who: str = "this process") -> str:
    """What the kernel's `number` means for `who`, and for a shortage how to fix it. EAGAIN is that
    of fork(2): nothing here would block."""
    match number:
        case errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"{who} is at its limit of {limit} open files; raise the limit (ulimit -n, or the"
                " container's nofile limit)"
            )
        case errno.ENFILE:
            return "this machine is at its limit of open files; raise it (sysctl fs.file-max)"
        case errno.EAGAIN:
            return (
                "no process or thread can be created; raise the limit (ulimit -u, or pids.max of"
                " the control group) or stop some"
            )
        case errno.ENOMEM:
            return "no memory is left; raise the container's memory limit or stop something"
        case None:
            return "unknown error"
        case _:
            return os.strerror(number)
