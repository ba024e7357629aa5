"""The HTTP process's end of the links to the model processes, of which it asks tokens.

Owns the numbers of requests and what is unfinished. Knows no HTTP and no text. Every rank is asked
to be ready and to take memory, and the engine is, or has, only when all are; tokens are asked of
rank 0. The surprising thing: it never waits for room. What may be under way is bounded here
(requests and bytes of prompts), below what the connection may hold, so a client can only be
refused, never cut the link.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from msgspec.structs import replace

from engine.backends.reference.http.spawn import ModelProcess
from engine.backends.reference.link import (
    LINK,
    PROMPT_BYTES_UNFINISHED_MAX,
    REQUESTS_UNFINISHED_MAX,
    TOKEN_BYTES,
    Cancel,
    Check,
    Checked,
    Failed,
    Progressed,
    Ready,
    Refused,
    Submit,
    TakeMemory,
    Taken,
    Token,
    pack,
)
from engine.backends.reference.model.batch import SamplingParams
from plumbing.errors import UnderstudyError, UsageError
from plumbing.wire.client import from_socket
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message

T = TypeVar("T", bound=Message)


def join_ranks(models: Sequence[ModelProcess], on_failed: Callable[[Failed], None]) -> ModelLink:
    """The link to the whole model: rank 0's, which knows the others'."""
    first, *others = models
    followers = [
        ModelLink(each.link, on_failed, each.child, rank=rank)
        for rank, each in enumerate(others, 1)
    ]
    return ModelLink(first.link, on_failed, first.child, followers)


class ModelLink:
    """A connection to a model process; made on the loop."""

    def __init__(
        self,
        sock: socket.socket,
        on_failed: Callable[[Failed], None],
        child: subprocess.Popen[bytes] | None = None,
        followers: Sequence[ModelLink] = (),
        rank: int = 0,
    ) -> None:
        """Own `sock`. `on_failed` is called once, when there is no model any more."""
        self._rank = rank
        self._followers = followers
        self._loop = asyncio.get_running_loop()
        self._on_failed = on_failed
        self._child = child
        self._is_over = False
        self._numbers = itertools.count(1)
        self._unfinished: dict[int, Generation] = {}
        self._prompt_bytes = 0
        self._ready = self._loop.create_future()
        self._taken = self._loop.create_future()
        self._checked: asyncio.Future[Checked] | None = None
        self.progress = 0
        self._conn = from_socket(sock, LINK, self)

    @property
    def in_flight(self) -> int:
        """Requests that the model has not finished."""
        return len(self._unfinished)

    async def ready(self) -> Ready:
        """Once every rank is; with the sizes of all of them together."""
        mine: Ready = await asyncio.shield(self._ready)
        ranks = [mine, *[await follower.ready() for follower in self._followers]]
        return replace(
            mine,
            weights_bytes=sum(rank.weights_bytes for rank in ranks),
            kv_bytes=sum(rank.kv_bytes for rank in ranks),
            epoch=",".join(rank.epoch for rank in ranks),
        )

    async def take_memory(self) -> Taken:
        """On every rank; a rank that cannot ends the engine, and with it what others took."""
        self._conn.send(TakeMemory())
        others = await asyncio.gather(*(follower.take_memory() for follower in self._followers))
        mine = await asyncio.shield(self._taken)
        return Taken(mine.kv_bytes + sum(taken.kv_bytes for taken in others))

    async def check(self) -> Checked:
        """One canary; those who ask while one runs get the answer of that one."""
        if self._checked is None:
            self._checked = self._loop.create_future()
            self._conn.send(Check())
        return await asyncio.shield(self._checked)

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        stop_token_ids: tuple[int, ...],
    ) -> Generation:
        """Ask for tokens; use the result in a `with` block, whose end cancels what is unfinished.

        Raises:
            UnderstudyError: `engine.queue_full`.
        """
        size_bytes = len(prompt) * TOKEN_BYTES
        if (
            len(self._unfinished) >= REQUESTS_UNFINISHED_MAX
            or self._prompt_bytes + size_bytes > PROMPT_BYTES_UNFINISHED_MAX
        ):
            raise UnderstudyError(
                "engine.queue_full",
                f"{len(self._unfinished)} requests with {self._prompt_bytes // TOKEN_BYTES} tokens"
                " of prompt are under way, the most this engine keeps; try again shortly.",
            )
        generation = Generation(self, next(self._numbers), size_bytes)
        self._unfinished[generation.number] = generation
        self._prompt_bytes += size_bytes
        self._conn.send(
            Submit(
                request=generation.number,
                prompt=pack(prompt),
                max_tokens=max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                logprobs=sampling.logprobs,
                stop_token_ids=stop_token_ids,
            )
        )
        return generation

    def close(self) -> None:
        """End the links, and with them the model processes, without a complaint."""
        for link in (*self._followers, self):
            link._is_over = True
            link._conn.close("this process ends")

    def cancel(self, number: int) -> None:
        """Forget a request if the model is still at it."""
        if self._forget(number) is not None:
            self._conn.send(Cancel(number))

    def _forget(self, number: int) -> Generation | None:
        generation = self._unfinished.pop(number, None)
        if generation is not None:
            self._prompt_bytes -= generation.prompt_bytes
        return generation

    # ------------------------------------------------------------------ wire.Handler

    def opened(self, conn: Connection) -> None:
        pass

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case Token():
                self.progress = message.progress
                self._deliver(message.request, message, message.finish_reason is not None)
            case Progressed():
                self.progress = message.progress
            case Refused():
                self._deliver(message.request, message, True)
            case Ready():
                _settle(self._ready, message)
            case Taken():
                _settle(self._taken, message)
            case Checked():
                _settle(self._checked, message)
                self._checked = None
            case Failed():
                self._fail(message)
            case _:
                raise UnderstudyError("engine.link", f"{message.TYPE} is not for this side")

    def closed(self, conn: Connection, reason: str) -> None:
        status = None if self._child is None else self._child.poll()
        how = "" if status is None else f", exit status {status}"
        who = "the model process" if not self._rank else f"the process of rank {self._rank}"
        self._fail(
            Failed(
                "engine.model_died",
                f"{who} ended without a word{how} ({reason}); it was probably killed",
                permanent=False,
                exit_code=1,
            )
        )

    def _deliver(self, number: int, item: Token | Refused, is_last: bool) -> None:
        generation = self._forget(number) if is_last else self._unfinished.get(number)
        if generation is not None:  # else it was cancelled while this was on its way
            generation.items.put_nowait(item)

    def _fail(self, failed: Failed) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_failed(failed)


class Generation:
    """The tokens of one request, as they come."""

    def __init__(self, link: ModelLink, number: int, prompt_bytes: int) -> None:
        self.number = number
        self.prompt_bytes = prompt_bytes
        self.items: asyncio.Queue[Token | Refused] = asyncio.Queue()
        self._link = link

    async def next(self) -> Token:
        """The next token; after one with a `finish_reason` there is none.

        Raises:
            UsageError, UnderstudyError: the model refused the request.
        """
        item = await self.items.get()
        if isinstance(item, Refused):
            kind = UsageError if item.is_usage else UnderstudyError
            raise kind(item.code, item.message)
        return item

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._link.cancel(self.number)


def _settle(future: asyncio.Future[T] | None, message: T) -> None:
    if future is not None and not future.done():
        future.set_result(message)
