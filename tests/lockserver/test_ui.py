"""The live page at /ui: what is served, and how a real browser shows the death of a real engine."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockserver.server.daemon import UI
from tests.browser import Tab, needs_chromium, tab
from tests.e2e import pods
from tests.e2e.pods import Pod, PodHome, make_model
from tests.e2e.processes import kill
from tests.helpers import free_port, free_ports
from understudy.pod.ports import Ports

SIZE_MAX_BYTES = 40_000  # read as often as changed, and sent with every request; with pools

CARDS = """JSON.stringify([...document.querySelectorAll('#cards .card')].map((card) => [
    card.querySelector('.name').textContent, card.dataset.state,
    Object.fromEntries([...card.querySelectorAll('dt')].map((term) =>
        [term.textContent, term.nextSibling.textContent]))]))"""


def ports_in_a_row() -> Ports:
    """A pod's ports, with the same spacing as its default ports."""
    first = free_ports(12)
    return Ports(free_port(), first, first + 1, first + 3, (first + 10, first + 11))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodHome]:
    model = make_model(tmp_path_factory.mktemp("ui") / "model")
    found = PodHome(tmp_path_factory.mktemp("pod"), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pods, "pod_ports", ports_in_a_row)
        try:
            yield found
        finally:
            found.close()


def address(pod: Pod) -> str:
    return f"http://127.0.0.1:{pod.local.ports.lockserver}/ui"


def address_with_ports(pod: Pod) -> str:
    ports = pod.local.ports
    return f"{address(pod)}?gms={ports.gms}&engines={','.join(map(str, ports.engines))}"


async def cards(page: Tab) -> dict[str, tuple[str, dict[str, str]]]:
    """State and lines of each card, by its name."""
    found = json.loads(await page.evaluate(CARDS))
    return {name: (state, lines) for name, state, lines in found}


def brightness(png: bytes) -> int:
    """The first channel of the first pixel of a PNG, which is background: no filter changes that
    one."""
    pieces, at = [], 8
    while at < len(png):
        length, name = struct.unpack(">I4s", png[at : at + 8])
        if name == b"IDAT":
            pieces.append(png[at + 8 : at + 8 + length])
        at += 12 + length
    return zlib.decompress(b"".join(pieces))[1]


def test_page_is_one_small_file_without_external_resources(start_server):
    """Goal: no build, no external resource. Method: the page as a real lock server sends it, and
    its index."""
    server = start_server()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/ui") as answer:
        body, headers = answer.read(), answer.headers
    assert body == UI.read_bytes()
    assert len(body) < SIZE_MAX_BYTES
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    text = body.decode()
    assert re.findall(r"https?://[^\s\"'`$]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"@import|\bsrc=|<link rel=\"(?!icon)|\bstyle=|\bon\w+=\"", text)


@pytest.mark.slow
@needs_chromium
def test_page_follows_a_failover_without_a_reload(home: PodHome, tmp_path: Path):
    """Goal: the page follows a failover live. Method: a real pod and a real browser; kill a process
    of the active engine; the other engine's card turns active, then the pod is complete again."""

    async def scenario(pod: Pod) -> None:
        whole = await pod.whole()
        (other,) = whole.standbys
        async with tab(tmp_path) as page:
            await page.go(address(pod))
            await page.evaluate("window.wasHere = true")
            await page.wait("document.getElementById('soundness').textContent === 'healthy'")
            await page.wait(
                "document.getElementById('cards').textContent.includes('streams: exact')"
            )
            # Each line of a card is of a part that answers by itself.
            await page.wait(
                "[...document.querySelectorAll('#cards .card')].filter((card) => "
                "[...card.querySelectorAll('dt')].some((term) => term.textContent === 'memory'))"
                ".length === 2"
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
            memory = found[whole.engine][1]["memory"]
            assert re.fullmatch(r"weights [\d.]+ [KM]iB, KV [\d.]+ [KM]iB", memory)
            assert found[other][1]["memory"] == f"{memory} once it serves"
            bar = await page.evaluate(
                "document.querySelector('#devices .memory').getAttribute('aria-label')"
            )
            assert bar.startswith("weights ")
            assert f"KV cache {memory.partition('KV ')[2]}, free" in bar  # one cache, not two

            kill((await pod.engine_tree(whole.engine))[0])
            await page.wait(_serves(other))
            await page.wait(
                "[...document.querySelectorAll('#rows tr')].some((row) => "
                f"row.textContent.includes('active lock granted to {other}'))"
            )
            await page.wait("document.getElementById('soundness').textContent === 'healthy'")
            found = await cards(
                page
            )  # each card needs its own part's answer, so not all are there earlier
            assert found["lock active"][1]["holder"] == other
            assert int(found["lock active"][1]["token"]) > whole.token
            assert found[whole.engine][0] == "standby"
            assert f"{other} active" in await page.evaluate(
                "document.querySelector('#timeline svg').getAttribute('aria-label')"
            )

            assert await page.evaluate("window.wasHere")
            assert page.errors == []
            assert page.hosts() == {"127.0.0.1"}

    home.run(scenario)


def _serves(engine: str) -> str:
    return (
        "[...document.querySelectorAll('#cards .card')].some((card) => card.dataset.state === "
        f"'active' && card.querySelector('.name').textContent === '{engine}')"
    )


@needs_chromium
def test_page_has_keyboard_controls_and_a_dark_scheme(home: PodHome, tmp_path: Path):
    """Goal: keyboard control and a dark scheme. Method: `?`, Escape, `p` during a failover, and Tab
    through the controls; then both schemes, by the colours painted."""

    async def scenario(pod: Pod) -> None:
        whole = await pod.whole()
        (other,) = whole.standbys
        async with tab(tmp_path) as page:
            await page.go(address_with_ports(pod))
            await page.wait(_serves(whole.engine))
            await page.press("?", "?")
            assert await page.evaluate("document.getElementById('helping').open")
            await page.press("Escape")
            await page.wait("!document.getElementById('helping').open")

            await page.press("p", "p")
            assert await page.evaluate(
                "document.getElementById('pause').getAttribute('aria-pressed') === 'true'"
            )
            kill((await pod.engine_tree(whole.engine))[0])
            await page.wait(
                f"parts.some((part) => part.name === '{other}' && part.state === 'active')"
            )
            assert (await cards(page))[whole.engine][0] == "active"  # as it was when paused
            await page.press("p", "p")
            await page.wait(_serves(other))

            reached = []
            for _ in range(7):
                await page.press("Tab")
                reached.append(
                    await page.evaluate("document.activeElement.id || document.activeElement.hash")
                )
            assert [each for each in reached if each] == [
                *("#engines", "#log", "pause", "help", "span", "least", "log")
            ]

            await page.media(dark=False)
            light = brightness(await page.screenshot())
            await page.media(dark=True)
            dark = brightness(await page.screenshot())
            assert light > 200 > 100 > dark
            assert page.errors == []

    home.run(scenario)


@needs_chromium
def test_page_shows_an_engine_that_dies_and_returns(home: PodHome, tmp_path: Path):
    """Goal: parts whose port is gone are shown, too. Method: kill the active engine's supervisor
    and the memory server; both come back, and are shown from their new processes' first event
    on."""

    async def scenario(pod: Pod) -> None:
        whole = await pod.whole()
        (other,) = whole.standbys
        old = await pod.memory()
        async with tab(tmp_path) as page:
            await page.go(address(pod))
            await page.wait("document.getElementById('soundness').textContent === 'healthy'")
            kill(pod.pid(whole.engine), pod.gms_server())
            states = f"transitions.filter((each) => each.lane === '{whole.engine}')"
            await page.wait(f"{states}.some((each) => each.state === 'gone')")
            await page.wait(_serves(other))
            await page.wait("document.getElementById('soundness').textContent === 'healthy'")
            found = await cards(
                page
            )  # each card needs its own part's answer, so not all are there earlier
            assert found["lock active"][1]["holder"] == other
            assert int(found["lock active"][1]["token"]) > whole.token
            assert found[whole.engine][0] == "standby"
            for said in ("dead → init: launched as", f"epoch {old['epoch']} is back from"):
                await page.wait(f"document.getElementById('rows').textContent.includes('{said}')")
            assert all("Failed to load resource" in each for each in page.errors)

    home.run(scenario)


@needs_chromium
def test_page_shows_which_part_does_not_answer(start_server, tmp_path: Path):
    """Goal: a missing part is shown as missing. Method: a lock server alone, which is then killed
    and restarted."""
    server = start_server()

    async def main() -> None:
        async with tab(tmp_path) as page:
            await page.go(f"http://127.0.0.1:{server.http_port}/ui?gms=1&engines=2")
            await page.wait("document.getElementById('soundness').textContent === 'down'")
            await page.wait("document.getElementById('parts').textContent.includes('● lockserver')")
            await page.wait("document.body.innerText.includes('gms: no answer from port 1')")
            text = await page.text()
            assert "no engine is active; the lock is free" in text
            server.kill()
            await page.wait("document.getElementById('parts').textContent.includes('○ lockserver')")
            await page.wait("document.body.innerText.includes('the lock server does not answer')")
            server.start()
            await page.wait("document.getElementById('parts').textContent.includes('● lockserver')")

    asyncio.run(main())
