"""A program for tests of init: `python init_program.py FILE [BEHAVIOUR…]`.

It appends its pid, its number of restarts and whom it replaces to FILE, and behaves as it is told:
`ready` and beats, `exit=CODE`, `child` (one in its own session), `deaf` (to SIGTERM),
`bad-successor` (exits with 2 where it replaces another one).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

from plumbing.service import notify
from plumbing.service.init import SUCCEEDS_ENV
from plumbing.service.process import arm_from_environment
from plumbing.service.signals import SignalInbox


def begin(path: str, *, has_child: bool) -> None:
    if has_child:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(path, "a") as stream:
        stream.write(f"{os.getpid()} {notify.restarts()} {os.environ.get(SUCCEEDS_ENV) or '-'}\n")


async def main(path: str, *words: str) -> int:
    arm_from_environment()
    inbox = SignalInbox()
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "bad-successor" in words and os.environ.get(SUCCEEDS_ENV):
        return 2
    if "ready" in words:
        notify.ready()
    begin(path, has_child="child" in words)
    for word in words:
        if word.startswith("exit="):
            return int(word.removeprefix("exit="))
    await inbox.get()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
