"""`understudy ui`: one page for all parts of a pod, and the news that it reads.

While a page is open, all parts are asked over their Unix sockets, every other second and after each
event. A new page is told the kept events first. The page only reads, runs only the script that it
contains, and connects only to where it came from. Requests must name a host that no attacker can
own (`plumbing.service.hosts`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import math
import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aiohttp import web

from plumbing.service import notify
from plumbing.service.hosts import KnownHosts, bind
from plumbing.service.log import is_our_fault
from plumbing.service.signals import until_ended
from plumbing.text import to_json
from understudy.status.gather import PodPart, Record, follow_events, pod_parts, said_of, view_of
from understudy.status.view import front_view

PAGE = Path(__file__).parent / "page.html"
PARTS_MAX = 64
EVENTS_MAX = 2000  # of all parts, some 300 bytes each, and told to each new page
POLL_S = 2.0
SETTLE_S = 0.1  # after an event, so that a burst of them costs one question to each part
ANSWER_S = 3.0
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
    """What is known of the pod in `directory`, for all pages."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: dict[str, PodPart] = {}  # that have or had a socket, by that
        self._events: deque[tuple[int, Record]] = deque(maxlen=EVENTS_MAX)
        self._count = 0  # of the events so far
        self._heard = asyncio.Condition()
        self._asking = asyncio.Lock()
        self._found: tuple[float, int, dict[str, Any]] = (-math.inf, 0, {})  # when, at which count

    async def run(self) -> None:
        """Hear the events that the parts keep, and new ones, until cancelled."""
        async with contextlib.aclosing(follow_events(self._directory, 0.0)) as records:
            async for record in records:
                self._count += 1
                self._events.append((self._count, record))
                async with self._heard:
                    self._heard.notify_all()

    async def news(self, since: int | None) -> dict[str, Any]:
        """Once there is an event after number `since`, or `POLL_S` have passed: the events since
        then, and what the parts say now. None: all events, at once. `next`: the next `since`."""
        if since is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S), self._heard:
                    await self._heard.wait_for(lambda: self._count > since)
            await asyncio.sleep(SETTLE_S)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        async with self._asking:  # one page asks the parts, and the others get what it has found
            found_s, count, found = self._found
            is_old = count != self._count or asked_s - found_s > POLL_S
            if is_old and found_s < asked_s:
                found_s, count = loop.time(), self._count
                found = await self._look()
                self._found = (found_s, count, found)
        events = [record for number, record in self._events if number > (since or 0)]
        return {**found, "events": events, "next": self._count}

    async def _look(self) -> dict[str, Any]:
        """What each part says of itself, and of the whole what `understudy status` says."""
        self._parts |= {part.path: part for part in pod_parts(self._directory)}
        said = await said_of([*self._parts.values()][:PARTS_MAX], ANSWER_S)
        view = view_of(self._directory, said)
        if (front := view["gateway"] or {}) and "pods" in front:
            view = front_view(view["dir"], front)
        about = [
            {"part": part.name, "kind": part.kind, "error": status.get("error"), "status": status}
            for part, status in said.items()
        ]
        return {"state": view["state"], "problems": view["problems"], "parts": about}


def application(hub: Hub, allowed_hosts: Iterable[str] = ()) -> web.Application:
    """`/` is the page, `/news` what it reads, `/live` the probe."""
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

    async def news(request: web.Request) -> web.StreamResponse:
        since = request.query.get("since", "")
        found = await hub.news(int(since[:15]) if since.isdecimal() else None)
        return web.json_response(text=to_json(found), headers={"Cache-Control": "no-store"})

    app = web.Application(middlewares=[only_known])
    app.router.add_get("/", show)
    app.router.add_get("/ui", show)
    app.router.add_get("/live", live)
    app.router.add_get("/news", news)
    return app


async def run(directory: Path, host: str, port: int, allowed_hosts: Iterable[str] = ()) -> None:
    """Serve the page until SIGTERM or SIGINT.

    Raises:
        UnderstudyError: `service.port_in_use`.
        UsageError: `service.cannot_bind`.
    """
    sock = bind(host, port)
    hub = Hub(directory)
    following = asyncio.create_task(hub.run())
    runner = web.AppRunner(application(hub, allowed_hosts), access_log=None, shutdown_timeout=0)
    try:
        await runner.setup()
        await web.SockSite(runner, sock).start()
        notify.ready()
        await until_ended(following)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await runner.cleanup()
