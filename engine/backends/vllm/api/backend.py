"""vLLM as its supervisor sees it: prepared, awake, serving, draining.

Owns the order of a wake (KV memory on every rank, then vLLM's scheduler, then the canary, then the
lent socket), the order of a rest, and what counts as healthy. Everything runs on vLLM's own loop.
Our own worker methods never raise: after a call that raised, vLLM's replies would be off by one for
good, so the methods return the error.

At a rest a drained engine gives its KV memory back and stays ready to be woken. No failed step is
undone: the incarnation ends, and another is launched.

- A `sleep` that waits for requests is overtaken by one that aborts them, and never given up: it
  would come back, and take the memory from an engine that was woken meanwhile.
- A `sleep` that has returned does not prove that nothing is in progress, and a `wake_up` that says
  True does not prove that every rank is awake. So requests are counted and ranks are asked.
- The prefix cache must be reset, or later requests would read memory that is not theirs. Every
  level of `sleep` from 1 on does that. For a hand-over the index of the cache is closed before.
- A rank maps the weights that it has released before it takes KV memory, whatever was answered.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from engine.backends import process_memory
from engine.backends.channel import is_private
from engine.backends.process import FAILURES_ENV
from engine.backends.vllm.api.features import KEEP_KV, OFFLOAD, PROVEN, RESUME, SLEEP, Features
from engine.backends.vllm.api.gateway_endpoints import Door
from engine.backends.vllm.api.http import TRIAL_PROMPT, Front
from engine.backends.vllm.api.kept_memory import GMS, OWN, KeptMemory, ask_core
from engine.backends.vllm.api.self_test import SelfTest
from engine.backends.vllm.membership import Answer
from engine.backends.vllm.resume.answer import Continuing
from engine.backends.vllm.versions import vllm_version
from engine.messages import CanaryMsg, Counts, PreparedMsg, RestedMsg, WeightsPlacedMsg, WokenMsg
from lockserver.client import serving
from plumbing import gateway_protocol as hop
from plumbing.errors import UnderstudyError
from plumbing.gateway_protocol import Continuation, Hello
from plumbing.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

# For weights that come back at some 2 GB a second, and KV memory that is not free yet. Within the
# waking budget of 60 s, so that the reason is reported before the kill.
TAKE_S = 45.0
# Beyond what a rank itself waits for: the memory service frees 8 GiB a second.
TAKE_GRACE_S, PLACE_GRACE_S = 5.0, 15.0
STATUS_WAIT_S = 60.0
# A rank that does not answer this cannot serve; waiting for its memory would delay the next launch.
# On a machine whose CPUs are all taken it answers late, and killing it makes the outage longer.
WAKE_ASK_S = 15.0
# How often a parked engine is checked: otherwise a hung process would not be noticed before it is
# needed. Seldom, because vLLM's workers spin for a second after every call (SpinCondition): this is
# 0.3 % of a core for each engine.
PARKED_CHECK_S_PER_RANK = 300.0
# A rank is late only on a busy machine, which does not need the launch of another engine too.
PARKED_WAIT_S = 30.0
DISTRUST_WAIT_S = 5.0
CORE_ASK_S = 15.0
ABORT_S = 10.0  # for the step that is running
REST_ASK_S = 15.0  # a rank that does not answer this is hung
COUNT_POLL_S = 0.001
NOTE_CHARS_MAX = 4096
FAILURES_MAX = 3  # then there is no self-test: five are a crash loop
PULSE_S = 0.05  # how long a core's own failure may go unnoticed; its death is seen at once
PARKED_PULSE_S = 0.25  # the same without clients: twenty checks a second cost 0.3 % of a core


class VllmBackend:
    """One incarnation's engine, behind its HTTP front."""

    def __init__(
        self,
        engine: AsyncLLM,
        front: Front,
        features: Features | None = None,
        kv: KeptMemory | None = None,
        seat: serving.ServingSeat | None = None,
        find_continuing: Callable[[dict[str, Any]], Continuing] = lambda identity: Continuing(),
    ) -> None:
        """`find_continuing` tells from the identity of the weights who may continue its streams."""
        self.is_parked = False  # ready to be woken, and idle until then
        self._engine, self._front = engine, front
        self._features = features or Features()
        self._find_continuing, self._continuing = find_continuing, Continuing()
        self._kv = kv or KeptMemory()
        self._seat = seat if self._features.has(SLEEP) else None
        self._placing = asyncio.Lock()  # held while ranks release their weights or map them again
        self._canaries = 0
        self._listening: OwnedFd | None = None
        self._trusting: asyncio.Task[None] | None = None

    async def prepare(self) -> PreparedMsg:
        """Try the engine once, then release its KV memory and stop its scheduler.

        Raises:
            UnderstudyError: the trial or a rank failed.
        """
        await self._front.warm_up()
        # A canary too, since vLLM compiles parts of it at first use (1.7 s on the CPU). On a GPU
        # the scratch memory behind the KV cache yields arbitrary tokens, so it is not judged there.
        found = await generate_one(self._engine, "understudy-trial")
        if found is not None and current_platform.is_cpu():
            raise UnderstudyError("vllm.trial_failed", f"the trial canary failed: {found}")
        statuses = await self._park()
        features, first = self._features, statuses[0]
        features.learn(statuses)
        self._continue_streams(first["identity"])
        if features.is_tested and (problem := await self._self_test()):
            why = f"the self-test on this device failed: {problem}"
            logger.warning("%s", why)
            for feature in PROVEN:
                features.lacks(feature, why)
            self._continue_streams(first["identity"])
        self._kv.problem = self._kv.problem or features.why_not[KEEP_KV]
        if not features.has(SLEEP):
            self._seat = None
        await asyncio.to_thread(process_memory.into_huge_pages)  # so that it dies sooner
        self.is_parked = True
        return PreparedMsg(
            weights_bytes=sum(status["weights_bytes"] for status in statuses),
            kv_bytes=sum(status["kv_bytes"] for status in statuses),
            epoch=first["epoch"],
            continuation=self._continuing.id,
            warnings=self._warnings(),
            can_rest=self._seat is not None,
            cannot_offload=features.why_not[OFFLOAD],
        )

    async def _park(self) -> Sequence[Answer]:
        await self._engine.sleep(level=1)
        return await self._ask_ranks("understudy_status", STATUS_WAIT_S)

    async def _self_test(self) -> str:
        """What is wrong, or nothing. An engine that dies in its test must not do so for ever."""
        failures = int(os.environ.get(FAILURES_ENV, "0"))
        if failures >= FAILURES_MAX:
            return f"the last {failures} launches ended before they were prepared"
        began_s = time.monotonic()
        take = partial(self._ask_ranks, "understudy_scratch", STATUS_WAIT_S)
        problem = await SelfTest(self._engine, self._park, take).run()
        took_s = time.monotonic() - began_s
        logger.info("the self-test took %.1f s: %s", took_s, problem or "passed")
        return problem

    def _continue_streams(self, identity: dict[str, Any]) -> None:
        """Or none, if it cannot resume."""
        can_resume = self._features.has(RESUME)
        self._continuing = self._find_continuing(identity) if can_resume else Continuing()
        self._engine.continuing = self._continuing

    async def wake(self, token: int, era: str, listening: OwnedFd) -> WokenMsg:
        """Take KV memory on all ranks. Keeps a copy of `listening`."""
        self.is_parked = False
        if self._seat is not None:
            self._seat.join(token)
            await self._ask_core("understudy_join", token)
        if is_private(listening):
            self._front.check_no_tls()
            self._front.traffic.door = self._make_door()
        self._listening = listening.duplicate()
        self._front.traffic.token = token
        await self._ask_ranks("understudy_join", WAKE_ASK_S, token)
        grant = (token, era) if self._kv.is_shared else ()
        wait_s = TAKE_S + TAKE_GRACE_S
        taken = await self._ask_ranks("understudy_take_kv", wait_s, TAKE_S, *grant)
        began = await self._kv.begin(self._engine, self._ask_ranks, taken)
        if await self._engine.wake_up() is False:  # 0.31 says nothing
            raise UnderstudyError("vllm.not_awake", "vLLM says that it is still asleep")
        return WokenMsg(GMS if self._kv.is_shared else OWN, *began)

    async def run_canary(self) -> CanaryMsg:
        """One real inference, judged by its numbers: damaged weights or memory yield NaN or a token
        outside the vocabulary."""
        self._canaries += 1
        found = await generate_one(self._engine, f"understudy-canary-{self._canaries}")
        if found is None:
            return CanaryMsg(True)
        await self._kv.judge(self._engine, f"a canary failed: {found}")
        try:
            await self._ask_ranks("understudy_distrust", DISTRUST_WAIT_S, found)
        except Exception as error:  # this incarnation is about to end in any case
            logger.warning("could not report the failed canary to every rank: %s", error)
        return CanaryMsg(False, found)

    async def serve(self) -> None:
        assert self._listening is not None
        listening, self._listening = self._listening, None
        await self._front.open(listening)
        # Not waited for: the core may be in the middle of a long step for the first clients.
        self._trusting = asyncio.create_task(self._kv.judge(self._engine))

    async def drain(self, budget_s: float, *, resume: bool = False) -> None:
        """Stop accepting, and finish requests on open connections within the budget."""
        self.is_parked = False
        if self._listening is not None:
            self._listening.close()
        await self._front.drain(budget_s, resume=resume)

    # ------------------------------------------------------------------ sleep

    async def rest(self, budget_s: float, *, keep_kv: bool) -> RestedMsg:
        """After a drain: give all KV memory back, and be as after `prepare`.

        Raises:
            UnderstudyError: a process is not parked, or requests are in progress: this incarnation
                must end.
        """
        self._listening = None  # closed by the drain, if it was never used
        if self._trusting is not None:
            self._trusting.cancel()
        await self._front.stop(budget_s / 2)
        is_idle = await self._is_idle_within(budget_s / 2)
        if keep_kv and is_idle:
            await self._kv.close(self._engine)
        await self._sleep(budget_s if is_idle else None)
        if self.in_flight:
            raise UnderstudyError(
                "vllm.rest_in_flight", f"vLLM sleeps with {self.in_flight} requests in progress"
            )
        # Before the ranks, who wait until the memory is free.
        await self._ask_core("understudy_leave")
        self._kv.renew()
        ranks = await self._ask_ranks("understudy_rest", REST_ASK_S, keep_kv)
        if self._seat is not None:
            self._seat.leave()  # this process accepts: the last to leave
        self.is_parked = True
        return RestedMsg(sum(int(rank["kv_resident_bytes"]) for rank in ranks))

    @property
    def in_flight(self) -> int:
        return int(self._engine.output_processor.get_num_unfinished_requests())

    async def _is_idle_within(self, budget_s: float) -> bool:
        """Whether the engine is done with the requests of connections that were closed."""
        end = time.monotonic() + budget_s
        while self.in_flight:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(COUNT_POLL_S)
        return True

    async def _sleep(self, wait_s: float | None) -> None:
        """Wait for requests that only the core knows of; None: abort those there are."""
        try:
            falling, is_done = None, False
            if wait_s is not None:
                falling = asyncio.ensure_future(self._engine.sleep(level=1, mode="wait"))
                is_done = bool((await asyncio.wait({falling}, timeout=wait_s))[0])
            async with asyncio.timeout(ABORT_S):
                if not is_done:  # their clients are gone, or have waited for the whole budget
                    logger.warning("aborting vLLM's remaining requests before sleep")
                    await self._engine.sleep(level=1, mode="abort")
                if falling is not None:
                    await falling
        except Exception as error:  # vLLM says whatever went wrong in the core as it likes
            raise UnderstudyError(
                "vllm.rest_failed", f"vLLM does not fall asleep: {type(error).__name__}: {error}"
            ) from error

    async def place_weights(self, budget_s: float, *, is_away: bool) -> WeightsPlacedMsg:
        """Have every rank release its weights, or map them again.

        Raises:
            UnderstudyError: a rank's own, or it does not answer: this incarnation must end.
        """
        async with self._placing:
            if not self.is_parked:  # woken meanwhile, which maps them
                return WeightsPlacedMsg(False)
            wait_s = budget_s + PLACE_GRACE_S
            ranks = await self._ask_ranks("understudy_place_weights", wait_s, is_away, budget_s)
            return WeightsPlacedMsg(
                all(rank["is_away"] for rank in ranks),
                sum(int(rank["freed_bytes"]) for rank in ranks),
                next((str(rank["note"]) for rank in ranks if rank["note"]), "")[:NOTE_CHARS_MAX],
            )

    # ------------------------------------------------------------------ behind a gateway

    def _make_door(self) -> Door:
        front, is_none = self._front, self._continuing.best is Continuation.NONE
        return Door(
            self._hello,
            has_parsers=front.has_parsers,
            keeps_responses=front.keeps_responses,
            responses=Continuation.NONE if front.keeps_responses or is_none else Continuation.STATE,
        )

    def _warnings(self) -> tuple[str, ...]:
        features, why_not = self._features, self._features.why_not
        said = {
            "streams end with this engine": why_not[RESUME],
            "it hands over by a relaunch and never sleeps": why_not[SLEEP],
        }
        return (*features.warnings, *(f"{what}: {why}" for what, why in said.items() if why))

    def _hello(self) -> Hello:
        front, can = self._front, self._continuing
        return Hello(
            engine=front.traffic.engine,
            token=front.traffic.token,
            continuation_id=can.id,
            continuation=can.best,
            body_bytes_max=front.body_max,
            models=front.models,
            problem=self._features.why_not[RESUME] or None,
            version=hop.VERSION,
            backend_version=vllm_version(),
            slots=self._engine.vllm_config.scheduler_config.max_num_seqs,
        )

    async def watch(self, on_dead: Callable[[UnderstudyError], None]) -> None:
        """Call `on_dead` once vLLM has failed."""
        checking = asyncio.create_task(self._check_while_parked(on_dead))
        while not (self._engine.errored or self._front.has_ended):  # noqa: ASYNC110 - vLLM's flags
            await asyncio.sleep(PARKED_PULSE_S if self.is_parked else PULSE_S)
        checking.cancel()
        what = "engine core failed" if self._engine.errored else "HTTP server ended"
        on_dead(UnderstudyError("vllm.dead", f"vLLM's {what}; its log has the reason"))

    async def _check_while_parked(self, on_dead: Callable[[UnderstudyError], None]) -> None:
        ranks = self._engine.vllm_config.parallel_config.world_size
        while True:
            await asyncio.sleep(PARKED_CHECK_S_PER_RANK * ranks)
            try:
                async with self._placing:  # ranks that place their weights take their time
                    if self.is_parked:
                        await self._ask_ranks("understudy_status", PARKED_WAIT_S)
            except UnderstudyError as error:
                on_dead(error)

    # ------------------------------------------------------------------ asking vLLM

    async def _ask_core(self, method: str, *asked: Any) -> None:
        """Call `method` (`core_serving.py`) in the engine core.

        Raises:
            UnderstudyError: the core's own; `vllm.silent`.
        """
        answer = await ask_core(self._engine, CORE_ASK_S, method, *asked)
        if answer["problem"]:
            raise UnderstudyError(answer["code"], f"the engine core: {answer['problem']}")

    async def _ask_ranks(self, method: str, timeout_s: float, *arguments: Any) -> Sequence[Answer]:
        """Call `method` on every rank.

        Raises:
            UnderstudyError: the error of the first rank that failed; `vllm.silent`, after which
                replies may be out of step, so this incarnation must end.
        """
        try:
            async with asyncio.timeout(timeout_s):
                # vLLM checks its own timeout in the core, which may be what has stopped.
                answers: Sequence[Answer] = await self._engine.collective_rpc(
                    method, timeout=timeout_s, args=arguments
                )
        except TimeoutError as error:
            raise UnderstudyError(
                "vllm.silent",
                f"vLLM did not answer {method} within {timeout_s:g} s: one of its processes hangs"
                " or is stopped",
            ) from error
        for answer in answers:
            if answer["problem"]:
                why = f"rank {answer['rank']}: {answer['problem']}"
                raise UnderstudyError(answer["code"], why, rank=answer["rank"])
        return answers


async def generate_one(engine: Any, request_id: str) -> str | None:
    """Generate one greedy token; what is wrong with it, or None."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0)
    last, config = None, engine.model_config
    prompt = {"prompt_token_ids": list(TRIAL_PROMPT[: max(1, config.max_model_len - 1)])}
    async for output in engine.generate(prompt, sampling, request_id):
        last = output
    made = last.outputs[0] if last is not None and last.outputs else None
    if made is None or len(made.token_ids) != 1 or not made.logprobs:
        return "no token was generated"
    token = made.token_ids[0]
    logprob = made.logprobs[0][token].logprob
    is_probability = config.logprobs_mode.endswith("logprobs")  # otherwise logits
    if not math.isfinite(logprob) or (is_probability and logprob > 0):
        return f"token {token} has a log-probability of {logprob}"
    if not 0 <= token < config.get_vocab_size():
        return f"token {token} is not in the vocabulary"
    return None


class StepCounter(StatLoggerBase):
    """Counts the steps of the engine core: progress, by which a hang is detected.

    A stat logger is called for every step, also for one that only prefills. vLLM calls its
    interface unstable, so the arguments are ignored. The count is on the page that the supervisor
    reads, too, whatever the channel's thread has to wait for.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def factory(self, vllm_config: Any, engine_index: int = 0) -> StepCounter:
        """`AsyncLLM` calls this to make its loggers; it gets this one."""
        return self

    def record(self, *args: Any, **kwargs: Any) -> None:
        self._counts.progress += 1

    def log_engine_initialized(self) -> None:
        pass
