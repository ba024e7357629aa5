"""A real browser for tests of pages: Chromium without a window, told what to do over its socket.

Owns the process and its profile. Speaks the DevTools protocol itself: a few messages of JSON, for
which no driver needs to be installed. Everything a page complains of or asks for is kept, so that a
test can say that there was nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.helpers import auntil

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium; apt-get install chromium"
)

ANSWER_S = 30.0  # a page of a few KiB takes milliseconds, on a machine that does much else seconds
START_S = 60.0
FRAME_BYTES_MAX = 64 * 2**20  # a screenshot of a long page
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root, which is what a container of a test is
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1200,900",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Tab:
    """One page: what it shows, what it complained of, what it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._session: str | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def open(self) -> None:
        target = await self.tell("Target.createTarget", url="about:blank")
        attached = await self.tell(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.tell(f"{domain}.enable")

    async def close(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._session = None
            await self.tell("Browser.close")
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return what it answers."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(ANSWER_S):
            return await answer

    async def go(self, address: str) -> None:
        await self.tell("Page.navigate", url=address)
        await self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, expression: str) -> Any:
        """The value of `expression` in the page."""
        said = await self.tell("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def wait(self, expression: str, deadline_s: float = 60.0) -> Any:
        """Wait until `expression` is true in the page; its value."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while not (value := await self.evaluate(expression)):
            assert loop.time() < end, f"waited in vain for {expression}; {await self.text()}"
        return value

    def hosts(self) -> set[str | None]:
        """Whom it asked for anything."""
        addresses = [urlsplit(each) for each in self.requests]
        return {each.hostname for each in addresses if each.scheme not in ("data", "about")}

    async def text(self) -> str:
        return await self.evaluate("document.body.innerText")

    async def press(self, key: str, text: str = "") -> None:
        """One key, by its name in the DOM; `text` is what it would write."""
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9, "Escape": 27}
        about = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        await self.tell("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        await self.tell("Input.dispatchKeyEvent", type="keyUp", **about)

    async def media(self, kind: str = "", *, dark: bool = False) -> None:
        """Show the page as on paper (`print`), or in a dark scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.tell("Emulation.setEmulatedMedia", media=kind, features=[scheme])

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            answer = self._answers.pop(message.get("id", 0), None)
            if answer is not None and not answer.done():
                if "error" in message:
                    answer.set_exception(AssertionError(message["error"]["message"]))
                else:
                    answer.set_result(message["result"])
            self._note(message.get("method", ""), message.get("params", {}))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the browser has gone"))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.errors.append(str(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


@asynccontextmanager
async def tab(profile: Path) -> AsyncIterator[Tab]:
    """A browser with one empty page, its files in `profile`; gone when the block ends."""
    assert CHROMIUM is not None
    # It makes a socket in there, and the path to a test's own files may be too long for one.
    sockets = tempfile.mkdtemp(prefix="chromium-")
    log = (profile / "chromium.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
        stdout=log,
        stderr=log,
        env={**os.environ, "HOME": str(profile), "TMPDIR": sockets},
        start_new_session=True,  # so that all its processes can be told to end
    )
    try:
        where = profile / "DevToolsActivePort"
        await auntil(
            lambda: (
                process.returncode is not None or (where.exists() and "\n" in where.read_text())
            ),
            "the browser to start",
            START_S,
        )
        assert process.returncode is None, (profile / "chromium.log").read_text()
        port, path = where.read_text().splitlines()
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(
                f"ws://127.0.0.1:{port}{path}", max_msg_size=FRAME_BYTES_MAX
            ) as socket,
        ):
            page = Tab(socket)
            await page.open()
            try:
                yield page
            finally:
                await page.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        log.close()
        shutil.rmtree(sockets, ignore_errors=True)
