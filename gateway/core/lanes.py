"""All lanes of one child in a pool; to the shell it is what a single `Gateway` is without one.

A request's lane is found once, by its model. From then on the lane follows from the numbers of the
request's attempts, and bytes go to the attempt itself, so an event costs what it costs without a
pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gateway.core import events as ev
from gateway.core.attempt import Attempt
from gateway.core.census import Census, Totals
from gateway.core.commons import Commons
from gateway.core.events import GatewayEffect, GatewayEvent, GatewayRules
from gateway.core.lane import Lane
from gateway.core.lane_events import QUEUE_MAX, LaneDoorSet, LaneRules
from plumbing.gateway_protocol import Hello
from pool.core.events import ModelDemand


class Lanes:
    """`by_model`: in the order in which they were named."""

    def __init__(
        self, rules: GatewayRules, models: Mapping[str, LaneRules], queue_max: int = QUEUE_MAX
    ) -> None:
        self._commons = Commons()
        self._queue_max = queue_max
        self.by_model = {
            model: Lane(
                model,
                rules,
                lane_rules,
                commons=self._commons,
                place=place,
                step=len(models),
                is_full=self._is_full,
            )
            for place, (model, lane_rules) in enumerate(models.items())
        }
        self._lanes = tuple(self.by_model.values())
        self._live: dict[Lane, None] = {}  # those that time may mean something to

    @property
    def hello(self) -> Hello | None:
        """Of no engine: whose body it is that comes is known once it is whole."""
        return None

    @property
    def outbox(self) -> Sequence[GatewayEffect]:
        """What is to be performed; the same object at all times."""
        return self._commons.outbox

    @property
    def totals(self) -> Totals:
        return self._commons.totals

    def attempt(self, number: int) -> Attempt:
        return self._lane_of(number).attempt(number)

    def take(self) -> Sequence[GatewayEffect]:
        """The effects in the outbox, which is empty then."""
        found = self._commons.outbox.copy()
        self._commons.outbox.clear()
        return found

    def handle(self, event: GatewayEvent, now_ms: float) -> Sequence[GatewayEffect]:
        """What follows from `event`, with all that was in the outbox. What is about a model that is
        not here is ignored."""
        lane: Lane | None
        match event:
            case ev.HeadCame() | ev.AnswerCame() | ev.AnswerBroke() | ev.ConnectFailed():
                lane = self._lane_of(event.attempt)
            case ev.HelloCame() | ev.HelloFailed():
                lane = self._lane_of(event.greeting)
            case (
                ev.RequestCame()
                | ev.ClientLeft()
                | ev.EngineGranted()
                | ev.NobodyGranted()
                | ev.DeathExpected()
                | LaneDoorSet()
            ):
                lane = self.by_model.get(event.model)
            case ev.GatewayEnds():
                return self._tell_all(event, now_ms, self._lanes)
            case _:
                return self._tell_all(event, now_ms, tuple(self._live))
        if lane is None:
            return self.take()
        self._live[lane] = None
        return lane.handle(event, now_ms)

    @property
    def needs_ticks(self) -> bool:
        """Whether anything waits for time to pass."""
        for lane in tuple(self._live):
            if lane.needs_ticks:
                return True
            if lane.is_idle:
                del self._live[lane]
        return False

    def demand(self, now_ms: float) -> dict[str, ModelDemand]:
        """All that the pool needs to know, by model."""
        return {model: lane.demand(now_ms) for model, lane in self.by_model.items()}

    def census(self, now_ms: float) -> Census:
        """What there is now in all lanes; no engine is named."""
        found = [lane.census(now_ms) for lane in self._lanes]
        by_state: Counter[str] = Counter()
        for each in found:
            by_state.update(each.by_state)
        return Census(
            by_state=dict(by_state),
            memory_bytes=self._commons.memory_bytes,
            suspects=sum(each.suspects for each in found),
            oldest_paused_ms=max((each.oldest_paused_ms for each in found), default=0.0),
            engine="",
            token=0,
            waits_for="",
        )

    # ------------------------------------------------------------------ inside

    def _lane_of(self, number: int) -> Lane:
        """Of an attempt or a greeting."""
        return self._lanes[number % len(self._lanes)]

    def _is_full(self) -> bool:
        return sum(lane.queued for lane in self._lanes) > self._queue_max

    def _tell_all(
        self, event: GatewayEvent, now_ms: float, lanes: Sequence[Lane]
    ) -> Sequence[GatewayEffect]:
        effects: list[GatewayEffect] = []
        for lane in lanes:
            effects += lane.handle(event, now_ms)
        return effects
