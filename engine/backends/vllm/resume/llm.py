"""In the API process: vLLM's `AsyncLLM`, which can take up an answer that another engine began.

Decides what becomes of an answer when its engine dies, by what the engine is asked: by the
parameters of the request as vLLM's serving layer made them, and not by the client's JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from msgspec import Struct
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingType
from vllm.v1.engine.async_llm import AsyncLLM

from engine.backends.vllm.resume.answer import CURRENT
from engine.backends.vllm.resume.made import made_by, with_made
from engine.backends.vllm.resume.replay import EngineReplay, ReplayCollector
from plumbing.gateway_protocol import Continuation

# For a place in vLLM's queue (`--max-num-queued-reqs`, `--max-num-queued-tokens`): other resumed
# streams end their prefill in this time.
ADMIT_S, ADMIT_POLL_S = 10.0, 0.05


class Abilities(Struct, frozen=True):
    """What this engine can continue: `best` of its classes, and the adapters that its successor
    has, too."""

    best: Continuation = Continuation.NONE
    adapters: frozenset[str] = frozenset()


class ContinuingLLM(AsyncLLM):
    abilities = Abilities()
    progressed: Callable[[], None] = staticmethod(lambda: None)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """Not a coroutine: the class of an answer must be known before its first event is asked
        for, and it is said in its headers."""
        answer = CURRENT.get()
        if answer is None:
            params = with_made(sampling_params, ())
            outputs: AsyncGenerator[Any, None] = super().generate(
                prompt, params, request_id, **more
            )
            return outputs
        asked = self._continuation_of(prompt, sampling_params, more.get("lora_request"))
        journal = answer.asked(asked)
        tokens = () if journal is None else journal.tokens
        params = with_made(sampling_params, tokens, answer.attempt)
        outputs = super().generate(prompt, params, request_id, **more)
        return outputs if asked is Continuation.NONE else answer.through(outputs)

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

        async def go_on() -> None:
            await self.engine_core.add_request_async(request)

        replay = EngineReplay(
            self.output_processor,
            request,
            made,
            None if journal is None else journal.chunks,
            self.model_config.max_model_len,
            go_on,
            self.progressed,
        )
        ReplayCollector.of(queue, replay)

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
        is_known = lora_request is None or lora_request.lora_name in self.abilities.adapters
        if not is_one_text or not is_known or self._is_untried(params):
            return Continuation.NONE
        is_random = params.sampling_type == SamplingType.RANDOM
        if self.abilities.best is Continuation.EXACT and is_random:
            return Continuation.STATE
        return self.abilities.best

    def _is_untried(self, params: Any) -> bool:
        """Nobody has resumed such a request with model runner V2: it finds thinking budgets by
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
