"""A client of the memory service that obeys one command per line and says JSON lines.

Started by `bench.ClientProcess`: `python -m tests.gms.client_process DIRECTORY MODE ENGINE DEVICE`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from gms.client import Keeper, Reader, Writer, messages, open_session
from plumbing.errors import UnderstudyError
from plumbing.service.process import arm_from_environment

MIB = 1 << 20


def say(what: str, **more: Any) -> None:
    print(json.dumps({"is": what, **more}), flush=True)


def fork() -> None:
    """A child that keeps every descriptor and mapping, and outlives this process by a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        signal.pause()
    say("forked", pid=child)


def main() -> None:
    arm_from_environment()
    directory, mode, engine, device = sys.argv[1:5]
    try:
        session = open_session(
            directory,
            device,
            messages.AttachMsg(
                engine,
                f"{engine}-1",
                mode,
                {"model": "tiny", "shards": {"a": "1"}},
                wait_ms=60_000,
            ),
            on_wait=lambda reason: say("waiting", reason=reason),
        )
    except UnderstudyError as error:
        say("refused", code=error.code, message=error.message)
        return
    say("writer" if isinstance(session, Writer) else "reader", epoch=session.epoch)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "place" and isinstance(session, Writer):
            nbytes = int(rest[0]) * MIB
            session.place("t", nbytes, (nbytes,), "uint8")
            session.write("t", b"\7" * nbytes)
            say("placed")
        elif word == "report" and isinstance(session, Writer):
            session.progress(int(rest[0]), 1000 * MIB)
            say("reported")
        elif word == "commit" and isinstance(session, Writer):
            session = session.commit(session.request.identity or {})
            say("committed", epoch=session.epoch)
        elif word == "read" and isinstance(session, Reader):
            say("bytes", first=session.read("t")[0])
        elif word == "fork":
            fork()
        elif word == "keep" and isinstance(session, Reader):
            keeper = Keeper(session, on_change=lambda said: say("change", said=said))
            keeper.start()
            say("keeping")
        elif word == "close":
            session.close()
            say("closed")


if __name__ == "__main__":
    main()
