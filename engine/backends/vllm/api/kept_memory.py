"""In the API process: whose memory the KV cache is in, and what its blocks are worth to others.

Owns `--kv-memory`, `--no-kv-adoption`, and what a wake does beyond taking memory: the engine core
is asked to adopt and to keep the index, and where it cannot, the workers make the index say
nothing. One of the two must succeed: an engine that writes over blocks which an index still
describes would give its successor wrong tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from engine.backends.vllm.membership import FAILED, Answer

logger = logging.getLogger(__name__)

GMS: Literal["gms"] = "gms"
OWN: Literal["private"] = "private"
# Its workers have borrowed the same pools a moment ago, so that the core waits for nothing.
BEGIN_WAIT_S = 10.0
JUDGE_WAIT_S = 5.0
CLOSE_WAIT_S = 5.0  # the core is idle then

AskRanks = Callable[..., Awaitable[Sequence[Answer]]]


class KeptMemory:
    """`is_shared`: it is the memory service's, or else private. `problem`: why nothing is
    published."""

    def __init__(
        self, problem: str = "", *, is_shared: bool = False, may_adopt: bool = True
    ) -> None:
        self.problem, self.is_shared, self._may_adopt = problem, is_shared, may_adopt
        self.renew()

    async def begin(self, engine: Any, ask: AskRanks, taken: Sequence[Answer]) -> tuple[int, str]:
        """After the memory was taken and before the first step: how many blocks were adopted, or
        why none.

        Raises:
            UnderstudyError: neither is the index kept, nor can it be made to say nothing.
        """
        if not self.is_shared:
            return 0, ""
        answer: Answer = {"problem": self.problem}
        if not self.problem:
            asked = {
                "deadline_s": BEGIN_WAIT_S,
                "may_adopt": self._may_adopt,
                "ranks": [rank["pool"] for rank in taken],
            }
            answer = await ask_core(engine, 2 * BEGIN_WAIT_S, "understudy_begin_kv", asked)
        if answer["problem"]:
            await ask("understudy_forget_kv", BEGIN_WAIT_S)
            logger.warning("no KV block is published: %s", answer["problem"])
            return 0, f"no block is published: {answer['problem']}"
        self._is_kept = True
        adopted, why_empty = int(answer["adopted"]), str(answer["why_empty"])
        logger.info("adopted %d KV blocks %s", adopted, why_empty and f"({why_empty})")
        return adopted, why_empty and f"no block was adopted: {why_empty}"

    async def judge(self, engine: Any, why: str = "") -> None:
        """The canary has passed, or `why` the content is not to be trusted. Never raises."""
        if not self._is_kept:
            return
        problem = (await ask_core(engine, JUDGE_WAIT_S, "understudy_judge_kv", why))["problem"]
        if problem:
            logger.warning("the verdict on the KV blocks was not recorded: %s", problem)

    async def close(self, engine: Any) -> None:
        """Before vLLM resets its prefix cache: what was published stays for the next engine. Where
        it cannot, nothing does, for the reset clears the index that is kept."""
        if not self._is_kept:
            return
        await self.judge(engine)  # an adoption that is not judged counts as one that has failed
        problem = (await ask_core(engine, CLOSE_WAIT_S, "understudy_close_kv"))["problem"]
        if problem:
            logger.warning("the next engine finds no KV block of this one: %s", problem)

    def renew(self) -> None:
        """Once the engine core maps nothing any more: all is as before the wake."""
        self._is_kept = False


async def ask_core(engine: Any, wait_s: float, method: str, *asked: Any) -> Answer:
    """Call `method` in the engine core. Never raises: vLLM says whatever went wrong there as it
    likes."""
    try:
        async with asyncio.timeout(wait_s):
            answer: Answer = await engine.engine_core.call_utility_async(method, *asked)
    except TimeoutError:
        why = f"it did not answer {method} within {wait_s:g} s: it hangs or is stopped"
        return {"code": "vllm.silent", "problem": why}
    except Exception as error:
        return {"code": FAILED, "problem": f"{type(error).__name__}: {error}"}
    return answer
