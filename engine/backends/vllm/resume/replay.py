"""In the API process: a journal is played through vLLM's own output processor.

So stop strings, half characters, reasoning and tool parsers are in the state in which the dead
engine's were. The replayed outputs are handed out one by one as the serving layer asks for them;
only when it has them all does the engine core hear of the request. Before that, live outputs would
get in between.

Surprising: a request whose last token was its end does not end by itself. vLLM checks a token only
where it samples it, so it is asked here; the core then never hears of the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

# Replaying takes 3 µs for a token in a large chunk and 40 for one alone. Meanwhile no other request
# gets a token, so there is a pause for them after so many of each.
TOKENS_AT_ONCE = 4096
CHUNKS_AT_ONCE = 128


class EngineReplay:
    """One request's replay.

    Args:
        processor: vLLM's output processor, to which the request has been added.
        request: the `EngineCoreRequest`.
        chunks: how many tokens each output has; None: any number.
        go_on: tells the engine core of the request.
        progressed: called for each output, because a replay is progress, too.
    """

    def __init__(
        self,
        processor: Any,
        request: Any,
        tokens: Sequence[int],
        chunks: Sequence[int] | None,
        max_model_len: int,
        go_on: Callable[[], Awaitable[None]],
        progressed: Callable[[], None],
    ) -> None:
        self._processor, self._request = processor, request
        self._tokens, self._at = list(tokens), 0
        self._sizes = iter(chunks) if chunks is not None else _slices(len(tokens))
        self._go_on, self._progressed = go_on, progressed
        self._since_pause = 0
        self._seen = Request.from_engine_core_request(request, None)
        self._seen.append_output_token_ids(self._tokens)
        self._has_ended = check_stop(self._seen, max_model_len)
        self._state = processor.request_states[request.request_id]

    @property
    def is_paused(self) -> bool:
        return self._since_pause >= CHUNKS_AT_ONCE

    @property
    def is_over(self) -> bool:
        return self._at == len(self._tokens)

    async def pause(self) -> None:
        self._since_pause = 0
        await asyncio.sleep(0)

    def play(self) -> bool:
        """Play the next chunk into the request's collector; True: the request has ended."""
        part = self._tokens[self._at : self._at + next(self._sizes)]
        self._at += len(part)
        self._since_pause += 1
        self._progressed()
        is_last = self.is_over and self._has_ended
        output = EngineCoreOutput(
            request_id=self._request.request_id,
            new_token_ids=part,
            new_logprobs=_no_logprobs(self._request.sampling_params, part),
            finish_reason=self._seen.get_finished_reason() if is_last else None,
            stop_reason=self._seen.stop_reason if is_last else None,
        )
        self._processor.process_outputs([output])
        if self._request.request_id not in self._processor.request_states:  # or a stop string was
            self._at = len(self._tokens)
            return True
        return False

    async def go_on(self) -> None:
        """Everything was played: the rest is the engine's."""
        stats = self._state.stats
        if (
            stats is not None
        ):  # otherwise the next token's latency counts from the beginning of time
            stats.first_token_ts = stats.last_token_ts = time.monotonic()
            stats.num_generation_tokens = len(self._tokens)
        await self._go_on()


class ReplayCollector(RequestOutputCollector):
    """Hands out a replay, and then what the engine makes."""

    replay: EngineReplay | None = None

    @classmethod
    def of(cls, collector: RequestOutputCollector, replay: EngineReplay) -> None:
        """Let `collector`, which vLLM has made and keeps, play `replay` first."""
        collector.__class__ = cls
        collector.replay = replay

    def get_nowait(self) -> Any:
        while (replay := self.replay) is not None and self.output is None:
            if replay.is_over or replay.is_paused:
                return None  # `get` is asked next
            self._play(replay)
        return super().get_nowait()

    async def get(self) -> Any:
        while (replay := self.replay) is not None and self.output is None:
            if replay.is_over:
                self.replay = None
                await replay.go_on()
            elif replay.is_paused:
                await replay.pause()
            else:
                self._play(replay)
        return await super().get()

    def _play(self, replay: EngineReplay) -> None:
        if replay.play():
            self.replay = None


def _slices(total: int) -> Iterator[int]:
    for start in range(0, total, TOKENS_AT_ONCE):
        yield min(TOKENS_AT_ONCE, total - start)


def _no_logprobs(params: Any, tokens: Sequence[int]) -> Any:
    """Of the right shape: the events that are made of these are dropped by the gateway."""
    if params.num_logprobs is None:
        return None
    return LogprobsLists(
        np.array(tokens, dtype=np.int32).reshape(-1, 1),
        np.zeros((len(tokens), 1), dtype=np.float32),
        np.ones(len(tokens), dtype=np.int32),
        None,
    )
