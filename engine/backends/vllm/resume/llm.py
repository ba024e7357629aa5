"""In the API process: vLLM's `AsyncLLM`, which can resume an answer that another engine began.

Decides what becomes of an answer when its engine dies, by the parameters of the request as vLLM's
serving layer made them, and not by the client's JSON.

A journal is replayed through vLLM's own output processor, so that stop strings, half characters,
reasoning and tool parsers are in the state in which the dead engine's were. The replayed outputs
are handed out one by one as the serving layer asks for them. The engine core gets the request only
after the last of them: before that, live outputs would get in between. A request whose last token
was its end does not end by itself, because vLLM checks a token only where it samples it; so this
module checks, and the core then never hears of the request.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingType
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from engine.backends.vllm.resume.answer import CURRENT, Continuing, made_by, with_made
from plumbing.gateway_protocol import Continuation

# For a place in vLLM's queue (`--max-num-queued-reqs`, `--max-num-queued-tokens`): other resumed
# streams end their prefill in this time.
ADMIT_S, ADMIT_POLL_S = 10.0, 0.05


class ContinuingLLM(AsyncLLM):
    continuing = Continuing()
    progressed: Callable[[], None] = staticmethod(lambda: None)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """Not a coroutine: the class of an answer must be known before its first event is asked
        for, and it is said in its headers."""
        answer, asked = CURRENT.get(), Continuation.NONE
        tokens: Sequence[int] = ()
        if answer is not None:
            asked = self._continuation_of(prompt, sampling_params, more.get("lora_request"))
            journal = answer.asked(asked)
            tokens = () if journal is None else journal.tokens
        params = with_made(sampling_params, tokens, answer.attempt if answer else b"")
        outputs: AsyncGenerator[Any, None] = super().generate(prompt, params, request_id, **more)
        if answer is None or asked is Continuation.NONE:
            return outputs
        return answer.through(outputs)

    async def _add_request(
        self, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any
    ) -> None:
        made = made_by(request.sampling_params)
        if not made:
            await super()._add_request(request, prompt, parent_req, index, queue)
            return
        self._check_fits(request, made)
        await self._admit(request.request_id)
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        answer = CURRENT.get()
        journal = answer.journal if answer is not None and answer.has_boundaries else None
        queue.__class__ = ReplayCollector
        queue.begin(self, request, made, None if journal is None else journal.chunks)

    async def _admit(self, request_id: str) -> None:
        """vLLM's serving layer has asked the same before the response began, and the gateway asks
        again after a refusal. But the streams of a dead engine come all at once, and a refusal now
        would end one of them.

        Raises:
            GracefulHTTPError: the queue is still full after `ADMIT_S`.
        """
        end = time.monotonic() + ADMIT_S
        while True:
            try:
                self.check_admission(request_id=request_id)
                return
            except GracefulHTTPError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(ADMIT_POLL_S)

    def _continuation_of(self, prompt: Any, params: Any, lora_request: Any) -> Continuation:
        """The class of one output; several are `none`."""
        is_one_text = (
            isinstance(params, SamplingParams)
            and params.n == 1
            and params.output_kind == RequestOutputKind.DELTA
            and params.prompt_logprobs is None
            and isinstance(prompt, dict)
            and "prompt_embeds" not in prompt
        )
        is_known = lora_request is None or lora_request.lora_name in self.continuing.adapters
        if not is_one_text or not is_known or self._is_untried(params):
            return Continuation.NONE
        is_random = params.sampling_type == SamplingType.RANDOM
        if self.continuing.best is Continuation.EXACT and is_random:
            return Continuation.STATE
        return self.continuing.best

    def _is_untried(self, params: Any) -> bool:
        """Such a request was never resumed with model runner V2: it finds thinking budgets by
        other code than V1, drafts are aligned with seeds in another way after a cut, and only V2
        has watermarks and replays traces."""
        config = self.vllm_config
        is_marked = getattr(config, "watermark_config", None) is not None
        has_drafts = config.speculative_config is not None and params.seed is not None
        asked = ("thinking_token_budget", "trace_decode_token_ids")
        is_special = any(getattr(params, name, None) is not None for name in asked)
        return config.use_v2_model_runner and (is_marked or has_drafts or is_special)

    def _check_fits(self, request: Any, made: Any) -> None:
        """Tokens that the model cannot have made would end the engine core.

        Raises:
            VLLMValidationError: the client gets it as an error.
        """
        room = self.model_config.max_model_len - len(request.prompt_token_ids or ())
        if len(made) > room or max(made) >= self.model_config.get_vocab_size():
            raise VLLMValidationError(
                "The tokens of the answer so far are not this model's: it cannot be continued."
            )


# Replaying takes 3 µs for a token in a large chunk and 40 for one alone. Meanwhile no other request
# gets a token, so there is a pause for them after so many of each.
TOKENS_AT_ONCE = 4096
CHUNKS_AT_ONCE = 128


class ReplayCollector(RequestOutputCollector):
    """Hands out the replay of one request, and then what the engine makes. vLLM has made and keeps
    the object."""

    is_replaying = False

    def begin(
        self, llm: ContinuingLLM, request: Any, made: Sequence[int], chunks: Sequence[int] | None
    ) -> None:
        """`request` is an `EngineCoreRequest`, which has been added to the output processor.
        `chunks`: how many tokens each output has; None: any number."""
        self._llm, self._request = llm, request
        self._tokens, self._at, self._since_pause = list(made), 0, 0
        self._sizes = iter(chunks) if chunks is not None else itertools.repeat(TOKENS_AT_ONCE)
        self._seen = Request.from_engine_core_request(request, None)
        self._seen.append_output_token_ids(self._tokens)
        self._has_ended = check_stop(self._seen, llm.model_config.max_model_len)
        self._state = llm.output_processor.request_states[request.request_id]
        self.is_replaying = True

    @property
    def _waits(self) -> bool:
        """All is played, or others are to have their turn."""
        return self._at == len(self._tokens) or self._since_pause >= CHUNKS_AT_ONCE

    def get_nowait(self) -> Any:
        while self.is_replaying and self.output is None:
            if self._waits:
                return None  # `get` is asked next
            self._play()
        return super().get_nowait()

    async def get(self) -> Any:
        while self.is_replaying and self.output is None:
            if not self._waits:
                self._play()
            elif self._at < len(self._tokens):
                self._since_pause = 0
                await asyncio.sleep(0)
            else:
                self.is_replaying = False
                await self._go_on()
        return await super().get()

    def _play(self) -> None:
        """The next chunk; the request may end with it."""
        part = self._tokens[self._at : self._at + next(self._sizes)]
        self._at += len(part)
        self._since_pause += 1
        self._llm.progressed()  # a replay is progress, too
        is_last = self._at == len(self._tokens) and self._has_ended
        output = EngineCoreOutput(
            request_id=self._request.request_id,
            new_token_ids=part,
            new_logprobs=_no_logprobs(self._request.sampling_params, part),
            finish_reason=self._seen.get_finished_reason() if is_last else None,
            stop_reason=self._seen.stop_reason if is_last else None,
        )
        processor = self._llm.output_processor
        processor.process_outputs([output])
        # It may also have ended by a stop string.
        self.is_replaying = self._request.request_id in processor.request_states

    async def _go_on(self) -> None:
        """The rest is the engine's."""
        stats = self._state.stats
        if stats is not None:  # else the next token's latency counts from the beginning of time
            stats.first_token_ts = stats.last_token_ts = time.monotonic()
            stats.num_generation_tokens = len(self._tokens)
        await self._llm.engine_core.add_request_async(self._request)


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
