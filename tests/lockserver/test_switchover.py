"""A switchover as the lock server's process and its command handle it; the engines are
stand-ins."""

from __future__ import annotations

import urllib.request
from typing import Any

from lockserver.messages import CATALOGUE, HandOverMsg, SwitchedOverMsg, SwitchOverMsg
from plumbing.wire.connection import connect
from tests.helpers import auntil
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess

INTERRUPTED = 130


def metric(server: ServerProcess, line: str) -> float:
    """The value of the series that `line` begins."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (found,) = [each for each in lines if each.startswith(line)]
    return float(found.rsplit(" ", 1)[1])


class Asker:
    """A connection that sends requests and keeps the replies."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def opened(self, conn: Any) -> None:
        pass

    def received(self, conn: Any, message: Any, request_id: int, fds: Any) -> None:
        self.told.append((request_id, message))

    def closed(self, conn: Any, reason: str) -> None:
        pass


async def test_switchover_is_requested_shown_counted_and_answered(start_server: Any):
    """Goal: the path of one request. Method: a holder that is asked releases the lock; check
    status, metrics and the answer on the same connection, with the number of the request."""
    server = start_server()
    path = f"{server.directory}/lockserver.sock"
    async with (
        Engine(server.directory, "engine-0") as old,
        Engine(server.directory, "e-1") as new,
    ):
        token = await old.hold()
        new.launch()
        new.want("active")
        await auntil(lambda: server.lock()["waiters"], "the standby")
        asker = Asker()
        conn = await connect(path, CATALOGUE, asker, 5)
        conn.send(SwitchOverMsg("active", None, 60_000), request_id=7)
        await auntil(lambda: old.client.heard("hand_over"), "the request to the holder")
        (heard,) = old.client.heard("hand_over")
        assert heard == HandOverMsg("active", old.incarnation, "e-1", resume=False)
        under_way = server.lock()["switchover"]
        assert (under_way["from"], under_way["to"], under_way["overdue"]) == (
            "engine-0",
            "e-1",
            False,
        )
        assert metric(server, 'understudy_lock_switchover{lock="active"}') == 1
        assert not asker.told
        old.reap()
        old.relent()
        assert await new.granted() > token
        await auntil(lambda: asker.told, "the answer")
        ((number, answer),) = asker.told
        assert number == 7
        assert isinstance(answer, SwitchedOverMsg)
        assert (answer.source, answer.engine, answer.token) == ("engine-0", "e-1", new.token())
        done = 'understudy_lock_switchovers_total{lock="active",result="done"}'
        assert metric(server, done) == 1
        assert metric(server, 'understudy_lock_switchover{lock="active"}') == 0
        conn.close("asked")
