"""What vLLM's processes know of a request that may be resumed: its HTTP answer on its way out, and
the tokens that a dead engine has already made.

The gate marks the events of an `Answer`, and `ContinuingLLM` knows the tokens that they are made
of; vLLM's serving layer lies between the two. It is pulled: it asks the engine for an output, makes
events of it, sends them, and asks for the next. So whatever was sent before it asks belongs to the
output that it had. Nothing may pass events on from another task (`api/gateway_endpoints.py` says
where that is ensured).

The tokens travel in `SamplingParams.extra_args`, beside the gateway's name of the attempt. A client
reaches `extra_args` too (`vllm_xargs`), and made-up output would be an injection. So the value is
of bytes, which no JSON holds, and what clients put under our name is dropped. Needs neither vLLM
nor torch.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from msgspec import Struct

from plumbing.gateway_protocol import Continuation, Journal

CURRENT: ContextVar[Answer | None] = ContextVar("understudy_answer", default=None)

# An output that ended so is not the end that the model made.
BROKEN_OFF = ("abort", "error")


class Continuing(Struct, frozen=True):
    """Which streams of this engine another one can continue: the best class of them, the id that
    both engines have, and the adapters that both have."""

    best: Continuation = Continuation.NONE
    id: str = ""
    adapters: frozenset[str] = frozenset()


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
                if self.on_group is not None:  # it asks for more
                    await self.on_group()
        finally:
            await outputs.aclose()

    def _handed(self, output: Any) -> None:
        (made,) = output.outputs
        tokens = list(made.token_ids)
        if tokens:
            self.tokens += tokens
            self.chunks.append(len(tokens))
        self.is_whole = output.finished and made.finish_reason not in BROKEN_OFF

    def take_group(self) -> tuple[list[int], list[int]]:
        """Tokens and chunks of the group that ends now."""
        group = self.tokens, self.chunks
        self.tokens, self.chunks = [], []
        return group


KEY = "understudy_made"
ATTEMPT = "understudy_attempt"
ITEM = "I"


class Made(bytes):
    """The same, in the engine core and in the workers: vLLM logs the parameters of its requests
    when it fails, and the tokens are a user's text."""

    def __repr__(self) -> str:
        return f"<{len(self) // 4} tokens>"


def made_by(params: Any) -> Sequence[int]:
    """The tokens that a request with these `SamplingParams` has already made."""
    packed = (getattr(params, "extra_args", None) or {}).get(KEY)
    return array(ITEM, packed) if isinstance(packed, bytes) else ()


def attempt_of(params: Any) -> bytes:
    """What the gateway calls the attempt that a request with these `SamplingParams` is, if it is
    the whole of it and nothing is done for it before it is scheduled."""
    if params is None or params.n != 1 or params.structured_outputs is not None:
        return b""
    name = (params.extra_args or {}).get(ATTEMPT)
    return name if isinstance(name, bytes) else b""


def with_made(params: Any, tokens: Sequence[int], attempt: bytes = b"") -> Any:
    """A copy of `params` with these tokens and this name; neither: as a client may send them."""
    given = params.extra_args or {}
    extra = {name: value for name, value in given.items() if name not in (KEY, ATTEMPT)}
    if tokens:
        extra[KEY] = array(ITEM, tokens).tobytes()
    if attempt:
        extra[ATTEMPT] = attempt
    if extra == given:
        return params
    changed = copy.copy(params)  # all else is shared: `clone` copies deeply
    changed.extra_args = extra or None
    return changed


def conceal(params: Any) -> None:
    """Keep the tokens of `params` out of logs."""
    params.extra_args[KEY] = Made(params.extra_args[KEY])
