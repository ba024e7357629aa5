"""The HTTP process's end of the links to the model processes, which generate its tokens.

Owns request numbers and unfinished requests. Knows no HTTP and no text. Every rank must be ready
and take memory before the engine counts as ready or awake; only rank 0 gets requests. The
surprising thing: nothing here waits for room in a connection. The requests in flight and the bytes
of their prompts are limited to less than it may hold, so a client can be refused but never cut the
link.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from engine.backends.process import ProgressPage
from engine.backends.reference.link import (
    LINK,
    PROMPT_BYTES_UNFINISHED_MAX,
    RANK_LOST,
    TOKEN_BYTES,
    CancelMsg,
    ProgressedMsg,
    PublishedMsg,
    ReadyMsg,
    SamplingParams,
    SubmitMsg,
    TakeMemoryMsg,
    TokenMsg,
    digest_of,
    pack,
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
# A rank that fails says why and ends; those that computed with it report that they lost it. All of
# that arrives within this time, in any order, and the cause must go first.
CAUSE_WAIT_S = 0.5


class RankLink(Handler):
    """The connection to the process of one rank."""

    def __init__(
        self,
        model: ModelLink,
        rank: int,
        sock: socket.socket,
        child: subprocess.Popen[bytes] | None,
    ) -> None:
        """Own `sock`. `child` is the process at its other end, where it is known."""
        self._model = model
        self._name = f"the process of rank {rank}" if rank else "the model process"
        self._child = child
        self._has_failed = False
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[ReadyMsg] = self._loop.create_future()
        self._answers: dict[type[Message], asyncio.Future[Any]] = {ReadyMsg: self.ready}
        self.conn = UnixConnection(sock, LINK, self)

    async def ask(self, message: Message, answer: type[T]) -> T:
        """Send `message` and wait for its `answer`; the caller asks one question of a kind at a
        time."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._answers[answer] = future
        self.conn.send(message)
        return await future

    # ------------------------------------------------------------------ wire.Handler

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case TokenMsg() | ProgressedMsg() | PublishedMsg():
                self._model.received(message)
            case ReadyMsg() | WokenMsg() | RestedMsg() | WeightsPlacedMsg() | CanaryMsg():
                future = self._answers.get(type(message))
                if future is not None and not future.done():
                    future.set_result(message)
            case FaultReportMsg():
                self._fail(message)
            case _:
                raise UnderstudyError("engine.link", f"{message.TYPE} is not for this side")

    def closed(self, conn: Connection, reason: str) -> None:
        status = None if self._child is None else self._child.poll()
        how = "" if status is None else f", exit status {status}"
        what = f"{self._name} ended without giving a reason{how} ({reason}); it was probably killed"
        self._fail(FaultReportMsg("engine.model_died", what, permanent=False))

    def _fail(self, failed: FaultReportMsg) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._model.failed(failed)


class ModelLink:
    """The whole model; made on the loop."""

    def __init__(
        self,
        models: Sequence[tuple[socket.socket, subprocess.Popen[bytes] | None]],
        slots: int,
        on_failed: Callable[[FaultReportMsg], None],
        page: ProgressPage | None = None,
    ) -> None:
        """Own the sockets of `models`, link and process of every rank in order. `on_failed` is
        called once, when the model has failed or died, with the cause."""
        self.slots = slots  # requests that are generated at once
        self.page = ProgressPage() if page is None else page
        self.published = 0  # blocks that the next engine was told of
        self.kept = 0  # blocks that it would find now
        self._on_failed = on_failed
        self._is_reported = False
        self._numbers = itertools.count(1)
        self._unfinished: dict[int, Generation] = {}
        self._prompt_bytes = 0
        self._checking: asyncio.Future[CanaryMsg] | None = None
        self.ranks = [RankLink(self, rank, *each) for rank, each in enumerate(models)]

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
        found = await self._all_ready()
        return replace(
            found[0],
            weights_bytes=sum(each.weights_bytes for each in found),
            kv_bytes=sum(each.kv_bytes for each in found),
            epoch=",".join(each.epoch for each in found),
        )

    async def _all_ready(self) -> list[ReadyMsg]:
        return [await asyncio.shield(rank.ready) for rank in self.ranks]

    async def take_memory(self, token: int, era: str) -> WokenMsg:
        """On every rank, on rank 0 last: it may borrow the pools of the others. A rank that cannot
        ends the engine, and so frees what the others took.

        Raises:
            UnderstudyError: `engine.kv_mixed`.
        """
        ready = await self._all_ready()
        epochs = tuple(each.epoch for each in ready)
        identities = tuple(digest_of(each.identity) for each in ready)
        take = TakeMemoryMsg(token, era, epochs, identities)
        others = await self._ask_all(self.ranks[1:], take, WokenMsg)
        mine = await self.ranks[0].ask(take, WokenMsg)
        self.kept = mine.adopted_blocks
        if any(taken.kv_memory != mine.kv_memory for taken in others):
            raise UnderstudyError(
                "engine.kv_mixed",
                "the memory service lends KV memory to some ranks of this engine and not to others,"
                " so it cannot be kept; it was probably restarted just now",
            )
        return replace(mine, kv_bytes=mine.kv_bytes + sum(taken.kv_bytes for taken in others))

    async def give_memory(self, wait_s: float, *, is_kept: bool) -> int:
        """Have every rank give its KV memory back, rank 0 first: it uses the others' pools. How
        many bytes are still resident."""
        give = RestMsg(is_kept, round(wait_s * 1000))
        mine = await self.ranks[0].ask(give, RestedMsg)
        others = await self._ask_all(self.ranks[1:], give, RestedMsg)
        self.published = self.kept = 0
        return sum(given.kv_bytes_resident for given in (mine, *others))

    async def place(self, wait_s: float, *, is_away: bool) -> WeightsPlacedMsg:
        """Have every rank release its weights, or map them again."""
        message = PlaceWeightsMsg(is_away, round(wait_s * 1000))
        placed = await self._ask_all(self.ranks, message, WeightsPlacedMsg)
        return WeightsPlacedMsg(
            all(each.is_away for each in placed),
            sum(each.freed_bytes for each in placed),
            next((each.note for each in placed if each.note), ""),
        )

    async def check(self) -> CanaryMsg:
        """Run one canary; calls while one runs share its result."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self.ranks[0].ask(RunCanaryMsg(), CanaryMsg))
        return await asyncio.shield(self._checking)

    async def _ask_all(
        self, ranks: Sequence[RankLink], message: Message, answer: type[T]
    ) -> list[T]:
        return await asyncio.gather(*(rank.ask(message, answer) for rank in ranks))

    # ------------------------------------------------------------------ requests

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
        `attempt`: the gateway's name for this request.

        Raises:
            UnderstudyError: `engine.queue_full`.
        """
        words = sum(len(word) for word in sampling.bad_words)
        lists = 2 * (words + 2 * len(sampling.logit_bias))
        size_bytes = (len(prompt) + len(made) + lists) * TOKEN_BYTES
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
        generation = Generation(self, next(self._numbers), size_bytes)
        self._unfinished[generation.number] = generation
        self._prompt_bytes += size_bytes
        self.ranks[0].conn.send(
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
            self.ranks[0].conn.send(CancelMsg(number))

    def _forget(self, number: int) -> Generation | None:
        generation = self._unfinished.pop(number, None)
        if generation is not None:
            self._prompt_bytes -= generation.size_bytes
        return generation

    # ------------------------------------------------------------------ from the ranks

    def received(self, message: TokenMsg | ProgressedMsg | PublishedMsg) -> None:
        if isinstance(message, PublishedMsg):
            self.published, self.kept = message.blocks, message.kept
            return
        self.page.count = message.progress
        if isinstance(message, TokenMsg):
            is_last, number = message.finish_reason is not None, message.request
            generation = self._forget(number) if is_last else self._unfinished.get(number)
            if generation is not None:  # else it was cancelled while this token was on its way
                generation.tokens.put_nowait(message)

    def failed(self, failed: FaultReportMsg) -> None:
        """Report the first cause; the loss of a rank only if no cause follows."""
        if failed.code == RANK_LOST:
            asyncio.get_running_loop().call_later(CAUSE_WAIT_S, self._report, failed)
        else:
            self._report(failed)

    def _report(self, failed: FaultReportMsg) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._on_failed(failed)


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
