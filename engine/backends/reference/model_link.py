"""The HTTP process's end of the pipe to rank 0, which generates its tokens.

Owns request numbers and unfinished requests. Knows no HTTP and no text. The surprising thing:
nothing here waits for room in the connection. The requests in flight and the bytes of their prompts
are limited to less than it may hold, so a client can be refused but never cut the link.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from engine.backends.process import ProgressPage
from engine.backends.reference.link import (
    LINK,
    PROMPT_BYTES_UNFINISHED_MAX,
    TOKEN_BYTES,
    CancelMsg,
    ProgressedMsg,
    ReadyMsg,
    SubmitMsg,
    TakeMemoryMsg,
    TokenMsg,
)
from engine.messages import (
    CanaryMsg,
    FaultReportMsg,
    PlaceWeightsMsg,
    RestedMsg,
    RestMsg,
    RunCanaryMsg,
    WeightsPlacedMsg,
    WokenMsg,
)
from plumbing.errors import UnderstudyError
from plumbing.wire.connection import Connection, Handler, UnixConnection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message

T = TypeVar("T", bound=Message)

# Requests that wait for a slot; further clients are asked to retry instead of waiting for minutes.
QUEUE_MAX = 256


class ModelLink(Handler):
    """The whole model; made on the loop."""

    def __init__(
        self,
        sock: socket.socket,
        children: Sequence[subprocess.Popen[bytes]],
        slots: int,
        on_failed: Callable[[FaultReportMsg], None],
        page: ProgressPage | None = None,
    ) -> None:
        """Own `sock`, to rank 0, and watch `children`, the process of each rank. `on_failed` is
        called when one of them has ended; why, it has told the supervisor itself if it could."""
        self.slots = slots  # requests that are generated at once
        self.page = ProgressPage() if page is None else page
        self.published = 0  # blocks that the next engine was told of
        self.kept = 0  # blocks that it would find now
        self._on_failed = on_failed
        self._numbers = itertools.count(1)
        self._unfinished: dict[int, Generation] = {}
        self._prompt_bytes = 0
        self._checking: asyncio.Future[CanaryMsg] | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ReadyMsg] = self._loop.create_future()
        self._answers: dict[type[Message], asyncio.Future[Any]] = {ReadyMsg: self._ready}
        self.conn = UnixConnection(sock, LINK, self)
        for rank, child in enumerate(children):
            pidfd = os.pidfd_open(child.pid)  # until this process ends
            self._loop.add_reader(pidfd, self._child_ended, pidfd, rank, child)

    @property
    def in_flight(self) -> int:
        """Requests that the model has not finished."""
        return len(self._unfinished)

    @property
    def progress(self) -> int:
        """Tokens made, and steps of prefill."""
        return self.page.count

    async def ready(self) -> ReadyMsg:
        """Wait until every rank is ready."""
        return await asyncio.shield(self._ready)

    async def take_memory(self, token: int, era: str) -> WokenMsg:
        taken = await self._ask(TakeMemoryMsg(token, era), WokenMsg)
        self.kept = taken.adopted_blocks
        return taken

    async def give_memory(self, wait_s: float, *, is_kept: bool) -> int:
        """Have every rank give its KV memory back; how many bytes are still resident."""
        given = await self._ask(RestMsg(is_kept, round(wait_s * 1000)), RestedMsg)
        self.published = self.kept = 0
        return given.kv_bytes_resident

    async def place(self, wait_s: float, *, is_away: bool) -> WeightsPlacedMsg:
        """Have every rank release its weights, or map them again."""
        return await self._ask(PlaceWeightsMsg(is_away, round(wait_s * 1000)), WeightsPlacedMsg)

    async def check(self) -> CanaryMsg:
        """Run one canary; calls while one runs share its result."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self._ask(RunCanaryMsg(), CanaryMsg))
        return await asyncio.shield(self._checking)

    async def _ask(self, message: Message, answer: type[T]) -> T:
        """The caller asks one question of a kind at a time."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._answers[answer] = future
        self.conn.send(message)
        return await future

    # ------------------------------------------------------------------ requests

    def generate(self, wanted: SubmitMsg) -> Generation:
        """Ask for tokens, under a number of our own; use the result in a `with` block, which
        cancels an unfinished request.

        Raises:
            UnderstudyError: `engine.queue_full`.
        """
        tokens = len(wanted.prompt) + len(wanted.made) + 4 * len(wanted.sampling.logit_bias)
        size_bytes = tokens * TOKEN_BYTES
        if (
            len(self._unfinished) >= self.slots + QUEUE_MAX
            or self._prompt_bytes + size_bytes > PROMPT_BYTES_UNFINISHED_MAX
        ):
            raise UnderstudyError(
                "engine.queue_full",
                f"this engine is full: {len(self._unfinished)} requests with"
                f" {self._prompt_bytes // TOKEN_BYTES} tokens of prompt are in progress; try again"
                " shortly",
            )
        number = next(self._numbers)
        generation = self._unfinished[number] = Generation(self, number, size_bytes)
        self._prompt_bytes += size_bytes
        self.conn.send(replace(wanted, request=number))
        return generation

    def cancel(self, number: int) -> None:
        """Drop a request that the model has not finished; any other number is ignored."""
        if self._forget(number) is not None:
            self.conn.send(CancelMsg(number))

    def _forget(self, number: int) -> Generation | None:
        generation = self._unfinished.pop(number, None)
        if generation is not None:
            self._prompt_bytes -= generation.size_bytes
        return generation

    # ------------------------------------------------------------------ wire.Handler

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case TokenMsg():
                self.page.count = message.progress
                is_last, number = message.finish_reason is not None, message.request
                generation = self._forget(number) if is_last else self._unfinished.get(number)
                if generation is not None:  # else it was cancelled while this was on its way
                    generation.tokens.put_nowait(message)
            case ProgressedMsg():
                self.page.count = message.progress
                self.published, self.kept = message.published, message.kept
            case _:
                future = self._answers.pop(type(message), None)
                if future is None:
                    raise UnderstudyError("engine.link", f"{message.TYPE} answers no request")
                future.set_result(message)

    def closed(self, conn: Connection, reason: str) -> None:
        self._failed(f"the model process closed its connection ({reason})")

    def _child_ended(self, pidfd: int, rank: int, child: subprocess.Popen[bytes]) -> None:
        self._loop.remove_reader(pidfd)
        self._failed(f"the model process of rank {rank} ended with exit status {child.poll()}")

    def _failed(self, what: str) -> None:
        text = f"{what} without giving a reason; it was probably killed"
        self._on_failed(FaultReportMsg("engine.model_died", text, permanent=False))


class Generation:
    """The tokens of one request, as they arrive."""

    def __init__(self, link: ModelLink, number: int, size_bytes: int) -> None:
        self.number = number
        self.size_bytes = size_bytes
        self.tokens: asyncio.Queue[TokenMsg] = asyncio.Queue()
        self._link = link

    async def next(self) -> TokenMsg:
        """The next token; after one with a `finish_reason` there is none."""
        return await self.tokens.get()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *error: object) -> None:
        self._link.cancel(self.number)
