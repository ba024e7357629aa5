"""The weights of all ranks: with them, or only in host memory.

Owns that one request about them is asked at a time, and that no engine is woken without its
weights. Surprising: whether a rank may be without them is noted before it is asked to let go, so a
question that was never answered counts as yes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.messages import WeightsPlacedMsg

# Within the waking budget of 60 s, so that the reason is reported before the kill. Weights come
# back at some 2 GB a second.
RESTORE_S = 45.0
# Beyond what a rank itself waits for: the memory service frees 8 GiB a second, and a rank gives up
# waiting for that by itself.
GRACE_S = 15.0
NOTE_CHARS_MAX = 4096

AskRanks = Callable[..., Awaitable[Sequence[dict[str, Any]]]]


class Offloading:
    """Of one engine. `lock` is held while its ranks let their weights go or map them again."""

    def __init__(self, ask_ranks: AskRanks, problem: str = "") -> None:
        """`problem`: why no rank can be without its weights, or nothing."""
        self.lock = asyncio.Lock()
        self._ask_ranks, self._problem = ask_ranks, problem
        self._may_be_away = False

    def problem_with(self, ranks: Sequence[dict[str, Any]]) -> str:
        """Why its weights cannot be released, from the status of all ranks; or nothing."""
        return next((why for each in ranks if (why := each["cannot_offload"])), self._problem)

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
