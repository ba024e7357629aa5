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
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from plumbing.pod.paths import pool_socket
from plumbing.wire.blocking import BlockingClient
from pool.messages import CATALOGUE, SetMsg
from tests.browser import Tab, needs_chromium, tab
from tests.documents import mismatches
from tests.e2e.pools import RunningPool, running_pool
from tests.e2e.test_pool import DEVICE_BYTES, TWO
from tests.helpers import until
from tests.understudy.test_ui import page_of
from understudy.doctor.checks import document, examine
from understudy.doctor.probe import look
from understudy.pod.ports import Ports
from understudy.schema import PodStatus
from understudy.status.events import past_events
from understudy.status.gather import gather
from understudy.status.view import lines

pytestmark = pytest.mark.slow

CARDS = """JSON.stringify(Object.fromEntries([...document.querySelectorAll('#cards .card')].map(
    (card) => [card.querySelector('.name').textContent, card.dataset.state])))"""
PLAN = "document.getElementById('plan').innerText"
TIMELINE = "document.querySelector('#timeline svg').getAttribute('aria-label')"
BAR = "document.querySelector('#devices .memory').getAttribute('aria-label')"
SOUNDNESS = "document.getElementById('soundness').textContent"
ANSWERED = 'understudy_pool_requests_total{model="b",outcome="answered"}'


@needs_chromium
def test_every_surface_shows_who_is_awake_who_waits_and_who_holds_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
        made = running_pool(tmp_path / "pod", monkeypatch, TWO, DEVICE_BYTES)
        async with made as pod, page_of(pod.directory) as address, tab(tmp_path) as page:
            await page.go(address)
            await scenario(pod, page)

    (tmp_path / "pod").mkdir(mode=0o700)
    asyncio.run(main())


async def scenario(pod: RunningPool, page: Tab) -> None:
    gateway = pod.port + 3  # free ports are consecutive, in the order of `Ports`
    pool = gateway + 1
    await page.wait(f"{SOUNDNESS} === 'healthy'")
    await page.wait("document.querySelectorAll('#cards .card').length === 4")
    assert set(await cards(page)) == {"a", "b", "gateway", "pool"}

    await asyncio.to_thread(pod.ask, "a")
    await asyncio.to_thread(set_of_a, pod, "1h")
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
        await page.wait(f"{PLAN}.includes('is protected for')")
        assert (await cards(page))["a"] == "awake"
        assert "a awake since" in await page.evaluate(TIMELINE)
        assert (await page.evaluate(BAR)).startswith("a ")
        await look_elsewhere(pod, pool)
    finally:
        os.kill(model, signal.SIGCONT)
    assert (await running)[0] == 200
    assert (await waiting)[0] == 200
    await page.wait(f"{PLAN}.includes('nobody')")
    assert (await cards(page))["b"] == "awake"
    assert "b awake since" in await page.evaluate(TIMELINE)
    # A child's counts come with its next heartbeat.
    await asyncio.to_thread(
        until, lambda: value(gateway, ANSWERED) == 1, "the answer to be counted"
    )
    assert page.errors == []
    assert page.hosts() == {"127.0.0.1"}


async def look_elsewhere(pod: RunningPool, port: int) -> None:
    """What `status`, `events`, `doctor` and the pool's metrics say at the same time."""
    view = await gather(pod.directory)
    text = "\n".join(lines(view, datetime.now(UTC)))
    assert "1 of 2 models awake, 1 waiting" in text
    assert "next   b   waits for room   1 waiting" in text
    assert "a has work and is protected for the first 1h00m of its turn" in text
    assert mismatches(view, PodStatus) == []
    assert (view["state"], view["active"]) == ("healthy", "a-0")
    events = {each["message"] for each in await past_events(pod.directory)}
    assert "a: waking → awake: a-0 serves" in events
    found = document("", examine(await look(pod.directory, Ports(), {})))
    checks: dict[str, Any] = {each["id"]: each for each in found["checks"]}
    names = ("pool", "pool_file", "pool_sizes", "pool_fit", "pool_waits", "memory_outside")
    statuses = [checks[name]["status"] for name in names]
    assert statuses == ["pass", "pass", "warn", "pass", "pass", "pass"], checks
    assert checks["pool_file"]["found"].endswith("1 settings were changed by `understudy pool set`")
    tickets = 'understudy_pool_tickets{model="b"}'
    assert await asyncio.to_thread(value, port, tickets) == 1
    bound = 'understudy_pool_bound_seconds{model="b"}'
    assert await asyncio.to_thread(value, port, bound) > 3_600


def set_of_a(pod: RunningPool, min_runtime: str) -> None:
    with BlockingClient(pool_socket(str(pod.directory)), CATALOGUE) as client:
        client.request(SetMsg("min_runtime", min_runtime, "a"), timeout_s=30)


async def cards(page: Tab) -> dict[str, str]:
    return dict(json.loads(await page.evaluate(CARDS)))


def value(port: int, line: str) -> float:
    """Of `/metrics` now."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    (found,) = [each for each in page.splitlines() if each.startswith(f"{line} ")]
    return float(found.rpartition(" ")[2])
