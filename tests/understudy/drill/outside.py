"""An address outside a pod: a small reverse proxy, under a path prefix, that refuses at will."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import aiohttp
from aiohttp import web

from tests.helpers import free_port

PREFIX = "/llm"
REFUSALS = ("502", "reset")
PASSED_ON = ("Content-Type", "X-Understudy-Engine", "X-Understudy-Token")


class Outside:
    """Start with `async with`. Forwards to `port` what comes in under PREFIX. `refuses`: which of
    REFUSALS the next request meets; None: it is forwarded."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.refuses: Callable[[], str | None] = lambda: None
        self.hosts: set[str] = set()
        self.requests = 0
        self.port = free_port()
        self.token = ""  # replaces that of the pod
        self._pod, self._tls = f"http://127.0.0.1:{port}", tls

    async def __aenter__(self) -> Outside:
        app = web.Application()
        app.router.add_post(f"{PREFIX}/{{path:.*}}", self._answer)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        self.hosts.add(request.host)
        refusal = self.refuses()
        if refusal is not None:
            if refusal == "reset" and request.transport is not None:
                request.transport.abort()
            return web.Response(status=502, text="no")
        url, body = f"{self._pod}/{request.match_info['path']}", await request.read()
        headers = {"Content-Type": "application/json"}
        async with self._session.post(url, data=body, headers=headers) as answer:
            kept = {name: answer.headers[name] for name in PASSED_ON if name in answer.headers}
            if self.token:
                kept["X-Understudy-Token"] = self.token
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
        return response
