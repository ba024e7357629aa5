"""The backend as its supervisor sees it: prepared, awake, serving, draining.

Owns the order of these phases (the table is the enforcer), the lent listening socket, and the
HTTP server behind it. Knows no command line and no channel frames (`channel.py` has those), so
that the same object also serves alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from enum import StrEnum

from aiohttp import web

from engine.backends.reference.link import Checked, Ready
from engine.backends.reference.listener import Listener
from engine.backends.reference.routes import Service, make_app
from engine.messages import Healthy
from understudy.errors import ProtocolError
from understudy.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

# Connections that were accepted a moment before a drain have a request on its way: this long, it
# is answered (503, try again) instead of being cut.
DRAIN_SETTLE_S = 0.05
KEEPALIVE_S = 75.0
# For what is written but not sent when the last request ends. Not 0: aiohttp takes that for "no
# limit"; and not the rest of the budget: its `shutdown` waits that long for idle connections too.
FLUSH_S = 0.1


class Phase(StrEnum):
    PREPARING = "preparing"
    PREPARED = "prepared"
    AWAKE = "awake"
    SERVING = "serving"
    DRAINING = "draining"


# What may be asked in which phase, and the phase after it.
TRANSITIONS: Mapping[tuple[Phase, str], Phase] = {
    (Phase.PREPARING, "ready"): Phase.PREPARED,
    (Phase.PREPARED, "wake"): Phase.AWAKE,
    (Phase.PREPARED, "drain"): Phase.DRAINING,
    (Phase.AWAKE, "run_canary"): Phase.AWAKE,
    (Phase.AWAKE, "serve"): Phase.SERVING,
    (Phase.AWAKE, "drain"): Phase.DRAINING,
    (Phase.SERVING, "run_canary"): Phase.SERVING,
    (Phase.SERVING, "drain"): Phase.DRAINING,
}


class Backend:
    """One incarnation's model service."""

    def __init__(self, service: Service) -> None:
        self.phase = Phase.PREPARING
        self._service = service
        self._listener: Listener | None = None
        self._runner = web.AppRunner(
            make_app(service),
            handler_cancellation=True,  # a client that leaves frees its slot
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
        )

    async def prepare(self) -> Ready:
        """Wait for the model, with the HTTP server built meanwhile: waking costs nothing of it."""
        await self._runner.setup()
        ready = await self._service.link.ready()
        self._step("ready")
        self._service.ready = ready
        return ready

    async def wake(self, engine: str, token: int, listening: OwnedFd) -> int:
        """Take KV memory and keep `listening` for `serve`; the bytes taken. Takes the fd."""
        with listening:
            self._step("wake")
            server = self._runner.server
            assert server is not None
            self._service.engine, self._service.token = engine, token
            self._listener = Listener(
                listening.duplicate(), server, lambda: len(server.connections)
            )
            self._service.heard = self._listener.heard
        return (await self._service.link.take_memory()).kv_bytes

    async def run_canary(self) -> Checked:
        self._step("run_canary")
        return await self._service.link.check()

    def serve(self) -> None:
        self._step("serve")
        assert self._listener is not None
        self._listener.start()

    def health(self) -> Healthy:
        return Healthy(
            in_flight=self._service.link.in_flight,
            progress=self._service.link.progress,
            accepting=self._listener is not None and self._listener.is_accepting,
            rejected=self._service.rejected,
        )

    async def drain(self, budget_s: float) -> None:
        """Accept no more, refuse what still comes, finish what runs, cut what outlasts the budget.

        What waits in the backlog stays there for the next engine.
        """
        end = time.monotonic() + budget_s
        self._step("drain")
        self._service.is_draining = True
        if self._listener is not None:
            self._listener.stop()
        await asyncio.sleep(min(DRAIN_SETTLE_S, budget_s))
        server = self._runner.server
        assert server is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                await self._service.idle.wait()
        server.pre_shutdown()  # kept connections were answered until now, and end here
        await server.shutdown(FLUSH_S)
        await self._runner.cleanup()

    def _step(self, request: str) -> None:
        target = TRANSITIONS.get((self.phase, request))
        if target is None:
            raise ProtocolError(
                "engine.backend_phase",
                f"{request} makes no sense while the backend is {self.phase}",
                phase=str(self.phase),
            )
        if target is not self.phase:
            logger.info("%s → %s: %s", self.phase, target, request)
        self.phase = target
