"""One HTTP answer on its way through vLLM, known to the gate, which marks its events, and to
`ContinuingLLM`, which knows the tokens that they are made of.

vLLM's serving layer lies between the two. It is pulled: it asks the engine for an output, makes
events of it, sends them, and asks for the next. So whatever was sent before it asks belongs to the
output that it had. It must be so without a pause in between; nothing may pass events on from
another task (`api/marks.py` says where that is ensured).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from plumbing.gateway_protocol import Continuation, Journal

CURRENT: ContextVar[Answer | None] = ContextVar("understudy_answer", default=None)

# An output that ended so is not the end that the model made.
BROKEN_OFF = ("abort", "error")


class Answer:
    """What is asked of the engine for one request of a client.

    Args:
        journal: the tokens of the answer so far, if it is resumed.
        has_boundaries: the serving layer's events depend on how tokens were chunked, so a replay
            must be chunked alike.
        is_repeatable: without a stream, it can be asked again from the start.
        expected: its class until the engine is asked. vLLM asks for the Responses API only when the
            headers were sent.
        attempt: what the gateway calls this one.
    """

    def __init__(
        self,
        journal: Journal | None = None,
        *,
        has_boundaries: bool = True,
        is_repeatable: bool = True,
        expected: Continuation = Continuation.NONE,
        attempt: bytes = b"",
    ) -> None:
        self.journal = journal
        self.has_boundaries = has_boundaries
        self.is_repeatable = is_repeatable
        self.continuation = expected
        self.attempt = attempt
        self.questions = 0
        self.is_whole = False
        # Behind the events that are made now.
        self.tokens: list[int] = []
        self.chunks: list[int] = []
        self.on_group: Callable[[], Awaitable[None]] | None = None

    def asked(self, continuation: Continuation) -> Journal | None:
        """The engine is asked for an answer, which could be continued so far; returns what it must
        take up. An answer made of several outputs cannot be continued."""
        self.questions += 1
        self.continuation = continuation if self.questions == 1 else Continuation.NONE
        can_continue = self.continuation is not Continuation.NONE
        return self.journal if can_continue else None

    @property
    def is_refused(self) -> bool:
        """It has a journal, and something else than its continuation would be answered."""
        return self.journal is not None and self.continuation is Continuation.NONE

    async def through(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """`outputs` of the engine as the serving layer asks for them."""
        try:
            async for output in outputs:
                self._handed(output)
                yield output
                await self._asked_for_more()
        finally:
            await outputs.aclose()

    def _handed(self, output: Any) -> None:
        (made,) = output.outputs
        tokens = list(made.token_ids)
        if tokens:
            self.tokens += tokens
            self.chunks.append(len(tokens))
        self.is_whole = output.finished and made.finish_reason not in BROKEN_OFF

    async def _asked_for_more(self) -> None:
        if self.on_group is not None:
            await self.on_group()

    def take_group(self) -> tuple[list[int], list[int]]:
        """Tokens and chunks of the group that ends now."""
        group = self.tokens, self.chunks
        self.tokens, self.chunks = [], []
        return group
