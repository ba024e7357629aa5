"""A protocol to test with: what is said comes back, descriptors included."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import pytest
import uvloop
from msgspec import Meta, Struct

from plumbing.errors import UnderstudyError
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Catalogue, Message, messages_in
from plumbing.wire.server import Server
from tests.helpers import LoopThread


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    size: int


class Echo(Message, frozen=True, tag="echo"):
    FDS = (0, 250)
    text: Annotated[str, Meta(max_length=100_000)] = ""
    count: Annotated[int, Meta(ge=0, le=1000)] = 0
    ratio: float = 0.0
    parts: tuple[Part, ...] = ()
    extra: dict[str, int] | None = None


class Refuse(Message, frozen=True, tag="refuse"):
    """Asks the server for an error."""


CATALOGUE = Catalogue(*messages_in(globals()))

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class EchoHandler(Handler):
    """Answers each message with itself and notes who came and why they went."""

    def __init__(self) -> None:
        self.opened_count = 0
        self.reasons: list[str] = []
        self.received_messages: list[Message] = []

    def opened(self, conn: Connection) -> None:
        super().opened(conn)
        self.opened_count += 1

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        self.received_messages.append(message)
        if isinstance(message, Refuse):
            raise UnderstudyError("test.refused", "refused as asked", why="a test")
        conn.send(message, request_id, fds)

    def closed(self, conn: Connection, reason: str) -> None:
        self.reasons.append(reason)


class ServerThread:
    """An echo server on a loop of its own, for tests whose client blocks."""

    def __init__(self, path: str, loop: str = "asyncio", **options: Any) -> None:
        self.path = path
        self.handler = EchoHandler()
        self.server = Server(path, CATALOGUE, self.handler, service="echo", **options)
        self._thread = LoopThread(LOOPS[loop])
        try:
            self._thread.run(self.server.start())
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.run(self.server.close())
        self._thread.close()


def run_on(loop: str, main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` on the named loop."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(main)


def on_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs on each kind of loop."""

    def run(loop: str, **fixtures: Any) -> None:
        run_on(loop, test(**fixtures))

    found = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    functools.update_wrapper(run, test)
    run.__signature__ = found.replace(  # type: ignore[attr-defined] # what pytest reads
        parameters=[loop, *found.parameters.values()]
    )
    return pytest.mark.parametrize("loop", LOOPS)(run)
