"""vLLM's engine and its HTTP front as the backend sees them: both write down what is asked of them,
in one list, and answer as they are told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from engine.backends.vllm.api.gateway_endpoints import Traffic

FINE = {"rank": 0, "code": "", "problem": ""}
STATUS = {
    **FINE,
    "weights_bytes": 10,
    "kv_bytes": 20,
    "epoch": "e",
    "identity": {},
    "cannot_offload": "",
}
POOL = {"device": "HOST-0", "claim": {}, "facts": {}}
# Of these calls the arguments are written down, too.
IN_FULL = ("sleep", "understudy_rest", "understudy_place_weights", "understudy_distrust")


class FakeEngine:
    """Of one rank, unless its `answers` are of several."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.arguments: dict[str, list[Any]] = {}  # by method, of each call to the ranks
        self.errored = False
        self.in_flight = 0
        self.is_busy = False  # a sleep that waits does not return before one that aborts
        self.aborted = asyncio.Event()
        self.hangs: set[str] = set()
        self.token, self.logprob = 5, -0.5  # of everything that it generates
        self.answers: dict[str, list[dict[str, Any]]] = {
            "understudy_status": [STATUS],
            "understudy_take_kv": [{**FINE, "pool": POOL}],
            "understudy_rest": [{**FINE, "kv_resident_bytes": 0}],
            "understudy_place_weights": [{**FINE, "is_away": True, "freed_bytes": 1, "note": ""}],
        }
        self.core: Any = {"code": "", "problem": "", "adopted": 0, "why_empty": ""}
        count = lambda: self.in_flight  # noqa: E731  # as vLLM's processor has it
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=count)
        self.model_config = SimpleNamespace(
            get_vocab_size=lambda: 100, max_model_len=4, logprobs_mode="raw_logprobs"
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=2),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
        self.engine_core: Any = self

    def note(self, *call: Any) -> None:
        self.asked.append(call if call[0] in IN_FULL else call[0])

    async def collective_rpc(self, method: str, timeout: float, args: Any) -> Any:  # noqa: ASYNC109  # as vLLM names it
        self.note(method, *args)
        self.arguments.setdefault(method, []).append(args)
        if method in self.hangs:
            await asyncio.Event().wait()
        return self.answers.get(method, [FINE])

    async def call_utility_async(self, method: str, *asked: Any) -> Any:
        self.note(method, *asked)
        return self.core

    async def wake_up(self) -> None:
        self.note("wake_up")

    async def sleep(self, level: int, mode: str = "abort") -> None:
        self.note("sleep", level, mode)
        if mode == "abort":
            self.aborted.set()
            self.in_flight = 0
        elif self.is_busy:
            await self.aborted.wait()

    async def generate(self, prompt: Any, sampling: Any, request_id: str) -> Any:
        assert len(prompt["prompt_token_ids"]) < self.model_config.max_model_len
        logprobs = [{self.token: SimpleNamespace(logprob=self.logprob)}]
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[self.token], logprobs=logprobs)])


class FakeFront:
    """No HTTP."""

    has_ended = False

    def __init__(self, engine: FakeEngine) -> None:
        self.traffic, self._engine = Traffic("e"), engine

    async def warm_up(self) -> None:
        pass

    async def drain(self, budget_s: float, *, resume: bool = False) -> None:
        self.traffic.is_draining = True

    async def stop(self, budget_s: float) -> None:
        self._engine.note("stop")
        self.traffic.renew()
