"""The canary over HTTP: what counts as a verdict, what is asked again, and when another way must
be taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.supervisor.channel import ANSWER_BYTES_MAX, Canaries
from plumbing.service.clock import SystemClock
from plumbing.service.events import EventLog
from tests.helpers import auntil

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"ok":true}'
BAD = b'HTTP/1.1 503 Unwell\r\ncontent-length:30\r\n\r\n{"ok":false,"detail":"7 is 8"}'


@contextlib.asynccontextmanager
async def serving(path: Path, *answers: bytes) -> AsyncIterator[list[bytes]]:
    """A server that gives each of `answers` to one connection, then the last one; an empty one
    stands for silence until the end. What it was asked."""
    asked: list[bytes] = []
    left = list(answers)
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        reply = left.pop(0) if len(left) > 1 else left[0]
        if not reply:
            await done.wait()
        writer.write(reply or OK)
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    try:
        yield asked
    finally:
        done.set()
        server.close()
        await server.wait_closed()


class Asked:
    """A canary, and what came of it. As a channel: whether that way was taken."""

    def __init__(self, path: Path) -> None:
        self.verdict: tuple[bool, str] | None = None
        self.has_no_way = False
        self.canaries = Canaries(self, EventLog("e-0", SystemClock()))
        self.canaries.private_path = str(path)
        self.canaries.check(self._found)

    def _found(self, ok: bool, detail: str) -> None:
        self.verdict = ok, detail

    def ask(self, *question: object) -> None:
        self.has_no_way = True


@pytest.fixture
def path(directory: Path) -> Path:
    return directory / "s"


@pytest.mark.parametrize(("answer", "verdict"), [(OK, (True, "")), (BAD, (False, "7 is 8"))])
async def test_a_verdict_is_in_the_body(path, answer, verdict):
    """Goal: the backend decides, whatever status it gives. Method: one answer of each kind, to a
    request that only the hop knows."""
    async with serving(path, answer) as asked:
        found = Asked(path)
        await auntil(lambda: found.verdict, "the verdict")
        assert found.verdict == verdict
        assert asked[0].startswith(b"POST /understudy/canary HTTP/1.1\r\n")
        assert b"\r\nX-Understudy-Gateway: 1\r\n" in asked[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"engine-0 7\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{", "HTTP 200, no verdict"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * ANSWER_BYTES_MAX, "more than 65536 bytes"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "HTTP 500, no verdict"),
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 2\r\n\r\n{}", "HTTP 429, no verdict"),
    ],
)
async def test_anything_else_is_asked_again(path, answer, words):
    """Goal: only a verdict is one; everything else has its reason and another attempt. Method: one
    bad answer, then a good one."""
    async with serving(path, answer, OK) as asked:
        found = Asked(path)
        await auntil(lambda: found.canaries.problem, "the problem")
        assert words in found.canaries.problem
        assert found.verdict is None
        await auntil(lambda: found.verdict, "the verdict")
        assert len(asked) == 2


async def test_nobody_listens_then_somebody_does(path):
    """Goal: a backend that cannot be reached yet is asked again. Method: listen later."""
    found = Asked(path)
    await auntil(lambda: found.canaries.problem, "the problem")
    assert "cannot connect" in found.canaries.problem
    async with serving(path, OK):
        await auntil(lambda: found.verdict, "the verdict")


async def test_backend_without_the_path_is_asked_another_way(path):
    """Goal: a foreign backend, whose HTTP side works, is not judged by a path that it lacks."""
    async with serving(path, b"HTTP/1.1 404 Not Found\r\n\r\n"):
        found = Asked(path)
        await auntil(lambda: found.has_no_way, "the other way")
        assert found.verdict is None
