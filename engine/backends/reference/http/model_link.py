"""The HTTP process's end of the links to the model processes, which generate its tokens.

Owns request numbers and unfinished requests. Knows no HTTP and no text. Every rank must be ready
and take memory before the engine counts as ready or awake; only rank 0 is asked for tokens. The
surprising thing: it never waits for room. It limits the requests in flight and the bytes of their
prompts to less than the connection may hold, so a client can be refused but never cut the link.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from engine.backends.reference.http.cause import Cause
from engine.backends.reference.link import (
    LINK,
    PROMPT_BYTES_UNFINISHED_MAX,
    TOKEN_BYTES,
    CancelMsg,
    CheckedMsg,
    CheckMsg,
    FailedMsg,
    GiveMemoryMsg,
    GivenMsg,
    PlacedMsg,
    PlaceMsg,
    ProgressedMsg,
    PublishedMsg,
    ReadyMsg,
    SamplingParams,
    SubmitMsg,
    TakeMemoryMsg,
    TakenMsg,
    TokenMsg,
    pack,
)
from engine.progress_page import ProgressPage
from plumbing.errors import UnderstudyError
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.unix_connection import UnixConnection

T = TypeVar("T", bound=Message)

# Requests that wait for a slot; further clients are asked to retry instead of waiting for minutes.
QUEUE_MAX = 256


def join_ranks(
    models: Sequence[tuple[socket.socket, subprocess.Popen[bytes]]],
    slots: int,
    on_failed: Callable[[FailedMsg], None],
    page: ProgressPage,
) -> ModelLink:
    """The link to the whole model: rank 0's. `models`: link and process of every rank, in order.

    `on_failed` is called once, with the cause: not with the loss that it is to the other ranks.
    """
    cause = Cause(on_failed)
    links = [
        ModelLink(sock, slots, cause.failed, child, rank)
        for rank, (sock, child) in enumerate(models)
    ]
    links[0].followers, links[0].page = links[1:], page
    return links[0]


class ModelLink(Handler):
    """A connection to a model process; made on the loop. Rank 0's asks its `followers` too."""

    def __init__(
        self,
        sock: socket.socket,
        slots: int,
        on_failed: Callable[[FailedMsg], None],
        child: subprocess.Popen[bytes] | None = None,
        rank: int = 0,
    ) -> None:
        """Own `sock`. `on_failed` is called once, when the model has failed or died."""
        self.followers: Sequence[ModelLink] = ()
        self._rank = rank
        self.slots = slots  # requests that are generated at once
        self._requests_max = slots + QUEUE_MAX
        self._loop = asyncio.get_running_loop()
        self._on_failed = on_failed
        self._child = child
        self._has_failed = False
        self._numbers = itertools.count(1)
        self._unfinished: dict[int, Generation] = {}
        self._prompt_bytes = 0
        self._ready = self._loop.create_future()
        self._taken: asyncio.Future[TakenMsg] | None = None
        self._given: asyncio.Future[GivenMsg] | None = None
        self._placed: asyncio.Future[PlacedMsg] | None = None
        self._checked: asyncio.Future[CheckedMsg] | None = None
        self.page = ProgressPage()
        self.published = 0  # blocks that the next engine was told of
        self.kept = 0  # blocks that it would find now
        self._conn = UnixConnection(sock, LINK, self)

    @property
    def in_flight(self) -> int:
        """Requests that the model has not finished."""
        return len(self._unfinished)

    @property
    def progress(self) -> int:
        """Tokens made, and steps of prefill."""
        return self.page.count

    async def ready(self) -> ReadyMsg:
        """Wait until every rank is ready; the sizes are the sums over all of them."""
        ranks = [await link.ready_alone() for link in (self, *self.followers)]
        return replace(
            ranks[0],
            weights_bytes=sum(rank.weights_bytes for rank in ranks),
            kv_bytes=sum(rank.kv_bytes for rank in ranks),
            epoch=",".join(rank.epoch for rank in ranks),
        )

    async def ready_alone(self) -> ReadyMsg:
        """Wait until this rank is ready."""
        ready: ReadyMsg = await asyncio.shield(self._ready)
        return ready

    async def take_memory(self, token: int, era: str) -> TakenMsg:
        """On every rank, on rank 0 last: it may ask the others for their blocks. A rank that cannot
        ends the engine, and so frees what the others took.

        Raises:
            UnderstudyError: `engine.kv_mixed`.
        """
        ranks = [await link.ready_alone() for link in (self, *self.followers)]
        take = TakeMemoryMsg(
            token,
            era,
            tuple(ready.epoch for ready in ranks),
            tuple(digest_of(ready.identity) for ready in ranks),
        )
        others = await asyncio.gather(*(follower.take(take) for follower in self.followers))
        mine = await self.take(take)
        self.kept = mine.adopted
        if any(taken.memory != mine.memory for taken in others):
            raise UnderstudyError(
                "engine.kv_mixed",
                "the memory service lends KV memory to some ranks of this engine and not to others,"
                " so it cannot be kept; it was probably restarted just now",
            )
        return replace(mine, kv_bytes=mine.kv_bytes + sum(taken.kv_bytes for taken in others))

    async def take(self, take: TakeMemoryMsg) -> TakenMsg:
        """On this rank alone."""
        self._taken = self._loop.create_future()
        self._conn.send(take)
        return await self._taken

    async def give_memory(self, wait_s: float, *, is_kept: bool) -> int:
        """Have every rank give its KV memory back, rank 0 first: it uses the others' pools. How
        many bytes are still resident."""
        give = GiveMemoryMsg(is_kept, round(wait_s * 1000))
        mine = await self.give(give)
        others = await asyncio.gather(*(follower.give(give) for follower in self.followers))
        self.published = self.kept = 0
        return sum(given.resident_bytes for given in (mine, *others))

    async def give(self, give: GiveMemoryMsg) -> GivenMsg:
        """On this rank alone."""
        self._given = self._loop.create_future()
        self._conn.send(give)
        return await self._given

    async def place(self, wait_s: float, *, is_away: bool) -> PlacedMsg:
        """Have every rank release its weights, or map them again."""
        message = PlaceMsg(is_away, round(wait_s * 1000))
        links = (self, *self.followers)
        placed = await asyncio.gather(*(link.place_alone(message) for link in links))
        return PlacedMsg(
            all(each.is_away for each in placed),
            sum(each.freed_bytes for each in placed),
            next((each.note for each in placed if each.note), ""),
        )

    async def place_alone(self, message: PlaceMsg) -> PlacedMsg:
        """On this rank alone; one question at a time."""
        self._placed = self._loop.create_future()
        self._conn.send(message)
        return await self._placed

    async def check(self) -> CheckedMsg:
        """Run one canary; calls while one runs share its result."""
        if self._checked is None:
            self._checked = self._loop.create_future()
            self._conn.send(CheckMsg())
        return await asyncio.shield(self._checked)

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        stop_token_ids: tuple[int, ...],
        made: Sequence[int] = (),
        attempt: bytes = b"",
    ) -> Generation:
        """Ask for tokens; use the result in a `with` block, which cancels an unfinished request.

        `made`: the first tokens of the answer, which exist already and are not sent again.
        `attempt`: what the gateway calls this.

        Raises:
            UnderstudyError: `engine.queue_full`.
        """
        size_bytes = (len(prompt) + len(made)) * TOKEN_BYTES + _size_bytes(sampling)
        if (
            len(self._unfinished) >= self._requests_max
            or self._prompt_bytes + size_bytes > PROMPT_BYTES_UNFINISHED_MAX
        ):
            raise UnderstudyError(
                "engine.queue_full",
                f"this engine is full: {len(self._unfinished)} requests with"
                f" {self._prompt_bytes // TOKEN_BYTES} tokens of prompt are in progress; try again"
                " shortly",
            )
        generation = Generation(self, next(self._numbers), size_bytes)
        self._unfinished[generation.number] = generation
        self._prompt_bytes += size_bytes
        self._conn.send(
            SubmitMsg(
                generation.number,
                pack(prompt),
                max_tokens,
                sampling,
                stop_token_ids,
                pack(made),
                attempt,
            )
        )
        return generation

    def cancel(self, number: int) -> None:
        """Drop a request that the model has not finished; any other number is ignored."""
        if self._forget(number) is not None:
            self._conn.send(CancelMsg(number))

    def _forget(self, number: int) -> Generation | None:
        generation = self._unfinished.pop(number, None)
        if generation is not None:
            self._prompt_bytes -= generation.prompt_bytes
        return generation

    # ------------------------------------------------------------------ wire.Handler

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case TokenMsg():
                self.page.count = message.progress
                self._deliver(message)
            case ProgressedMsg():
                self.page.count = message.progress
            case PublishedMsg():
                self.published, self.kept = message.blocks, message.kept
            case ReadyMsg():
                _settle(self._ready, message)
            case TakenMsg():
                _settle(self._taken, message)
            case GivenMsg():
                _settle(self._given, message)
            case PlacedMsg():
                _settle(self._placed, message)
            case CheckedMsg():
                _settle(self._checked, message)
                self._checked = None
            case FailedMsg():
                self._fail(message)
            case _:
                raise UnderstudyError("engine.link", f"{message.TYPE} is not for this side")

    def closed(self, conn: Connection, reason: str) -> None:
        status = None if self._child is None else self._child.poll()
        how = "" if status is None else f", exit status {status}"
        name = "the model process" if not self._rank else f"the process of rank {self._rank}"
        self._fail(
            FailedMsg(
                "engine.model_died",
                f"{name} ended without giving a reason{how} ({reason}); it was probably killed",
                permanent=False,
                exit_code=1,
            )
        )

    def _deliver(self, token: TokenMsg) -> None:
        is_last = token.finish_reason is not None
        number = token.request
        generation = self._forget(number) if is_last else self._unfinished.get(number)
        if generation is not None:  # else it was cancelled while this token was on its way
            generation.tokens.put_nowait(token)

    def _fail(self, failed: FailedMsg) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._on_failed(failed)


class Generation:
    """The tokens of one request, as they arrive."""

    def __init__(self, link: ModelLink, number: int, prompt_bytes: int) -> None:
        self.number = number
        self.prompt_bytes = prompt_bytes
        self.tokens: asyncio.Queue[TokenMsg] = asyncio.Queue()
        self._link = link

    async def next(self) -> TokenMsg:
        """The next token; after one with a `finish_reason` there is none."""
        return await self.tokens.get()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *error: object) -> None:
        self._link.cancel(self.number)


def _size_bytes(sampling: SamplingParams) -> int:
    """About what the parts take that can be large: a grammar and lists, on the wire."""
    words = sum(len(word) for word in sampling.bad_words)
    return len(sampling.grammar) + 2 * TOKEN_BYTES * (words + 2 * len(sampling.logit_bias))


def digest_of(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _settle(future: asyncio.Future[T] | None, message: T) -> None:
    if future is not None and not future.done():
        future.set_result(message)
