"""Tells an init, or systemd, that this process serves, and from then on that its loop turns.

The protocol is sd_notify(3)'s: datagrams to NOTIFY_SOCKET. Without that variable nothing is sent.
A loop that is blocked, and a process that is stopped, send nothing and are killed and restarted
(plumbing/service/init.py; WatchdogSec of a systemd unit).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

SOCKET_ENV = "NOTIFY_SOCKET"
RESTARTS_ENV = "UNDERSTUDY_RESTARTS"
BEAT_S = 0.5  # six of them in the 3 s after which an init calls a program hung


def ready(yield_ms: int = 0) -> None:
    """The program serves: say so, and beat from this loop for as long as it runs. `yield_ms`: how
    long an init waits before it restarts this program once it has died.

    The variable is removed from the environment: what this process starts must not speak for it.
    """
    address = os.environ.pop(SOCKET_ENV, "")
    if not address:
        return
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    notify.setblocking(False)
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    loop = asyncio.get_running_loop()

    def beat(message: bytes) -> None:
        with contextlib.suppress(OSError):  # full, or init listens no more
            notify.sendto(message, address)
        loop.call_later(BEAT_S, beat, b"WATCHDOG=1")

    beat(b"READY=1\nYIELD_MS=%d\nWATCHDOG=1" % yield_ms)


def restarts() -> int:
    """How often an init has restarted this program in its container; 0 without an init."""
    value = os.environ.get(RESTARTS_ENV, "")
    return int(value) if value.isdecimal() else 0
