"""The gateway as one plain object: `handle` what happens, perform what it returns.

It is told the time and opens nothing. The bytes of streams go through `attempts[n]` instead
(`client_request.py`), whose effects, rare as they are, wait in `outbox`.

Here is what a new grant means, and whose turn it is. A newer grant ends every attempt of the older
one at once, whatever these connections still have to say, and every request that the old engine had
scheduled when it died is charged with that death (`queue.py`).

While the engine rests, the shell shuts the door: requests wait, and the machine reports the first
one to the shell. An engine that wakes under the same grant is greeted anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

import msgspec

from gateway.core import answers
from gateway.core import events as ev
from gateway.core.client_request import Attempt, ClientRequest, RequestState
from gateway.core.events import BreakCause, GatewayEffect, GatewayEvent, GatewayRules
from gateway.core.queue import EXPECTED_MS
from gateway.core.requests import Requests, Shared, objection
from gateway.core.target import GREET_AGAIN_MS, LaneTarget, Numbers
from plumbing.gateway_protocol import HOP_PATHS

TICK_MS = 20.0  # a tenth of the shortest wait here, 200 ms


class Stats(msgspec.Struct, frozen=True):
    """What there is now."""

    by_state: Counter[str]  # requests, by `RequestState`
    suspects: int
    oldest_paused_ms: float  # 0 if no stream is paused


def stats_of(requests: Iterable[ClientRequest], now_ms: float) -> Stats:
    found = list(requests)
    paused = [each.paused_since_ms for each in found if each.paused_since_ms is not None]
    return Stats(
        Counter(str(each.state) for each in found),
        sum(each.is_suspect for each in found),
        now_ms - min(paused) if paused else 0.0,
    )


class Gateway(Requests):
    """All requests of one gateway; in a pool, those for one model (`lanes.py`)."""

    def __init__(
        self, rules: GatewayRules, shared: Shared | None = None, lane: int = 0, step: int = 1
    ) -> None:
        super().__init__(rules, shared or Shared(rules.memory_bytes_max), Numbers(lane, step))
        self.target = LaneTarget(Numbers(lane, step))
        self.sleep_door = ev.DoorSet(0)
        self._is_final = False  # no engine will be granted any more
        self._expected: dict[tuple[str, int], float] = {}  # engine and token → until when
        self._is_wanted = False  # the shell knows that a request waits behind this door
        self._now_ms = self._ticked_ms = 0.0
        self._is_busy = False

    def handle(self, event: GatewayEvent, now_ms: float) -> Sequence[GatewayEffect]:
        """What follows from `event`, with all that was in the outbox.

        Events about attempts, requests and greetings that are over are ignored.
        """
        self._now_ms = now_ms
        self._is_busy = True
        self._happened(event, now_ms)
        self._is_busy = False
        self.look()
        return self.shared.take()

    def _happened(self, event: GatewayEvent, now_ms: float) -> None:
        match event:
            case ev.RequestCame():
                self._came(event, now_ms)
            case ev.ClientLeft():
                if (request := self.requests.get(event.request)) is not None:
                    self.left(request)
            case ev.EngineGranted():
                self._granted(event, now_ms)
            case ev.DeathExpected():
                self._expected = {(event.engine, event.token): now_ms + EXPECTED_MS}
            case ev.NobodyGranted():
                self.target.lose(event.reason, now_ms)
                self._is_final = event.is_final
            case ev.GatewayEnds():
                self.target.lose("its drain timeout has passed", now_ms)
                self._is_final = True
                self._supersede(is_death=False, now_ms=now_ms)
            case ev.DoorSet():
                self._set_door(event, now_ms)
            case ev.HelloCame():
                self.target.greeted(event, now_ms + self._greet_again_ms)
            case ev.Tick():
                self._pass_time(now_ms)
            case ev.HeadCame():
                if (attempt := self.attempts.get(event.attempt)) is not None:
                    self.head(attempt, event, now_ms)
            case ev.AnswerEnded():
                if (attempt := self.attempts.get(event.attempt)) is not None:
                    self._ended(attempt, event.cause, now_ms)

    def _ended(self, attempt: Attempt, cause: BreakCause | None, now_ms: float) -> None:
        if cause is None:
            self.answered(attempt, now_ms)
        elif cause is BreakCause.UNREACHED:
            self.refused(attempt, now_ms)
        else:
            self.broke(attempt, cause, now_ms)

    @property
    def needs_ticks(self) -> bool:
        """Whether anything waits for time to pass."""
        is_waiting = bool(self.queue.waiting) or self.queue.on_trial is not None
        return is_waiting or self.target.greet_at_ms is not None

    def stats(self, now_ms: float) -> Stats:
        """What there is now."""
        return stats_of(self.requests.values(), now_ms)

    @property
    def waits_for(self) -> str:
        """What a request waits for now, "" if only for its turn."""
        if self.target.is_granted and self.sleep_door.is_shut:
            return self.sleep_door.reason
        return self.target.waits_for

    # ------------------------------------------------------------------ whose turn it is

    def _came(self, came: ev.RequestCame, now_ms: float) -> None:
        request = self.add(came, now_ms)
        if came.path.startswith(HOP_PATHS):
            self.fail(request, answers.NOT_FOUND)
        elif request.is_lean and (self.waits_for or len(self.queue.waiting) > 1):
            self.fail(request, answers.NO_MEMORY)

    def look(self) -> None:
        if self._is_final and not self._is_busy:
            self._is_busy = True
            for request in list(self.queue.waiting.values()):  # no engine will take it
                self.fail(request, answers.ending())
            self._is_busy = False
        target = self.target
        if self._is_busy or not target.is_granted:
            return
        if not self.queue.waiting:  # nearly always, and looked at four times a request
            return
        if not self._may_send() or target.hello is None or target.grant is None:
            return
        self._is_busy = True
        for request in self.queue.due(lambda: self.resuming, lambda: self._company, self._now_ms):
            if not self._has_room:
                break
            failure = objection(request, target.hello)
            if failure is not None:
                self.fail(request, failure)
            else:
                self.send(request, target.grant.token, target.hello, self._now_ms)
        self._is_busy = False

    @property
    def _company(self) -> int:
        """New requests that an engine has."""
        return sum(not each.owner.has_broken for each in self.attempts.values())

    def _may_send(self) -> bool:
        """Whether the door is open. `WantEngine` reports the first request behind it."""
        if self.sleep_door.is_shut and not self._is_wanted:
            self._is_wanted = True
            self.outbox.append(ev.WantEngine())
        return not self.sleep_door.is_shut

    @property
    def _has_room(self) -> bool:
        """Whether the engine takes one more request."""
        return True

    # ------------------------------------------------------------------ who is active

    def _granted(self, grant: ev.EngineGranted, now_ms: float) -> None:
        old = self.target.grant
        is_another = self.target.take(grant, now_ms)
        self._is_final = self._is_final and self.target.grant is not grant
        if not is_another:
            return
        expected_ms = self._expected.get((old.engine, old.token), 0.0) if old is not None else 0.0
        is_death = old is not None and now_ms >= expected_ms
        self._supersede(is_death=is_death, now_ms=now_ms, queued=grant.queued)
        self._meet(grant)

    def _meet(self, grant: ev.EngineGranted) -> None:
        """Another engine stands here now."""
        self.sleep_door, self._is_wanted = ev.DoorSet(grant.token), False
        self._greet()

    def _set_door(self, door: ev.DoorSet, now_ms: float) -> None:
        if self.target.grant is None or door.token != self.target.grant.token:
            return  # of an engine that does not hold the lock any more
        old, self.sleep_door = self.sleep_door, door
        if door.is_shut is old.is_shut:
            return  # only the reason
        self._is_wanted = False
        if door.is_shut:
            self.target.part()
        else:
            for request in self.queue.waiting.values():
                request.waits_anew(now_ms)  # for a wake
            self._begin_anew(is_death=False, now_ms=now_ms)  # while it rests nothing is in it
            self._greet()

    def _supersede(self, *, is_death: bool, now_ms: float, queued: Set[int] = frozenset()) -> None:
        """No engine of an older grant says anything any more."""
        for attempt in list(self.attempts.values()):
            self.broke(attempt, BreakCause.SUPERSEDED, now_ms)
        self._begin_anew(is_death=is_death, now_ms=now_ms, queued=queued)

    def _begin_anew(self, *, is_death: bool, now_ms: float, queued: Set[int] = frozenset()) -> None:
        """What broke off before says nothing about the engine that gets requests now."""
        waiting = self.queue.waiting
        if is_death:
            for request in [each for each in waiting.values() if each.is_inside]:
                if request.entered_as not in queued:
                    self._died(request, now_ms)
        for request in waiting.values():
            request.breaks_here = request.refusals = 0
            request.gives_up_ms, request.not_before_ms = None, now_ms
            request.is_inside = request.is_handed_over = False
        self.queue.queue_again()

    def _died(self, request: ClientRequest, now_ms: float) -> None:
        """An engine that had this request is dead."""
        request.died(now_ms)
        if not request.is_suspect:
            self.queue.end_trial(request)
        elif self.queue.on_trial is request or request.was_tried:
            self.queue.clear_waiting(request)
            self.fail(request, answers.suspect(request.deaths))
        else:
            self.outbox.append(ev.SuspectFound(request.number, request.deaths))

    def _greet(self) -> None:
        self.outbox.append(self.target.greet())

    # ------------------------------------------------------------------ time

    @property
    def _greet_again_ms(self) -> float:
        return GREET_AGAIN_MS

    def _is_overdue(self, request: ClientRequest, now_ms: float) -> bool:
        """Whether it has waited long enough for an engine that can serve it. One that sleeps and
        will wake is none that is missing, so that time counts from when the door opens."""
        hold_ms, park_ms = self.rules.hold_ms, self.rules.park_timeout_ms
        door = self.sleep_door
        is_resting = self.target.is_granted and door.is_shut and door.does_open
        return request.held_ms >= (max(hold_ms, park_ms) if is_resting else hold_ms)

    @property
    def _no_engine(self) -> answers.Failure:
        if self.target.is_granted and self.sleep_door.is_shut and not self.sleep_door.does_open:
            return answers.resting(self.sleep_door.reason)
        return answers.no_engine(self.waits_for)

    def _pass_time(self, now_ms: float) -> None:
        """End what has waited too long; greet again; clear a held answer that lives on."""
        target, trial = self.target, self.queue.on_trial
        greet_at_ms = target.greet_at_ms
        if greet_at_ms is not None and now_ms >= greet_at_ms and target.is_granted:
            self._greet()
        if trial is not None and trial.made_progress(now_ms):
            self.progressed(trial)
        self.queue.limit_trial(now_ms)
        passed_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        keeps_breaking = answers.keeps_breaking(target.grant.engine if target.grant else "")
        for request in list(self.queue.waiting.values()):
            is_given_up = request.gives_up_ms is not None
            if request.state is RequestState.WAITING:
                # An engine that refuses it, or breaks it off each time, cannot serve it.
                if self.waits_for or is_given_up or request.refusals:
                    request.held_ms += min(passed_ms, now_ms - request.waits_since_ms)
                if self._is_overdue(request, now_ms):
                    self.fail(request, keeps_breaking if is_given_up else self._no_engine)
            elif now_ms - (request.paused_since_ms or 0.0) >= self.rules.park_timeout_ms:
                timeout_s = self.rules.park_timeout_ms / 1000
                self.fail(request, answers.park_timeout(timeout_s, self.waits_for))
            elif request.gives_up_ms is not None and now_ms >= request.gives_up_ms:
                self.fail(request, keeps_breaking, event=request.engine_error)
