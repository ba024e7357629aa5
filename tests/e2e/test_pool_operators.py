"""Goal: whoever looks at a pool's pod sees which model is awake, who waits and why, and who holds
what, on every surface alike.

Method: the pod of a pool file with the reference backend. A process of the model that is awake is
stopped, so its stream lasts and its turn is protected while the other model is waited for; a real
browser, the documents behind the commands, and the metrics of that moment. Then it goes on, and all
surfaces follow.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from plumbing.pod.paths import pool_socket
from plumbing.wire.blocking import BlockingClient
from pool.messages import CATALOGUE, SetMsg
from tests.browser import Tab, needs_chromium, tab
from tests.e2e.pools import RunningPool, running_pool
from tests.e2e.test_pool import DEVICE_BYTES, TWO
from tests.helpers import http_get, until
from tests.understudy.test_ui import page_of
from understudy.pod.ports import Ports
from understudy.status.gather import gather

pytestmark = pytest.mark.slow

CARDS = """JSON.stringify(Object.fromEntries([...document.querySelectorAll('#cards .card')].map(
    (card) => [card.querySelector('.name').textContent, card.dataset.state])))"""
WAITS = "document.getElementById('cards').innerText"
TIMELINE = "document.querySelector('#timeline svg').getAttribute('aria-label')"
BAR = "document.querySelector('#devices .memory').getAttribute('aria-label')"
SOUNDNESS = "document.getElementById('soundness').textContent"
ANSWERED = 'understudy_pool_requests_total{model="b",outcome="answered"}'


@needs_chromium
async def test_every_surface_shows_who_is_awake_who_waits_and_who_holds_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "pod").mkdir(mode=0o700)
    made = running_pool(tmp_path / "pod", monkeypatch, TWO, DEVICE_BYTES)
    async with made as pod, page_of(pod.directory) as address, tab(tmp_path) as page:
        await page.go(address)
        await scenario(pod, page)


async def scenario(pod: RunningPool, page: Tab) -> None:
    gateway = Ports().moved(pod.port - Ports().service).gateway
    await page.wait(f"{SOUNDNESS} === 'healthy'")
    await page.wait("document.querySelectorAll('#cards .card').length === 4")
    assert set(await cards(page)) == {"a", "b", "gateway", "pool"}

    await asyncio.to_thread(pod.ask, "a")
    with BlockingClient(pool_socket(str(pod.directory)), CATALOGUE) as client:
        await asyncio.to_thread(client.request, SetMsg("min_runtime", "1h", "a"), timeout_s=30)
    view = await gather(pod.directory)
    (model,) = [
        each["backend"]["pids"]["model"]
        for each in view["engines"]
        if each["engine"]["id"] == "a-0"
    ]
    os.kill(model, signal.SIGSTOP)
    try:
        running = asyncio.create_task(asyncio.to_thread(pod.ask, "a"))
        await page.wait("models.some((each) => each.model === 'a' && each.in_flight)")
        waiting = asyncio.create_task(asyncio.to_thread(pod.ask, "b"))
        await page.wait(f"{WAITS}.includes('is protected for')")
        assert (await cards(page))["a"] == "awake"
        assert "a awake since" in await page.evaluate(TIMELINE)
        assert (await page.evaluate(BAR)).startswith("a ")
    finally:
        os.kill(model, signal.SIGCONT)
    assert (await running)[0] == 200
    assert (await waiting)[0] == 200
    await page.wait(f"!{WAITS}.includes('is protected for')")
    await page.wait(f"JSON.parse({CARDS}).b === 'awake'")
    assert "b awake since" in await page.evaluate(TIMELINE)
    # A child's counts come with its next heartbeat.
    await asyncio.to_thread(
        until, lambda: value(gateway, ANSWERED) == 1, "the answer to be counted"
    )
    assert page.errors == []
    assert page.hosts() == {"127.0.0.1"}


async def cards(page: Tab) -> dict[str, str]:
    return dict(json.loads(await page.evaluate(CARDS)))


def value(port: int, line: str) -> float:
    """Of `/metrics` now."""
    page = http_get(port, "/metrics")[1].splitlines()
    (found,) = [each for each in page if each.startswith(f"{line} ")]
    return float(found.rpartition(" ")[2])
