"""vLLM as its supervisor sees it: prepared, awake, serving, draining.

Owns the order of a wake (KV memory on every rank, then vLLM's scheduler, then the canary, then the
lent socket) and what counts as healthy. Everything but `health` runs on vLLM's own loop.

The surprising thing: the calls to our own worker methods never fail as calls. After a failed one
vLLM's replies are off by one for ever, so the methods answer with what went wrong instead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from engine.backends.phases import Phases
from engine.backends.vllm.api.http import TRIAL_PROMPT, Front
from engine.backends.vllm.api.progress import Progress
from engine.messages import Canary, Healthy, Prepared
from plumbing.errors import UnderstudyError
from plumbing.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

# Inside the waking budget of 60 s, so that the reason is said before the kill comes.
KV_WAIT_S = 45.0
STATUS_WAIT_S = 60.0
# Whoever cannot answer this cannot serve, and waiting for its memory only delays the next launch.
WAKE_ASK_S = 5.0
# A parked engine is asked now and then whether all of it could be woken: nobody else would find out
# before it is needed that one of its processes hangs. Seldom, because vLLM's workers spin for a
# second after whatever they are asked (SpinCondition): this is 0.3 % of a core for each engine.
PARKED_CHECK_S_PER_RANK = 300.0
PARKED_WAIT_S = 10.0  # a rank answers within milliseconds unless the machine swaps
DISTRUST_WAIT_S = 5.0
PULSE_S = 0.05  # how long a core's own failure goes unnoticed; one that dies is seen at once
PARKED_PULSE_S = 0.25  # the same while nobody waits for an answer: twenty looks a second cost 0.3 %
# A loop that has not turned for so long is busy with something that is no inference.
LATE_S = 1.0


class Backend:
    """One incarnation's engine, behind its HTTP front."""

    def __init__(self, engine: AsyncLLM, front: Front, progress: Progress) -> None:
        self.phases = Phases()
        self._engine = engine
        self._front = front
        self._progress = progress
        self._listening: OwnedFd | None = None
        self._canaries = 0
        self._turned_s = time.monotonic()

    async def prepare(self) -> Prepared:
        """Try the engine once, then give its KV memory back and stop its scheduler.

        Raises:
            UnderstudyError: a rank is not what it should be.
        """
        await self._front.warm_up()
        # A canary too, since vLLM compiles what its numbers need at first use (1.7 s on the CPU).
        # On a GPU the scratch memory behind the KV cache gives any token, so it is not judged.
        found = await self._generate("understudy-trial")
        if found is not None and current_platform.is_cpu():
            raise UnderstudyError("vllm.trial_failed", f"the trial canary failed: {found}")
        await self._engine.sleep(level=1)
        statuses = await self._ask_ranks("understudy_status", STATUS_WAIT_S)
        self.phases.step("ready")
        first = statuses[0]
        return Prepared(
            weights_bytes=sum(status["weights_bytes"] for status in statuses),
            kv_bytes=sum(status["kv_bytes"] for status in statuses),
            epoch=first["epoch"],
            identity=first["identity"],
        )

    async def wake(self, engine: str, token: int, listening: OwnedFd) -> int:
        """Take KV memory, in bytes over all ranks. Keeps a copy of `listening`."""
        self.phases.step("wake")
        self._listening = listening.duplicate()
        self._front.desk.engine, self._front.desk.token = engine, token
        await self._ask_ranks("understudy_status", WAKE_ASK_S)
        taken = await self._ask_ranks("understudy_take_kv", KV_WAIT_S + PULSE_S, KV_WAIT_S)
        await self._engine.wake_up()
        return sum(rank["kv_bytes"] for rank in taken)

    async def run_canary(self) -> Canary:
        """One real inference, judged by its numbers: what damaged weights or memory give is no
        number at all, or none of this vocabulary."""
        self.phases.step("run_canary")
        self._canaries += 1
        found = await self._generate(f"understudy-canary-{self._canaries}")
        if found is None:
            return Canary(True)
        await self._distrust(found)
        return Canary(False, found)

    async def serve(self) -> None:
        self.phases.step("serve")
        assert self._listening is not None
        listening, self._listening = self._listening, None
        await self._front.open(listening)

    def health(self) -> Healthy:
        """Called from the channel's thread, so it only reads. A loop that does not turn counts as
        a request that makes no progress, since its requests make none."""
        in_flight = self._engine.output_processor.get_num_unfinished_requests()
        is_late = time.monotonic() - self._turned_s > LATE_S
        return Healthy(
            in_flight=max(in_flight, int(is_late)),
            progress=self._progress.steps,
            accepting=self._front.is_open,
            rejected=self._front.desk.rejected,
        )

    async def drain(self, budget_s: float) -> None:
        """Accept no more, serve what comes on open connections, within the budget."""
        self.phases.step("drain")
        if self._listening is not None:
            self._listening.close()
        await self._front.drain(budget_s)

    async def watch(self, on_dead: Callable[[UnderstudyError], None]) -> None:
        """Turn with the loop, and call `on_dead` once vLLM has given itself up."""
        checking = asyncio.create_task(self._check_while_parked(on_dead))
        while not (self._engine.errored or self._front.has_ended):
            self._turned_s = time.monotonic()
            await asyncio.sleep(PARKED_PULSE_S if self.phases.is_parked else PULSE_S)
        checking.cancel()
        what = "its engine core has failed" if self._engine.errored else "its HTTP server has ended"
        on_dead(UnderstudyError("vllm.dead", f"vLLM has given up: {what}; its log says why"))

    async def _check_while_parked(self, on_dead: Callable[[UnderstudyError], None]) -> None:
        ranks = self._engine.vllm_config.parallel_config.world_size
        while True:
            await asyncio.sleep(PARKED_CHECK_S_PER_RANK * ranks)
            if not self.phases.is_parked:
                return
            try:
                await self._ask_ranks("understudy_status", PARKED_WAIT_S)
            except UnderstudyError as error:
                on_dead(error)

    # ------------------------------------------------------------------ asking vLLM

    async def _ask_ranks(
        self, method: str, timeout_s: float, *arguments: Any
    ) -> Sequence[dict[str, Any]]:
        """Call `method` on every rank.

        Raises:
            UnderstudyError: what the first rank that failed says; `vllm.silent`, after which
                replies may be out of step, so that this incarnation must end.
        """
        try:
            async with asyncio.timeout(timeout_s):
                # vLLM looks after its own timeout in the core, which may be what has stopped.
                answers: Sequence[dict[str, Any]] = await self._engine.collective_rpc(
                    method, timeout=timeout_s, args=arguments
                )
        except TimeoutError as error:
            raise UnderstudyError(
                "vllm.silent",
                f"not every process of vLLM answered {method} within {timeout_s:g} s: one of them"
                " hangs or is stopped",
            ) from error
        for answer in answers:
            if not answer["ok"]:
                raise UnderstudyError(
                    answer["code"], f"rank {answer['rank']}: {answer['error']}", rank=answer["rank"]
                )
        return answers

    async def _generate(self, request_id: str) -> str | None:
        """What was wrong with one greedy token, or None."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0)
        last = None
        config = self._engine.model_config
        prompt = {"prompt_token_ids": list(TRIAL_PROMPT[: max(1, config.max_model_len - 1)])}
        async for output in self._engine.generate(prompt, sampling, request_id):
            last = output
        made = last.outputs[0] if last is not None and last.outputs else None
        if made is None or len(made.token_ids) != 1 or not made.logprobs:
            return "no token came"
        token = made.token_ids[0]
        logprob = made.logprobs[0][token].logprob
        is_probability = config.logprobs_mode.endswith("logprobs")  # else the user chose logits
        if not math.isfinite(logprob) or (is_probability and logprob > 0):
            return f"token {token} came with a log-probability of {logprob}"
        if not 0 <= token < config.get_vocab_size():
            return f"token {token} is none of the vocabulary"
        return None

    async def _distrust(self, detail: str) -> None:
        try:
            await self._ask_ranks("understudy_distrust", DISTRUST_WAIT_S, detail)
        except Exception as error:  # told or not, this incarnation is about to end
            logger.warning("not every rank was told that a canary failed: %s", error)
