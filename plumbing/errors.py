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
"""

from __future__ import annotations

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
