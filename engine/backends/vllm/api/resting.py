"""Sleep in place: a drained engine gives its KV memory back and stays ready to be woken; its
weights may be released, too.

Owns the order. No failed step is undone: the incarnation ends, and another is launched.

- A `sleep` that waits for requests is overtaken by one that aborts them, and never given up: it
  would come back, and take the memory from an engine that was woken meanwhile.
- A `sleep` that has returned does not prove that nothing is in progress, and a `wake_up` that says
  True does not prove that every rank is awake. So requests are counted and ranks are asked.
- The prefix cache must be reset, or later requests would read memory that is not theirs. Every
  level of `sleep` from 1 on does that. For a hand-over the index of the cache is closed before.

`Offloading` sends one request about the weights at a time, and no engine is woken without its
weights. It notes that a rank may be without them before it asks that rank to release them, so an
unanswered request counts as released.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.backends.vllm.api.http import Front
from engine.backends.vllm.api.kept_memory import KeptMemory
from engine.messages import WeightsPlacedMsg
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)

ABORT_S = 10.0  # for the step that is running
REST_ASK_S = 15.0  # a rank that does not answer this is hung
CORE_ASK_S = 15.0
COUNT_POLL_S = 0.001

AskRanks = Callable[..., Awaitable[Sequence[dict[str, Any]]]]


async def ask_core(engine: Any, method: str, *asked: Any) -> None:
    """Call `method` (`core_serving.py`) in the engine core.

    Raises:
        UnderstudyError: the core's own; `vllm.silent`.
    """
    try:
        async with asyncio.timeout(CORE_ASK_S):
            answer = await engine.engine_core.call_utility_async(method, *asked)
    except TimeoutError as error:
        raise UnderstudyError(
            "vllm.silent",
            f"vLLM's engine core did not answer {method} within {CORE_ASK_S:g} s: it hangs or is"
            " stopped",
        ) from error
    if answer["problem"]:
        raise UnderstudyError(answer["code"], f"the engine core: {answer['problem']}")


class Resting:
    """One rest of one engine."""

    def __init__(self, engine: Any, front: Front, kv: KeptMemory, ask_ranks: AskRanks) -> None:
        self._engine, self._front, self._kv = engine, front, kv
        self._ask_ranks = ask_ranks

    async def rest(self, budget_s: float, *, keep_kv: bool) -> int:
        """Returns the bytes of KV memory that are resident in any rank, which is 0.

        Raises:
            UnderstudyError: `vllm.rest_in_flight`, `vllm.not_parked`, `vllm.rest_failed`, or a
                rank's own.
        """
        await self._front.stop(budget_s / 2)
        is_idle = await self._is_idle_within(budget_s / 2)
        if keep_kv and is_idle:
            await self._kv.close(self._engine)
        await self._sleep(budget_s if is_idle else None)
        if self._in_flight:
            raise UnderstudyError(
                "vllm.rest_in_flight", f"vLLM sleeps with {self._in_flight} requests in progress"
            )
        # Before the ranks, who wait until the memory is free.
        await ask_core(self._engine, "understudy_leave")
        self._kv.renew()
        ranks = await self._ask_ranks("understudy_rest", REST_ASK_S, keep_kv)
        return sum(int(rank["kv_resident_bytes"]) for rank in ranks)

    @property
    def _in_flight(self) -> int:
        return int(self._engine.output_processor.get_num_unfinished_requests())

    async def _is_idle_within(self, budget_s: float) -> bool:
        """Whether the engine is done with the requests of connections that were closed."""
        loop = asyncio.get_running_loop()
        end = loop.time() + budget_s
        while self._in_flight:
            if loop.time() > end:
                return False
            await asyncio.sleep(COUNT_POLL_S)
        return True

    async def _sleep(self, wait_s: float | None) -> None:
        """Wait for requests that only the core knows of; None: abort those there are."""
        try:
            if wait_s is None:
                await self._abort()
                return
            falling = asyncio.ensure_future(self._engine.sleep(level=1, mode="wait"))
            done, _ = await asyncio.wait({falling}, timeout=wait_s)
            if not done:
                await self._abort()
            async with asyncio.timeout(ABORT_S):
                await falling
        except Exception as error:  # vLLM says whatever went wrong in the core as it likes
            raise UnderstudyError(
                "vllm.rest_failed", f"vLLM does not fall asleep: {type(error).__name__}: {error}"
            ) from error

    async def _abort(self) -> None:
        """Their clients are gone, or have waited for the whole budget."""
        logger.warning("aborting vLLM's remaining requests before sleep")
        async with asyncio.timeout(ABORT_S):
            await self._engine.sleep(level=1, mode="abort")


# Within the waking budget of 60 s, so that the reason is reported before the kill. Weights come
# back at some 2 GB a second.
RESTORE_S = 45.0
# Beyond what a rank itself waits for: the memory service frees 8 GiB a second, and a rank gives up
# waiting for that by itself.
GRACE_S = 15.0
NOTE_CHARS_MAX = 4096


class Offloading:
    """Of one engine. `lock` is held while its ranks let their weights go or map them again."""

    def __init__(self, ask_ranks: AskRanks) -> None:
        self.lock = asyncio.Lock()
        self._ask_ranks = ask_ranks
        self._may_be_away = False

    async def place(
        self, budget_s: float, *, is_away: bool, is_parked: Callable[[], bool]
    ) -> WeightsPlacedMsg:
        """Have every rank release its weights, or map them again.

        Raises:
            UnderstudyError: a rank's own, or it does not answer: this incarnation must end.
        """
        async with self.lock:
            if not is_parked():  # woken meanwhile, which has mapped them
                return WeightsPlacedMsg(False)
            return await (self._release() if is_away else self._restore(budget_s))

    async def restore(self) -> None:
        """Before a wake: map what a rank has released.

        Raises:
            UnderstudyError: as `place`.
        """
        if self._may_be_away:
            async with self.lock:  # a release may have been asked for a moment ago
                await self._restore(RESTORE_S)

    async def _release(self) -> WeightsPlacedMsg:
        self._may_be_away = True
        wait_s = RESTORE_S + GRACE_S
        ranks = await self._ask_ranks("understudy_place_weights", wait_s, True, RESTORE_S)
        is_away = [bool(rank["is_away"]) for rank in ranks]
        self._may_be_away = any(is_away)
        return WeightsPlacedMsg(
            all(is_away),
            sum(int(rank["freed_bytes"]) for rank in ranks),
            next((str(rank["note"]) for rank in ranks if rank["note"]), "")[:NOTE_CHARS_MAX],
        )

    async def _restore(self, budget_s: float) -> WeightsPlacedMsg:
        wait_s = budget_s + GRACE_S
        await self._ask_ranks("understudy_place_weights", wait_s, False, budget_s)
        self._may_be_away = False
        return WeightsPlacedMsg(False)
