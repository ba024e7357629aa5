"""The model as the event loop sees it: rank 0 on a thread of its own, in the same process.

Owns that thread, the numbers of requests, and what is unfinished. The thread computes one unit,
then takes the calls that have arrived, and waits for one when there is no work; so a cancelled
request costs one unit at most. Knows no HTTP and no text.

The surprising thing: two threads share one interpreter, and numpy lets go of it in every matrix
product. That wakes the loop, which finds it taken again, and because it was woken it never asks for
it: a small model would keep a token from its client for 30 ms. So no step begins before the loop
has passed on what the last one made.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from msgspec.structs import replace

from engine.backends.process import ProgressPage, fault_report
from engine.backends.reference.generation import NewToken, TokenRequest
from engine.backends.reference.rank import Rank
from engine.backends.reference.ranks import Ready
from engine.messages import FaultReportMsg
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Requests that wait for a slot; more would wait for minutes, and are refused. Each has a prompt and
# a journal of at most a context's length.
QUEUE_MAX = 256
# Prompts and journals take thousands of small steps. The loop hears of them this often, and gets
# the interpreter.
PROGRESS_EVERY_S = 0.002
LOOP_S = 0.02  # it may be busy for longer, and the model does not wait for that


class ModelThread:
    """Made on the loop."""

    def __init__(
        self,
        prepare: Callable[[], Rank],
        slots: int,
        on_failed: Callable[[FaultReportMsg], None],
        page: ProgressPage | None = None,
    ) -> None:
        """`prepare` makes rank 0, on its thread. `on_failed` gets why the model has failed."""
        self.slots = slots  # requests that are generated at once
        self.page = ProgressPage() if page is None else page
        self.published = 0  # blocks that the next engine was told of
        self.kept = 0  # blocks that it would find now
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._numbers = itertools.count(1)
        self._unfinished: dict[int, asyncio.Queue[NewToken]] = {}  # where the tokens of each go
        # Between the threads: calls one way, news the other.
        self._calls: queue.SimpleQueue[Callable[[Rank], None]] = queue.SimpleQueue()
        self._made: deque[NewToken] = deque()
        self._news = (0, 0, 0)  # progress, published, kept
        self._is_delivering = False
        self._is_delivered = threading.Event()
        self._is_delivered.set()
        self._next_news_s = 0.0
        threading.Thread(target=self._run, args=(prepare,), name="model", daemon=True).start()

    @property
    def in_flight(self) -> int:
        """Requests that the model has not finished."""
        return len(self._unfinished)

    @property
    def progress(self) -> int:
        """Tokens made, and steps of prefill."""
        return self.page.count

    async def ready(self) -> Ready:
        """Wait until every rank is ready."""
        return await asyncio.shield(self._ready)

    async def call(self, work: Callable[[Rank], T]) -> T:
        """Have rank 0 do `work` between two units. An error in it ends the engine."""
        done: asyncio.Future[T] = self._loop.create_future()

        def run(rank: Rank) -> None:
            self._loop.call_soon_threadsafe(_settle, done, work(rank))

        self._calls.put(run)
        return await done

    # ------------------------------------------------------------------ requests

    @contextmanager
    def generate(self, wanted: TokenRequest) -> Iterator[asyncio.Queue[NewToken]]:
        """Ask for tokens, under a number of our own. They arrive in the queue; after one with a
        `finish_reason` there is none. The end of the block cancels an unfinished request.

        Raises:
            UnderstudyError: `engine.queue_full`.
        """
        if self.in_flight >= self.slots + QUEUE_MAX:
            text = f"this engine is full: {self.in_flight} requests are in progress"
            raise UnderstudyError("engine.queue_full", f"{text}; try again shortly")
        number, tokens = next(self._numbers), asyncio.Queue[NewToken]()
        request = replace(wanted, number=number)
        self._unfinished[number] = tokens
        self._calls.put(lambda rank: _generator(rank).submit(request))
        try:
            yield tokens
        finally:
            if self._unfinished.pop(number, None) is not None:
                self._calls.put(lambda rank: _generator(rank).cancel(number))

    def _deliver(self) -> None:
        self._is_delivering = False
        self.page.count, self.published, self.kept = self._news
        while self._made:
            made = self._made.popleft()
            tokens = self._unfinished.get(made.request)
            if tokens is not None:  # else it was cancelled while this was on its way
                tokens.put_nowait(made)
            if made.finish_reason is not None:
                self._unfinished.pop(made.request, None)
        self._loop.call_soon(self._is_delivered.set)  # behind those that wait for the tokens

    # ------------------------------------------------------------------ on the model's thread

    def _run(self, prepare: Callable[[], Rank]) -> None:
        try:
            self._serve(prepare())
        except UnderstudyError as error:
            report = fault_report(error)
        except Exception as error:
            logger.exception("the model failed")
            report = FaultReportMsg("engine.model_died", repr(error)[:4096], permanent=False)
        self._loop.call_soon_threadsafe(self._on_failed, report)

    def _serve(self, rank: Rank) -> NoReturn:
        self._loop.call_soon_threadsafe(_settle, self._ready, rank.ready)
        while True:
            self._take_calls(rank)
            if rank.generator is not None and rank.generator.has_work:
                self._step(rank)

    def _take_calls(self, rank: Rank) -> None:
        """Do what was asked; wait for it as long as there is nothing else to do. Nothing here may
        hold the generator, whose memory a call gives back."""
        has_work = rank.generator is not None and rank.generator.has_work
        wait_s = _generator(rank).idle_s() if has_work else None
        try:
            call = self._calls.get(wait_s is None or wait_s > 0, wait_s)
            while True:
                call(rank)
                call = self._calls.get_nowait()
        except queue.Empty:
            pass

    def _step(self, rank: Rank) -> None:
        generator, kept = _generator(rank), rank.kept
        self._is_delivered.wait(LOOP_S)
        made, published, kept_blocks = generator.step(), 0, 0
        if kept is not None:
            kept.writer.stepped()
            published, kept_blocks = kept.writer.published, kept.writer.kept
        if made is not None:
            self._made.append(made)
        elif published == self._news[1]:
            now_s = time.monotonic()
            if now_s < self._next_news_s:
                return
            self._next_news_s = now_s + PROGRESS_EVERY_S
        self._news = generator.progress, published, kept_blocks
        if not self._is_delivering:
            self._is_delivering = True
            self._is_delivered.clear()
            self._loop.call_soon_threadsafe(self._deliver)


def _generator(rank: Rank) -> Any:
    assert rank.generator is not None  # requests come while it is awake
    return rank.generator


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
