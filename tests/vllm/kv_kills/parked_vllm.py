"""vLLM with our worker and scheduler in one process, for `kv_kills`: loaded and parked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from vllm import LLM, SamplingParams

from engine.backends.memory_session import SOCKET_DIR_ENV
from engine.backends.vllm import membership
from engine.messages import Counts
from gms.messages import NO_ERA
from tests.vllm.overlapping import keep_async_scheduling

DEADLINE_S = 30.0
KV_BYTES = 3 << 20  # some 40 blocks, far fewer than all questions take
AT_ONCE = 6
ANSWER_TOKENS = 40
GAP_MIN = 0.01  # of log probabilities, which differ by 1e-5 between two batches in float32


class ParkedVllm:
    """See `load`."""

    def __init__(self, model: str, directory: str, engine: str) -> None:
        os.environ[SOCKET_DIR_ENV], self._engine = directory, engine
        keep_async_scheduling()
        self._llm: Any = LLM(
            model,
            worker_cls="tests.vllm.parked_worker.UnsupervisedWorker",
            scheduler_cls="engine.backends.vllm.kv.scheduler.KeepingAsyncScheduler",
            async_scheduling=True,
            dtype="float32",
            enforce_eager=True,
            generation_config="vllm",
            max_model_len=256,
            max_num_seqs=AT_ONCE,
            max_num_batched_tokens=64,  # prompts come in parts
            block_size=32,
            kv_cache_memory_bytes=KV_BYTES,
        )
        self._llm.sleep(1)

    def wake(self, token: int) -> Mapping[str, Any]:
        known = {"engine": self._engine, "incarnation": f"i-{token}", "seat": None}
        membership._member = cast("Any", SimpleNamespace(**known, counts=Counts()))
        asked = (DEADLINE_S, token, NO_ERA)
        (taken,) = self._llm.collective_rpc("understudy_take_kv", args=asked)
        if taken["problem"]:
            raise RuntimeError(taken["problem"])
        answer: dict[str, Any] = {}
        if token:
            beginning = {
                "deadline_s": DEADLINE_S,
                "may_adopt": True,
                "ranks": [taken["pool"]],
            }
            core = self._llm.llm_engine.engine_core.engine_core
            answer = core.understudy_begin_kv(beginning)
            if answer["problem"]:
                raise RuntimeError(answer["problem"])
            core.understudy_judge_kv("")
        self._llm.wake_up()
        return answer

    def ask(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        return [list(each.token_ids) for each in self._made(prompts)]

    def is_clear(self, prompt: list[int]) -> bool:
        (made,) = self._made([prompt], 2)
        for step in made.logprobs:
            best, second = sorted((each.logprob for each in step.values()), reverse=True)[:2]
            if best - second < GAP_MIN:
                return False
        return True

    def _made(self, prompts: Sequence[list[int]], logprobs: int | None = None) -> list[Any]:
        sampling = SamplingParams(
            temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=logprobs
        )
        asked = [{"prompt_token_ids": each} for each in prompts]
        return [each.outputs[0] for each in self._llm.generate(asked, sampling, use_tqdm=False)]
