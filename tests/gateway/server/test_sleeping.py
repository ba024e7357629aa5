"""Goal: an engine that sleeps costs a wait, and no request.

Method: a real link and real sockets; the engine's supervisor is a stand-in that reports what the
test says, or nothing.
"""

from __future__ import annotations

import asyncio

from gateway.core.sleep_door import SleepRules
from gateway.server import links
from gateway.server.links import GatewayEngineLink
from plumbing.errors import UnderstudyError
from plumbing.pod.messages import GOAL_CATALOGUE, EngineReportMsg, Tier
from plumbing.pod.paths import engine_socket
from plumbing.service.clock import SystemClock
from plumbing.service.events import EventLog
from plumbing.wire.connection import Handler
from plumbing.wire.server import Server
from tests.gateway.server.harness import CHAT, configured, scene
from tests.helpers import auntil

ASKED = {"messages": [], "max_tokens": 4}


class Supervisor(Handler):
    """It sleeps; `refusal` is what it says to a goal."""

    def __init__(self) -> None:
        self.is_silent = False
        self.refusal = ""
        self.report = EngineReportMsg(
            "engine-0", "i", 1, "resting", Tier.WARM, Tier.WARM, "user", 0, 0, True
        )

    def received(self, conn, message, request_id, fds) -> None:
        if self.is_silent:
            return
        if message.goal is not None and self.refusal:
            conn.fault(UnderstudyError("engine.cannot", self.refusal), request_id, close=False)
        else:
            conn.send(self.report, request_id)


@scene(hold_ms=60_000)
async def test_a_supervisor_that_does_not_answer_is_a_visible_reason(bench, monkeypatch):
    """Goal: a deadline, a sentence, and everything goes on afterwards. Method: it refuses to wake,
    then it says nothing; a request that waited behind the door is sent."""
    supervisor = Supervisor()
    path = engine_socket(bench.directory, "engine-0")
    server = Server(path, GOAL_CATALOGUE, supervisor, service="engine")
    await server.start()
    engine, clock = await bench.active(), SystemClock()
    settings = configured(bench.directory, rest=SleepRules())
    log = EventLog("gateway", clock)
    link = GatewayEngineLink(settings, bench.exchange, clock, log)
    task = asyncio.create_task(link.run())
    link.granted(engine.name, engine.token)
    await auntil(lambda: link.core.door, "the gateway to know that it sleeps")
    supervisor.refusal = "no memory"
    client = await bench.asking(CHAT, ASKED)
    await auntil(lambda: bench.load.waiting, "a request to wait")
    link.count()
    await auntil(lambda: link.problem == "no memory", "the refusal")
    assert "gateway.goal_refused" in [each.type for each in log.kept_since(0)]
    supervisor.is_silent = True
    monkeypatch.setattr(links, "ANSWER_S", 0.001)

    def is_given_up() -> bool:
        link.count()  # the request still waits, so the engine is woken once more
        return link.core.said is None

    await auntil(is_given_up, "the gateway to give it up")
    assert "has not answered for" in str(link.problem)
    assert (await client.answer()).status == 200
    monkeypatch.setattr(links, "ANSWER_S", 60.0)
    supervisor.is_silent = False
    await auntil(lambda: link.core.door, "it to be heard again")
    task.cancel()
    await asyncio.wait([task])
    await server.close()
