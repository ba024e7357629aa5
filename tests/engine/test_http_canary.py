"""The canary over HTTP: what counts as a verdict, and what is asked again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.supervisor.channel import Canaries
from plumbing.service.clock import SystemClock
from plumbing.service.events import EventLog
from tests.helpers import auntil

OK = b'HTTP/1.1 200 OK\r\n\r\n{"type":"canary","ok":true}'
BAD = b'HTTP/1.1 503 Unwell\r\n\r\n{"type":"canary","ok":false,"detail":"7 is 8"}'


@contextlib.asynccontextmanager
async def serving(path: Path, *answers: bytes) -> AsyncIterator[list[bytes]]:
    """A server that gives each of `answers` to one connection. What it was asked."""
    asked: list[bytes] = []
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(left.pop(0))
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    async with server:
        yield asked


class Asked:
    """A canary, and what came of it."""

    def __init__(self, path: Path) -> None:
        self.verdict: tuple[bool, str] | None = None
        self.canaries = Canaries(None, EventLog("e-0", SystemClock()))
        self.canaries.private_path = str(path)
        self.canaries.check(self._found)

    def _found(self, ok: bool, detail: str) -> None:
        self.verdict = ok, detail


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
    "answer",
    [b"engine-0 7\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n{", b"HTTP/1.1 429 Busy\r\n\r\n{}"],
)
async def test_anything_else_is_asked_again(path, answer):
    """Goal: only a verdict is one; everything else has its reason and another attempt. Method:
    nobody listens, then one bad answer, then a good one."""
    found = Asked(path)
    await auntil(lambda: found.canaries.problem, "the problem")
    assert "no answer" in found.canaries.problem
    async with serving(path, answer, OK) as asked:
        await auntil(lambda: "without a verdict" in (found.canaries.problem or ""), "the problem")
        assert found.verdict is None
        await auntil(lambda: found.verdict, "the verdict")
        assert len(asked) == 2
