"""`understudy ui`: one page for all parts of a pod, and the one stream of events that it reads.

While a page is open, all parts are asked over their Unix sockets, every other second and after each
event. The stream has the kept events, and then everything new; a page that reconnects is told all
of it again. The page only reads, runs only the script that it contains, and connects only to where
it came from. Requests must name a host that no attacker can own (`plumbing.service.hosts`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from plumbing.service import notify
from plumbing.service.hosts import KnownHosts, bind
from plumbing.service.log import is_our_fault
from plumbing.service.signals import until_ended
from plumbing.text import to_json
from understudy.status.gather import PodPart, follow_events, pod_parts, said_of, view_of
from understudy.status.view import front_view

PAGE = Path(__file__).parent / "page.html"
PARTS_MAX = 64
EVENTS_MAX = 2000  # of all parts, some 300 bytes each, and told to each new page
QUEUE_MAX = 4000  # lines that wait for one page; one that reads more slowly begins anew
READERS_MAX = 32
POLL_S = 2.0
SETTLE_S = 0.1  # after an event, so that a burst of them costs one question to each part
ANSWER_S = 3.0
HEARTBEAT_S = 15.0  # below the 30 to 60 s after which proxies cut a silent connection
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def policy_of(page: str) -> dict[str, str]:
    """The headers of `page`: only what is in it runs, and it connects only to its own origin."""
    found: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        found[kind].append(f"'sha256-{digest}'")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        f"script-src {' '.join(found['script'])}",
        f"style-src {' '.join(found['style'])}",
        "connect-src 'self'",
        "img-src data:",  # an empty icon, or the browser requests one
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-cache",  # after an upgrade the new page is shown
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


class Hub:
    """What is known of the pod in `directory`, and the pages that are told."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: dict[str, PodPart] = {}  # that have or had a socket, by that
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._is_due = asyncio.Event()
        self._readers: set[asyncio.Queue[str]] = set()

    async def run(self) -> None:
        """Hear the events of all parts, and ask them again and again while a page is open, until
        cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear())
            while True:
                self._is_due.clear()
                self._parts |= {part.path: part for part in pod_parts(self._directory)}
                if self._readers:
                    await self._look([*self._parts.values()][:PARTS_MAX])
                await asyncio.sleep(SETTLE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._is_due.wait()

    async def _look(self, parts: Sequence[PodPart]) -> None:
        """Tell what each part says of itself, and of the whole what `understudy status` says."""
        said = await said_of(parts, ANSWER_S)
        view = view_of(self._directory, said)
        if (front := view["gateway"] or {}) and "pods" in front:
            view = front_view(view["dir"], front)
        about = [
            {"part": part.name, "kind": part.kind, "error": status.get("error"), "status": status}
            for part, status in said.items()
        ]
        if about:
            self.tell({"state": view["state"], "problems": view["problems"], "parts": about})

    async def _hear(self) -> None:
        """Every event that the parts keep, and new ones; also that a part is gone, or back."""
        async with contextlib.aclosing(follow_events(self._directory, 0.0)) as records:
            async for record in records:
                said = {"event": record}
                self._events.append(said)
                self.tell(said)
                self._is_due.set()

    def tell(self, said: dict[str, Any]) -> None:
        line = to_json(said)
        for queue in tuple(self._readers):
            try:
                queue.put_nowait(line)
            except asyncio.QueueFull:
                self._readers.discard(queue)

    @property
    def is_full(self) -> bool:
        return len(self._readers) >= READERS_MAX

    async def lines(self) -> AsyncGenerator[str]:
        """The kept events, what happens, and an empty line when nothing does; ends for a reader
        that is too slow."""
        queue: asyncio.Queue[str] = asyncio.Queue(QUEUE_MAX)
        self._readers.add(queue)
        self._is_due.set()
        try:
            for said in tuple(self._events):
                yield to_json(said)
            while queue in self._readers:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        yield await queue.get()
                except TimeoutError:
                    yield ""
        finally:
            self._readers.discard(queue)


def application(hub: Hub, allowed_hosts: Iterable[str] = ()) -> web.Application:
    """`/` is the page, `/stream` what it reads, `/live` the probe."""
    logging.getLogger("aiohttp.server").addFilter(is_our_fault)
    page, known = PAGE.read_text(), KnownHosts(allowed_hosts)
    headers = policy_of(page)

    @web.middleware
    async def only_known(request: web.Request, handler: Any) -> web.StreamResponse:
        error = known.refusal(request.headers.get("Host"))
        if error is not None and request.path != "/live":
            return web.json_response({"error": error.to_dict()}, status=421)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def show(request: web.Request) -> web.StreamResponse:
        return web.Response(text=page, content_type="text/html", headers=headers)

    async def live(request: web.Request) -> web.StreamResponse:
        return web.json_response({"ok": True, "reason": "running"})

    async def stream(request: web.Request) -> web.StreamResponse:
        if hub.is_full:
            return web.Response(status=503, text=f"{READERS_MAX} pages are open, the limit\n")
        answer = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would keep the events until its buffer is full
            }
        )
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            async with contextlib.aclosing(hub.lines()) as lines:
                async for line in lines:
                    await answer.write(f"data: {line}\n\n".encode() if line else b": idle\n\n")
        return answer

    app = web.Application(middlewares=[only_known])
    app.router.add_get("/", show)
    app.router.add_get("/ui", show)
    app.router.add_get("/live", live)
    app.router.add_get("/stream", stream)
    return app


async def run(directory: Path, host: str, port: int, allowed_hosts: Iterable[str] = ()) -> None:
    """Serve the page until SIGTERM or SIGINT.

    Raises:
        UnderstudyError: `service.port_in_use`.
        UsageError: `service.cannot_bind`.
    """
    socks = bind(host, port)
    hub = Hub(directory)
    following = asyncio.create_task(hub.run())
    runner = web.AppRunner(application(hub, allowed_hosts), access_log=None, shutdown_timeout=0)
    try:
        await runner.setup()
        for sock in socks:
            await web.SockSite(runner, sock).start()
        notify.ready()
        await until_ended(following)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await runner.cleanup()
