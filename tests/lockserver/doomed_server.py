"""A lock server that is killed at one step of a grant. Only its end is altered.

A program, `python -m tests.lockserver.doomed_server MOMENT TOKEN serve …`: the real command, which
kills itself when the grant with TOKEN reaches MOMENT (SIGKILL: nothing is flushed, closed or sent).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

from lockserver import cli
from lockserver.messages import GrantedMsg
from lockserver.state_file import LockStateFile
from plumbing.wire.connection import Connection

# In the order in which a grant reaches them.
MOMENTS = ("before_write", "half_written", "before_sync", "before_send", "after_send")


def _die(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL was survived")


def doom(moment: str, token: int) -> None:
    """Make this process die at `moment` of the grant with `token`."""
    write, send, pwrite = LockStateFile.write, Connection.send, os.pwrite

    def half(fd: int, slot: bytes, offset: int) -> NoReturn:
        pwrite(fd, slot[: len(slot) // 2], offset)
        _die()

    def doomed_write(self: LockStateFile, record: Any) -> None:
        if record.token >= token:
            if moment == "before_write":
                _die()
            elif moment == "half_written":
                os.pwrite = half
            elif moment == "before_sync":
                os.fdatasync = _die
        write(self, record)

    def doomed_send(self: Connection, message: Any, *args: Any, **options: Any) -> None:
        is_it = isinstance(message, GrantedMsg) and message.token >= token
        if is_it and moment == "before_send":
            _die()
        send(self, message, *args, **options)
        if is_it and moment == "after_send":
            _die()

    LockStateFile.write = doomed_write  # type: ignore[method-assign]  # the real one, and an end
    Connection.send = doomed_send  # type: ignore[method-assign]  # the same


if __name__ == "__main__":
    doom(sys.argv[1], int(sys.argv[2]))
    cli.main(sys.argv[3:])
