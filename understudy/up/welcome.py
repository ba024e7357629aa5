"""Says how to use a pod, once requests to it are answered, and what a pod that stops waits for.

The welcome waits without a deadline: a pod may serve long before its status says that it is whole,
and `understudy up` must not stop it for that. What is missing is said again and again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from plumbing.errors import UnderstudyError
from plumbing.pod.observers import ask
from plumbing.pod.paths import pool_socket
from plumbing.service.clock import SystemClock
from plumbing.text import duration
from pool.messages import CATALOGUE, StatusMsg
from understudy.drill.killer import service_of, whole_of
from understudy.http_get import get
from understudy.pod.table import UI, Container, program, reachable
from understudy.status.gateway_view import is_open
from understudy.status.gather import gather
from understudy.status.view import awaited
from understudy.up.directory import has_pool

POLL_S = 0.05
SAID_EVERY_S = 10.0
ALONE_AFTER_S = 10.0  # a pod that serves is announced without a standby then
MODELS_TIMEOUT_S = 5.0

FAREWELL_POLL_S = 0.1  # until the engines know that they are to exit, and count what is left

clock = SystemClock()


async def say_welcome(
    directory: Path, containers: Sequence[Container], say: Callable[[str], None]
) -> None:
    """Once the pod in `directory` serves, say where to send requests and how to look at it."""
    began_ms = said_ms = clock.now_ms()
    while True:
        view = await gather(directory)
        lines, missing = (
            await _pool_lines(directory, view, containers)
            if has_pool(containers)
            else await _pod_lines(directory, view, containers, clock.now_ms() - began_ms)
        )
        if lines:
            for line in ("", *lines, ""):
                say(line)
            return
        if clock.now_ms() - said_ms > SAID_EVERY_S * 1000:
            said_ms = clock.now_ms()
            say(f"waiting for the pod to serve, {duration(said_ms - began_ms)}: {missing}")
        await asyncio.sleep(POLL_S)


async def _pod_lines(
    directory: Path, view: dict[str, Any], containers: Sequence[Container], waited_ms: float
) -> tuple[list[str], str]:
    """What to say, or nothing and what is missing."""
    whole, url = whole_of(view), _url(view)
    missing = "; ".join(view["problems"]) or "no standby is queued for the lock"
    is_serving = view["active"] is not None and is_open(view["gateway"])
    is_time = whole is not None or waited_ms > ALONE_AFTER_S * 1000
    if not (url and is_serving and is_time):
        return [], missing
    answer = await get(f"{url}/v1/models", MODELS_TIMEOUT_S)
    models = answer.json().get("data") or [{}]
    standby = f"{', '.join(whole.standbys)} is in standby" if whole else f"NO standby ({missing})"
    command = " ".join(program("understudy"))
    lines = [
        f"{view['active']} is active, {standby}. "
        f"Send requests to {url}; Ctrl-C stops the pod. Try:",
        _request(url, models[0].get("id", "?")),
        f"  {command} status --dir {directory}",
        *_page(containers),
        f"  {command} drill --attach --dir {directory}",
    ]
    return lines, ""


async def _pool_lines(
    directory: Path, view: dict[str, Any], containers: Sequence[Container]
) -> tuple[list[str], str]:
    """As `_pod_lines`. No engine needs to be active: a request raises its model."""
    try:
        answered = await ask(pool_socket(str(directory)), CATALOGUE, StatusMsg())
    except UnderstudyError as error:
        return [], error.message
    document = getattr(answered.message, "document", {})
    models = [str(each.get("model")) for each in document.get("models") or ()]
    url = _url(view)
    if not (document.get("gateways") and models):
        return [], "no gateway is connected to the pool"
    if not (url and is_open(view["gateway"])):
        return [], "; ".join(view["problems"]) or "the gateway does not accept"
    command = " ".join(program("understudy"))
    lines = [
        f"Models: {', '.join(models)}. A request wakes its model. Send requests to {url};"
        " Ctrl-C stops the pod. Try:",
        _request(url, models[-1]),
        f"  {command} pool status --dir {directory}",
        f"  {command} pool explain --dir {directory}",
        *_page(containers),
    ]
    return lines, ""


def _page(containers: Sequence[Container]) -> list[str]:
    """The address of the page, where there is one."""
    probes = [each.startup for each in containers if each.name == UI]
    return [f"  http://{urlsplit(each.url).netloc}/" for each in probes if each is not None]


def _url(view: dict[str, Any]) -> str:
    """Where requests go; empty while the lock server does not say it."""
    address = service_of(view)
    host, _, port = address.rpartition(":")
    return f"http://{reachable(host.strip('[]'))}:{port}" if address else ""


def _request(url: str, model: str) -> str:
    body = {"model": model, "prompt": "Hello", "max_tokens": 16}
    return (
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )


async def say_farewell(directory: Path, say: Callable[[str], None]) -> None:
    """Say how many requests the pod in `directory` waits for while it stops, every ten seconds."""
    began_ms = clock.now_ms()
    while True:
        view = await gather(directory)
        requests, most_ms = awaited(view)
        if not (view["stopping"] and requests):
            await asyncio.sleep(FAREWELL_POLL_S)
            continue
        left_s = max(0.0, most_ms - clock.now_ms() + began_ms) / 1000
        say(f"waiting up to {left_s:.0f} s for {requests} request{'s' if requests > 1 else ''}")
        await asyncio.sleep(SAID_EVERY_S)
