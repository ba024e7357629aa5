"""A canary that takes the way of real requests: one HTTP request to the backend's private socket.

Owns what an answer proves. Only a verdict in the answer's body ends it: a backend that cannot be
reached, or does not answer, is asked again until the owner's patience ends, since the same happens
on a busy machine. `problem` then says what was in the way. Where the backend has no such path, or
this process no descriptor, there is nothing to judge by: the canary must take another way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from plumbing import gateway_protocol as hop
from plumbing.errors import is_shortage

ANSWER_BYTES_MAX = 65_536  # a verdict has a sentence
RETRY_S = 0.1
NO_SUCH_PATH = frozenset({404, 405, 501})

REQUEST = (
    f"POST {hop.CANARY_PATH} HTTP/1.1\r\nHost: engine\r\n{hop.GATEWAY}: {hop.VERSION}\r\n"
    "Content-Length: 0\r\nConnection: close\r\n\r\n"
).encode()


class Verdict(msgspec.Struct, frozen=True):
    """The body of an answer."""

    ok: bool
    detail: str = ""


class Unanswered(Exception):
    """No verdict, and why not."""


class HttpCanary:
    """One canary, from its construction until `on_verdict`, `on_no_way` or `close`."""

    def __init__(
        self,
        path: str,
        *,
        on_verdict: Callable[[bool, str], object],
        on_no_way: Callable[[], object],
    ) -> None:
        self.problem: str | None = None  # why the last attempt had no answer
        self._path = path
        self._on_verdict = on_verdict
        self._on_no_way = on_no_way
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_check)

    def close(self) -> None:
        """Ask no more. Harmless to repeat."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                verdict = await _ask(self._path)
            except Unanswered as error:
                self.problem = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            if verdict is None:
                self._on_no_way()
            else:
                self._on_verdict(verdict.ok, verdict.detail)
            return


def _check(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()  # raises what only a bug of ours can raise


async def _ask(path: str) -> Verdict | None:
    """One attempt; None where this way cannot be taken at all.

    Raises:
        Unanswered: no verdict this time.
    """
    try:
        # Not with a socket of our own: at a timeout uvloop would close it, and so would its object.
        reader, writer = await asyncio.open_unix_connection(path, limit=ANSWER_BYTES_MAX)
    except OSError as error:
        if is_shortage(error):
            return None
        what = "its backlog is full" if isinstance(error, BlockingIOError) else error.strerror
        raise Unanswered(f"cannot connect to {path}: {what}") from error
    try:
        writer.write(REQUEST)
        status, body = await _answer(reader)
    except OSError as error:
        raise Unanswered(f"the connection to {path} broke: {error.strerror}") from error
    finally:
        writer.transport.abort()  # everything was read, or nothing will be
    if status in NO_SUCH_PATH:
        return None
    try:
        return msgspec.json.decode(body, type=Verdict)
    except msgspec.DecodeError as error:
        raise Unanswered(f"{path} answered the canary with HTTP {status}, no verdict") from error


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of the answer.

    Raises:
        Unanswered: it ended early, is too long, or is not HTTP.
        OSError: the connection broke.
    """
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        fields = (line.partition(":") for line in lines)
        sizes = [int(value) for name, _, value in fields if name.lower() == "content-length"]
        size = sizes[0] if sizes else 0
        if size > ANSWER_BYTES_MAX:
            raise Unanswered(f"the answer to the canary has {size} bytes")
        version, code, *_ = first.split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(version)
        return int(code), await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise Unanswered("the backend closed the connection without an answer") from error
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise Unanswered("what the backend answers is not HTTP") from error
