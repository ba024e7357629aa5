"""The backend as its supervisor sees it: prepared, awake, serving, draining.

Owns the lent listening socket and the HTTP server behind it. Knows no command line and no channel
frames, so that the same object also serves alone.
"""

from __future__ import annotations

from aiohttp import web

from engine.backends.drain import until_done
from engine.backends.phases import Phases
from engine.backends.reference.http.listener import Listener
from engine.backends.reference.http.routes import Service, make_app
from engine.backends.reference.link import Ready
from engine.messages import Canary, Healthy
from plumbing.wire.fds import OwnedFd

KEEPALIVE_S = 75.0
# For what is cut because the budget is spent. Not 0: aiohttp takes that for "no limit"; and not
# more: its `shutdown` waits that long for idle connections too.
FLUSH_S = 0.1


class Backend:
    """One incarnation's model service."""

    def __init__(self, service: Service) -> None:
        self.phases = Phases()
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
        self.phases.step("ready")
        self._service.ready = ready
        return ready

    async def wake(self, engine: str, token: int, listening: OwnedFd) -> int:
        """Take KV memory and keep `listening` for `serve`; the bytes taken. Takes the fd."""
        with listening:
            self.phases.step("wake")
            server = self._runner.server
            assert server is not None
            self._service.engine, self._service.token = engine, token
            self._listener = Listener(
                listening.duplicate(), server, lambda: len(server.connections)
            )
            self._service.heard = self._listener.heard
        return (await self._service.link.take_memory()).kv_bytes

    async def run_canary(self) -> Canary:
        self.phases.step("run_canary")
        checked = await self._service.link.check()
        return Canary(checked.ok, checked.detail)

    async def serve(self) -> None:
        self.phases.step("serve")
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
        """Accept no more, serve what comes on open connections, cut what outlasts the budget.

        What waits in the backlog stays there for the next engine.
        """
        self.phases.step("drain")
        self._service.is_draining = True
        if self._listener is not None:
            self._listener.stop()
        server = self._runner.server
        assert server is not None
        await until_done(
            lambda: [connection.transport for connection in server.connections],
            self._is_idle,
            budget_s,
        )
        server.pre_shutdown()
        await server.shutdown(FLUSH_S)
        await self._runner.cleanup()

    def _is_idle(self) -> bool:
        is_arriving = self._listener is not None and self._listener.is_arriving
        return not is_arriving and self._service.idle.is_set()
