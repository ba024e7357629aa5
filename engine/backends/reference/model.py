"""The model on the event loop: a step of it in each turn of the loop, while there is work.

Owns the numbers of requests, and what is unfinished. Knows no HTTP and no text.

The surprising thing: nothing runs beside a step, so it delays the loop, by a millisecond of a small
model and by a chunk of a prompt of a large one. In return a token is on its way to its client
before the next step begins. The supervisor takes a late answer for no hang, because progress is
counted on a shared page.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from engine.backends.reference.generation import Generator, NewToken, TokenRequest
from engine.backends.reference.rank import Rank
from plumbing.errors import UnderstudyError

# Requests that wait for a slot; more would wait for minutes, and are refused. Each has a prompt and
# a journal of at most a context's length.
QUEUE_MAX = 256


class ModelLoop:
    """Rank 0, which leads the others; every method is called on the loop."""

    def __init__(
        self,
        rank: Rank,
        slots: int,
        on_failed: Callable[[Exception], object],
        progress: ctypes.c_uint64,
    ) -> None:
        """`slots`: requests that are generated at once. `on_failed` gets why the model failed.
        `progress` counts steps, for the supervisor."""
        self._rank, self.slots, self._on_failed = rank, slots, on_failed
        self._progress = progress
        self._numbers = itertools.count(1)
        self._unfinished: dict[int, asyncio.Queue[NewToken]] = {}  # where the tokens of each go
        self._turn: asyncio.Handle | None = None  # the next step

    @property
    def in_flight(self) -> int:
        """Requests that the model has not finished."""
        return len(self._unfinished)

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
        self._unfinished[number] = tokens
        self._generator.submit(replace(wanted, number=number))
        self._go_on()
        try:
            yield tokens
        finally:
            if self._unfinished.pop(number, None) is not None:
                self._generator.cancel(number)
                self._go_on()

    @property
    def _generator(self) -> Generator:
        assert self._rank.generator is not None  # requests come while it is awake
        return self._rank.generator

    def _go_on(self) -> None:
        """Let the next step be in the next turn, or when a token is due."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._unfinished and self._generator.has_work:
            loop, wait_s = asyncio.get_running_loop(), self._generator.idle_s()
            self._turn = (
                loop.call_later(wait_s, self._step) if wait_s else loop.call_soon(self._step)
            )

    def _step(self) -> None:
        self._turn = None
        try:
            made = self._generator.step()
        except Exception as error:
            self._on_failed(error)
            raise
        self._progress.value += 1
        if self._rank.kept is not None:
            self._rank.kept.writer.stepped()
        if made is not None:
            self._unfinished[made.request].put_nowait(made)
            if made.finish_reason is not None:
                del self._unfinished[made.request]
        self._go_on()
