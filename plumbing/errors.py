"""Errors that people and programs read: a stable dotted code, one sentence, details.

    UnderstudyError            exit 1   the command failed
    ├── UsageError             exit 2   a bad flag, a missing path
    ├── UnreachableError       exit 3   nobody answers there
    ├── DegradedError          exit 4   it works, without redundancy
    ├── WaitTimeoutError       exit 5   a wait reached its deadline
    ├── ProtocolError          exit 1   the peer's fault: costs its connection, nothing else
    └── RemoteError            exit 1   the peer's answer was an error frame
    InvariantError             (not an UnderstudyError) our own fault: crash with a stack trace

The message names the holder or the limit and the way out. HTTP, the command line's `--json` and
the logs render the same three fields.
"""

from __future__ import annotations

from typing import Any


class UnderstudyError(Exception):
    """An error with a stable `code`, a sentence for people, and machine-readable `details`."""

    exit_code = 1

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def to_dict(self) -> dict[str, Any]:
        """`{"code": …, "message": …, "details": {…}}`, the one form in which errors travel."""
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


class ProtocolError(UnderstudyError):
    """The peer broke the protocol; its connection is closed and nobody else notices."""


class RemoteError(UnderstudyError):
    """The peer answered with an error frame."""


class InvariantError(AssertionError):
    """Our own fault. Not caught anywhere: a process that is wrong about itself must end."""
