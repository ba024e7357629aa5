"""Where one incarnation's weights are: on the device, or only in host memory.

Sends the backend's requests to release them, and repeats them while something prevents it: a copy
that is not made yet, or another engine that still maps them. Does not know the engine's state. Only
the tier that is shown waits for it, so what is in the way is a note.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine import messages
from engine.core import events as ev
from engine.core.events import EngineEvent, Failed
from engine.supervisor.channel import BackendChannel
from plumbing.service.events import EventLog
from plumbing.text import size

# A copy of the weights is made within seconds of the first load. Later, what is in the way may stay
# for hours, and vLLM's workers spin for a second after every question.
AGAIN_S_MIN = 1.0
AGAIN_S_MAX = 16.0


class Placing:
    """Of one incarnation; posts `WeightsPlaced`, and `Failed` when a budget is spent."""

    def __init__(
        self, channel: BackendChannel, *, post: Callable[[EngineEvent], None], log: EventLog
    ) -> None:
        self.note = ""  # why the weights are not away, or their memory is not free
        self._channel, self._post, self._log = channel, post, log
        self._is_away = False  # what is wanted
        self._budget_ms = 0
        self._again_s = AGAIN_S_MIN
        self._timer: asyncio.TimerHandle | None = None
        self._asked = 0  # which request the answer is awaited of

    def place(self, budget_ms: int, *, is_away: bool) -> None:
        """Ask, and ask again until the memory is free or something else is wanted."""
        self._budget_ms, self._is_away = budget_ms, is_away
        self._again_s = AGAIN_S_MIN
        self._ask()

    def stop(self) -> None:
        """The backend is woken or gone: it is asked no more."""
        self._is_away, self.note = False, ""
        self._asked += 1
        self._cancel()

    def _ask(self) -> None:
        self._cancel()
        self._asked += 1
        number = self._asked
        message = messages.PlaceWeightsMsg(self._is_away, self._budget_ms)
        reply = messages.WeightsPlacedMsg
        self._channel.ask(message, reply, lambda placed: self._placed(number, placed))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._budget_ms / 1000, self._spent)

    def _placed(self, number: int, placed: messages.WeightsPlacedMsg) -> None:
        if number == self._asked:
            self._cancel()
            self.note = placed.note if self._is_away else ""
        self._post(ev.WeightsPlaced(placed.is_away))  # which shows the note, too
        if number != self._asked:
            return
        if placed.freed_bytes:
            self._log.record(
                "engine.offloaded",
                f"{size(placed.freed_bytes)} of weights are offloaded to host memory",
                data={"freed_bytes": placed.freed_bytes},
            )
        if self.note:
            self._timer = asyncio.get_running_loop().call_later(self._again_s, self._ask)
            self._again_s = min(2 * self._again_s, AGAIN_S_MAX)

    def _spent(self) -> None:
        verb = "released" if self._is_away else "mapped again"
        why = f"the weights were not {verb} within {self._budget_ms / 1000:g} s"
        self._post(Failed("weights_not_placed", why))

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
