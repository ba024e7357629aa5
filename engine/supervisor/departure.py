"""How a supervisor ends: what people read, in the termination log and on stderr, and its code."""

from __future__ import annotations

import contextlib
import os

from engine.core.events import Exit
from engine.messages import FaultReport
from engine.supervisor.settings import TERMINATION_LOG, TERMINATION_LOG_BYTES_MAX, Settings
from plumbing.errors import UnderstudyError, UsageError

EXIT_USAGE = 2


def depart(settings: Settings, ending: Exit, fault: FaultReport | None, *, is_loop: bool) -> None:
    """Return for a departure that was asked for; otherwise say why and raise it.

    Raises:
        UnderstudyError: the reason, with the exit code that it deserves.
    """
    if ending.reason is None:
        write_termination_log(settings, "ended as it was told to")
        return
    write_termination_log(settings, ending.reason)
    code = "engine.crash_loop" if is_loop else fault.code if fault else "engine.cannot_go_on"
    kind = UsageError if ending.code == EXIT_USAGE else UnderstudyError
    raise kind(code, ending.reason)


def write_termination_log(settings: Settings, reason: str) -> None:
    """Best effort: the same sentence goes to stderr."""
    path = settings.config["termination_log"]
    if path is None:
        if not os.path.exists(TERMINATION_LOG):
            return  # not in Kubernetes; nobody wants a file of ours in /dev
        path = TERMINATION_LOG
    text = f"engine {settings.engine}: {reason}\n"
    with contextlib.suppress(OSError), open(path, "wb") as stream:
        stream.write(text.encode()[:TERMINATION_LOG_BYTES_MAX])
