"""The page of `understudy ui`: what is served to whom, and how a real browser shows real deaths."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from plumbing.service.hosts import bind
from tests.browser import Tab, needs_chromium, tab
from tests.e2e.pods import Pod, home_with, in_pod
from tests.e2e.processes import kill
from tests.lockserver.processes import ServerProcess
from understudy.ui.server import PAGE, Hub, application

SIZE_MAX_BYTES = 40_000  # read as often as changed, and sent with every request; with pools

SOUNDNESS = """(() => { const found = document.getElementById('soundness');
    return `${found.textContent} ${getComputedStyle(found).color}`; })()"""
CARDS = """JSON.stringify([...document.querySelectorAll('#cards .card')].map((card) => [
    card.querySelector('.name').textContent, card.dataset.state,
    Object.fromEntries([...card.querySelectorAll('dt')].map((term) =>
        [term.textContent, term.nextSibling.textContent]))]))"""


home = home_with()


@asynccontextmanager
async def page_of(directory: Path) -> AsyncIterator[str]:
    """The address of a page for `directory`, as `understudy ui` serves it."""
    hub = Hub(directory)
    following = asyncio.create_task(hub.run())
    runner = web.AppRunner(application(hub), shutdown_timeout=0)
    await runner.setup()
    sock = bind("127.0.0.1", 0)
    await web.SockSite(runner, sock).start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await runner.cleanup()


async def cards(page: Tab) -> dict[str, tuple[str, dict[str, str]]]:
    """State and lines of each card, by its name."""
    found = json.loads(await page.evaluate(CARDS))
    return {name: (state, lines) for name, state, lines in found}


async def test_page_is_one_small_file_that_runs_and_reaches_nothing_else(tmp_path: Path):
    """Goal: no external resource, and a policy for exactly what is in the page. Method: the page as
    it is served, and hashes made here."""
    async with page_of(tmp_path) as address, aiohttp.ClientSession() as session:
        async with session.get(address) as answer:
            text, headers = await answer.text(), answer.headers
        assert text == PAGE.read_text()
        assert len(text) < SIZE_MAX_BYTES
        policy = dict(each.split(" ", 1) for each in headers["Content-Security-Policy"].split("; "))
        assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
        for kind in ("script", "style"):
            (content,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
        assert "Access-Control-Allow-Origin" not in headers
        assert re.findall(r"https?://[^\s\"'`$]+", text) == ["http://www.w3.org/2000/svg"]
        assert not re.search(r"@import|\bsrc=|<link rel=\"(?!icon)|\bstyle=|\bon\w+=\"", text)


async def test_name_that_an_attacker_may_own_reads_nothing_but_the_probe(tmp_path: Path):
    """Goal: DNS rebinding shows nothing of a pod. Method: every path with a foreign Host."""
    async with page_of(tmp_path) as address, aiohttp.ClientSession() as session:
        for path, status in (("", 421), ("ui", 421), ("news", 421), ("live", 200)):
            headers = {"Host": "attacker.example"}
            async with session.get(f"{address}{path}", headers=headers) as answer:
                assert answer.status == status
                if status != 200:
                    assert (await answer.json())["error"]["code"] == "service.unknown_host"


@pytest.mark.parametrize("said", [b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\na b\r\n\r\n"])
async def test_request_that_is_no_http_is_refused_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: bytes
):
    async with page_of(tmp_path) as address:
        url = urlsplit(address)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(said)
        assert (await reader.read()).split()[1] == b"400"
        writer.close()
        await writer.wait_closed()
    assert caplog.records == []


async def test_news_say_what_is_known_what_happened_and_which_part_is_gone(tmp_path: Path):
    """Goal: the news have all parts; a missing one is named. Method: a lock server alone, killed
    while the news are read, and started again; then a page that has heard nothing yet."""
    tmp_path.chmod(0o700)
    server = ServerProcess(str(tmp_path))
    server.start()
    with contextlib.closing(server):
        async with page_of(tmp_path) as address, aiohttp.ClientSession() as session:
            since, kinds = "", []

            async def news(since: object = "") -> dict[str, Any]:
                async with session.get(f"{address}news?since={since}") as answer:
                    assert "Access-Control-Allow-Origin" not in answer.headers
                    return dict(await answer.json())

            async def until_said(kind: str, is_there: bool, count: int = 1) -> dict[str, Any]:
                nonlocal since
                async with asyncio.timeout(60):
                    while True:
                        said = await news(since)
                        since = said["next"]
                        kinds.extend(each["type"] for each in said["events"])
                        errors = [each["error"] for each in said["parts"]]
                        if kinds.count(kind) == count and errors and is_there == (not errors[0]):
                            return said

            said = await until_said("lockserver.started", is_there=True)
            assert said["state"] == "down"
            server.kill()
            said = await until_said("pod.gone", is_there=False)
            assert said["problems"]
            server.start()
            await until_said("lockserver.started", is_there=True, count=2)
            first = await news()
            assert [each["type"] for each in first["events"]] == kinds
            assert first["next"] == since == len(kinds)
            await news("9" * 5000)


@pytest.mark.slow
@needs_chromium
@in_pod
async def test_page_follows_deaths_without_a_reload(pod: Pod, tmp_path: Path):
    """Goal: the page follows deaths live, also paused. Method: a real pod and a real browser; kill
    the active engine's supervisor and the memory server; the other engine's card turns active, then
    the pod is complete again. A pause on the way."""
    whole = await pod.whole()
    (other,) = whole.standbys
    async with page_of(pod.directory) as address, tab(tmp_path) as page:
        await page.tell("Network.setBlockedURLs", urls=["*/news*"])
        await page.go(address)
        await page.evaluate("window.wasHere = true")
        assert await page.evaluate(SOUNDNESS) == "connecting rgb(87, 96, 106)"  # grey
        await page.tell("Network.setBlockedURLs", urls=[])
        await page.wait("document.getElementById('soundness').textContent === 'healthy'")
        await page.wait("document.getElementById('cards').textContent.includes('streams: exact')")
        await page.wait(  # each line of a card is of a part that answers by itself
            "document.querySelectorAll('#cards .card').length > 3 && "
            "document.getElementById('cards').textContent.includes('in flight0waiting')"
        )
        found = await cards(page)
        assert found[whole.engine][0] == "active"
        assert found[other][0] == "standby"
        state, lock = found["lock active"]
        assert (state, lock["holder"], lock["token"]) == (
            "held",
            whole.engine,
            str(whole.token),
        )
        assert lock["waiters"] == other
        assert found[whole.engine][1]["device"] == "HOST-0"
        state, gateway = found["gateway"]
        assert (state, gateway["in flight"], gateway["parked"]) == ("accepting", "0", "0")
        assert gateway["engine"] == f"{whole.engine}, streams: exact"
        old = await pod.memory()
        await press(page, "p")
        kill(pod.pid(whole.engine), pod.gms_server())  # a supervisor and a memory server
        states = f"transitions.filter((each) => each.lane === '{whole.engine}')"
        await page.wait(f"{states}.some((each) => each.state === 'gone')")
        assert (await cards(page))[whole.engine][0] == "active"  # paused, and nothing is lost
        await press(page, "p")
        await page.wait(_serves(other))
        await page.wait(
            "[...document.querySelectorAll('#rows tr')].some((row) => "
            f"row.textContent.includes('active lock granted to {other}'))"
        )
        await page.wait("document.getElementById('soundness').textContent === 'healthy'")
        found = await cards(page)
        assert found["lock active"][1]["holder"] == other
        assert int(found["lock active"][1]["token"]) > whole.token
        assert found[whole.engine][0] == "standby"
        assert f"{other} active" in await page.evaluate(
            "document.querySelector('#timeline svg').getAttribute('aria-label')"
        )

        for said in ("dead → init: launched as", f"epoch {old['epoch']} is back from"):
            await page.wait(f"document.getElementById('rows').textContent.includes('{said}')")
        assert await page.evaluate("window.wasHere")
        assert page.errors == []
        assert page.hosts() == {"127.0.0.1"}


async def press(page: Tab, key: str) -> None:
    text = {"text": key} if len(key) == 1 else {}
    for kind in ("keyDown", "keyUp"):
        await page.tell("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text)


def _serves(engine: str) -> str:
    return (
        "[...document.querySelectorAll('#cards .card')].some((card) => card.dataset.state === "
        f"'active' && card.querySelector('.name').textContent === '{engine}')"
    )
