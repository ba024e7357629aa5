"""`understudy ui`: one page for all parts of a pod, and the one stream of events that it reads.

Each part is watched over its Unix socket. The stream has what was learned last of each part, the
kept events, and then everything new; a page that reconnects is told all of it again. The page only
reads, runs only the script that it contains, and connects only to where it came from. Requests must
name a host that no attacker can own (`plumbing.service.hosts`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

from aiohttp import web

from plumbing.pod.messages import EventMsg, WatchMsg
from plumbing.pod.observers import PeerWatch
from plumbing.service import notify
from plumbing.service.hosts import KnownHosts, bind
from plumbing.service.log import is_our_fault
from plumbing.service.signals import until_ended
from plumbing.text import to_json
from plumbing.wire.messages import Message
from understudy.status.gather import SINGLE, PodPart, pod_parts, status_of, view_of
from understudy.status.view import front_view

PAGE = Path(__file__).parent / "page.html"
PARTS_MAX = 64
EVENTS_MAX = 2000  # of all parts, some 300 bytes each, and told to each new page
QUEUE_MAX = 4000  # lines that wait for one page; one that reads more slowly begins anew
READERS_MAX = 32
RESCAN_S = 1.0
POLL_S = 2.0
SETTLE_S = 0.03  # after an event, so that a burst of them costs one question
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
        self._said: dict[PodPart, dict[str, Any]] = {}  # each part's last status, or its error
        self._followed: dict[str, asyncio.Task[None]] = {}  # by a part's socket
        self._view: dict[str, Any] = {}
        self._events: dict[tuple[str, int, str], dict[str, Any]] = {}  # oldest first
        self._readers: set[asyncio.Queue[str]] = set()

    async def run(self) -> None:
        """Follow every part that has or had a socket, until cancelled."""
        followed = self._followed
        try:
            while True:
                for part in pod_parts(self._directory):
                    if part.path not in followed and len(followed) < PARTS_MAX:
                        followed[part.path] = asyncio.create_task(self._follow(part))
                await asyncio.sleep(RESCAN_S)
        finally:
            for task in followed.values():
                task.cancel()
            await asyncio.gather(*followed.values(), return_exceptions=True)

    async def _follow(self, part: PodPart) -> None:
        """Ask one part for its status again and again, and hear its events."""
        is_due = asyncio.Event()

        def received(message: Message) -> None:
            if isinstance(message, EventMsg):
                self.happened(part.name, message.record)
            is_due.set()

        watch = PeerWatch(part.path, part.catalogue, WatchMsg(0), received, is_due.set)
        try:
            while True:
                is_due.clear()
                self._said[part] = status = await status_of(part, ANSWER_S)
                self.tell(_about(part, status))
                self._look()
                await asyncio.sleep(POLL_S / 4 if "error" in status else SETTLE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await is_due.wait()
        finally:
            await watch.close()

    def _look(self) -> None:
        """Tell how the whole is, as `understudy status` says it, once every part was asked."""
        view = view_of(self._directory, self._said)
        if (front := view["gateway"] or {}) and "pods" in front:
            view = front_view(view["dir"], front)
        said = {"view": {key: view[key] for key in ("state", "problems")}}
        if said != self._view and len(self._said) == len(self._followed):
            self._view = said
            self.tell(said)

    def happened(self, part: str, record: dict[str, Any]) -> None:
        """Keep and tell an event, unless it is known: a part says all of them to each watch."""
        key = (part, record["id"], record["ts"])
        if key in self._events:
            return
        self._events[key] = said = {"part": part, "event": record}
        if len(self._events) > EVENTS_MAX:
            del self._events[next(iter(self._events))]
        self.tell(said)

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
        """What is known, what happens, and an empty line when nothing does; ends for a reader that
        is too slow."""
        queue: asyncio.Queue[str] = asyncio.Queue(QUEUE_MAX)
        self._readers.add(queue)
        try:
            known = [_about(*each) for each in self._said.items()]
            for said in (*known, *self._events.values(), *([self._view] if self._view else ())):
                yield to_json(said)
            while queue in self._readers:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        yield await queue.get()
                except TimeoutError:
                    yield ""
        finally:
            self._readers.discard(queue)


def _about(part: PodPart, status: dict[str, Any]) -> dict[str, Any]:
    several = "gms" if part.is_memory else "engine"
    kind, error = part.name if part.name in SINGLE else several, status.get("error")
    found = None if error else status
    return {"part": part.name, "kind": kind, "status": found, "error": error}


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
