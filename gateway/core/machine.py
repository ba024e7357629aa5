"""The gateway as one plain object: `handle` what happens, perform what it returns.

It is told the time and opens nothing. The bytes of streams go through `attempts[n]` instead
(`hot_path.py`), whose effects, rare as they are, wait in `outbox`.

Here is who is active, and what a new grant means. The lock server says whom it has granted; that
engine is greeted, and gets no request before it has answered: its hello says what it can continue
and how large a body it takes. A newer grant ends every attempt of the older one at once, whatever
these connections still have to say, and every request that the old engine had scheduled when it
died is charged with that death (`queue.py`). Tokens compare within an era only.

While the engine rests, the shell shuts the door: requests wait, and the machine
reports the first one to the shell. An engine that wakes under the same grant is greeted anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from gateway.core import answers
from gateway.core import events as ev
from gateway.core.attempts import Attempts, objection
from gateway.core.client_request import ClientRequest, RequestState
from gateway.core.events import BreakCause, GatewayEffect, GatewayEvent, GatewayRules
from gateway.core.hot_path import Attempt
from gateway.core.queue import EXPECTED_MS
from gateway.core.requests import Requests
from gateway.core.shared import Numbers, Shared, Stats
from plumbing.gateway_protocol import HOP_PATHS, Hello

TICK_MS = 20.0  # a tenth of the shortest wait here, 200 ms
GREET_AGAIN_MS = 50.0  # an engine that is granted answers within milliseconds of serving


class Gateway:
    """All requests of one gateway; in a pool, those for one model (`lanes.py`)."""

    def __init__(
        self, rules: GatewayRules, shared: Shared | None = None, lane: int = 0, step: int = 1
    ) -> None:
        self.rules = rules
        self.shared = shared or Shared(rules.memory_bytes_max)
        self.hello: Hello | None = None  # of the engine that is granted now
        self._requests = Requests(rules, self._look, self.shared)
        self._attempts = Attempts(self._requests, Numbers(lane, step))
        self._grant: ev.EngineGranted | None = None  # the newest
        self._is_granted = False  # nobody has lost it since
        self._is_final = False  # and no engine will be granted any more
        self._expected: dict[tuple[str, int], float] = {}  # engine and token → until when
        self._reason = "the lock server has not reported yet which engine is active"
        self._greetings = Numbers(lane, step)
        self._greet_ms: float | None = None  # when to greet again,
        self._no_hello = ""  # and why
        self._door = ev.DoorSet(0)
        self._is_wanted = False  # the shell knows that a request waits behind this door
        self._now_ms = self._ticked_ms = 0.0
        self._is_busy = False

    @property
    def attempts(self) -> dict[int, Attempt]:
        """Those that are not over."""
        return self._requests.attempts

    def attempt(self, number: int) -> Attempt:
        return self._requests.attempts[number]

    @property
    def outbox(self) -> Sequence[GatewayEffect]:
        """What is to be performed; the same object at all times."""
        return self._requests.outbox

    def take(self) -> Sequence[GatewayEffect]:
        """The effects in the outbox, which is empty then."""
        found = self._requests.outbox.copy()
        self._requests.outbox.clear()
        return found

    def handle(self, event: GatewayEvent, now_ms: float) -> Sequence[GatewayEffect]:
        """What follows from `event`, with all that was in the outbox.

        Events about attempts, requests and greetings that are over are ignored.
        """
        self._now_ms = now_ms
        self._is_busy = True
        self._happened(event, now_ms)
        self._is_busy = False
        self._look()
        return self.take()

    def _happened(self, event: GatewayEvent, now_ms: float) -> None:
        match event:
            case ev.RequestCame():
                self._came(event, now_ms)
            case ev.ClientLeft():
                if (request := self._requests.all.get(event.request)) is not None:
                    self._requests.left(request)
            case ev.EngineGranted():
                self._granted(event, now_ms)
            case ev.DeathExpected():
                self._expected = {(event.engine, event.token): now_ms + EXPECTED_MS}
            case ev.NobodyGranted():
                self._is_granted, self._reason = False, event.reason
                self._is_final = event.is_final
            case ev.GatewayEnds():
                self._is_granted, self._is_final = False, True
                self._reason = "its drain timeout has passed"
                self._supersede(is_death=False, now_ms=now_ms)
            case ev.DoorSet():
                self._set_door(event, now_ms)
            case ev.HelloCame() | ev.HelloFailed():
                self._greeted(event, now_ms)
            case ev.Tick():
                self._pass_time(now_ms)
            case _:
                self._attempted(event, now_ms)

    @property
    def needs_ticks(self) -> bool:
        """Whether anything waits for time to pass."""
        line = self._requests.queue
        return bool(line.waiting) or line.on_trial is not None or self._greet_ms is not None

    def stats(self, now_ms: float) -> Stats:
        """What there is now."""
        requests = self._requests.all.values()
        paused = [each.paused_since_ms for each in requests if each.paused_since_ms is not None]
        return Stats(
            by_state=dict(Counter(str(each.state) for each in requests)),
            memory_bytes=self._requests.memory_bytes,
            suspects=sum(each.is_suspect for each in requests),
            oldest_paused_ms=now_ms - min(paused) if paused else 0.0,
            engine=self._grant.engine if self._grant and self._is_granted else "",
            token=self._grant.token if self._grant and self._is_granted else 0,
            waits_for=self._waits_for,
        )

    @property
    def _waits_for(self) -> str:
        """What a request waits for now, "" if only for its turn."""
        if self._grant is None or not self._is_granted:
            return self._reason
        if self._door.is_shut:
            return self._door.reason
        if self.hello is not None:
            return ""
        why = f" ({self._no_hello})" if self._no_hello else ""
        return f"waiting for {self._grant.engine} to answer{why}"

    # ---- requests

    def _came(self, came: ev.RequestCame, now_ms: float) -> None:
        request = self._requests.add(came, now_ms)
        if came.path.startswith(HOP_PATHS):
            self._requests.fail(request, answers.NOT_FOUND)
        elif request.is_lean and (self._waits_for or len(self._requests.queue.waiting) > 1):
            self._requests.fail(request, answers.NO_MEMORY)

    def _attempted(self, event: GatewayEvent, now_ms: float) -> None:
        """Something about one attempt."""
        assert isinstance(event, (ev.HeadCame, ev.AnswerCame, ev.AnswerBroke, ev.ConnectFailed))
        attempt = self._requests.attempts.get(event.attempt)
        if attempt is None:
            return
        match event:
            case ev.HeadCame():
                self._attempts.head(attempt, event, now_ms)
            case ev.AnswerCame():
                self._attempts.answered(attempt, now_ms)
            case ev.AnswerBroke():
                self._attempts.broke(attempt, event.cause, now_ms)
            case ev.ConnectFailed():
                self._attempts.refused(attempt, now_ms)

    def _look(self) -> None:
        """Ask the engine for every request whose turn it is."""
        if self._is_final and not self._is_busy:
            self._is_busy = True
            self._requests.fail_waiting(answers.ending())
            self._is_busy = False
        if self._is_busy or not self._is_granted or self._grant is None:
            return
        if not self._requests.queue.waiting:  # nearly always, and looked at four times a request
            return
        if not self._may_send() or self.hello is None:
            return
        self._is_busy = True
        requests = self._requests
        for request in requests.queue.due(
            lambda: requests.resuming, lambda: requests.company, self._now_ms
        ):
            if not self._has_room:
                break
            failure = objection(request, self.hello)
            if failure is not None:
                self._requests.fail(request, failure)
            else:
                self._attempts.send(request, self._grant.token, self.hello, self._now_ms)
        self._is_busy = False

    def _may_send(self) -> bool:
        """Whether the door is open. `WantEngine` reports the first request behind it."""
        if self._door.is_shut and not self._is_wanted:
            self._is_wanted = True
            self._requests.outbox.append(ev.WantEngine())
        return not self._door.is_shut

    @property
    def _has_room(self) -> bool:
        """Whether the engine takes one more request."""
        return True

    # ---- who is active

    def _granted(self, grant: ev.EngineGranted, now_ms: float) -> None:
        old = self._grant
        if old is not None and old.era == grant.era and grant.token < old.token:
            return  # late
        self._grant, self._is_granted, self._is_final = grant, True, False
        if old is not None and (old.engine, old.token) == (grant.engine, grant.token):
            return  # said again, or by a lock server that has lost its file and was told of it
        expected_ms = self._expected.get((old.engine, old.token), 0.0) if old is not None else 0.0
        is_death = old is not None and now_ms >= expected_ms
        self._supersede(is_death=is_death, now_ms=now_ms, queued=grant.queued)
        self.hello = None
        self._meet(grant, now_ms)

    def _meet(self, grant: ev.EngineGranted, now_ms: float) -> None:
        """Another engine stands here now."""
        self._door, self._is_wanted = ev.DoorSet(grant.token), False
        self._greet(now_ms)

    def _set_door(self, door: ev.DoorSet, now_ms: float) -> None:
        if self._grant is None or door.token != self._grant.token:
            return  # of an engine that does not hold the lock any more
        old, self._door = self._door, door
        if door.is_shut is old.is_shut:
            return  # only the reason
        self._is_wanted = False
        if door.is_shut:
            self._part()
        else:
            for request in self._requests.queue.waiting.values():
                request.waits_anew(now_ms)  # for a wake
            self._begin_anew(is_death=False, now_ms=now_ms)  # while it rests nothing is in it
            self._greet(now_ms)

    def _part(self) -> None:
        """The engine must be greeted anew before it gets a request."""
        self.hello, self._greet_ms = None, None
        self._greetings.next()  # what an earlier greeting brings is about the past

    def _supersede(self, *, is_death: bool, now_ms: float, queued: Set[int] = frozenset()) -> None:
        """No engine of an older grant says anything any more."""
        for attempt in list(self._requests.attempts.values()):
            self._attempts.broke(attempt, BreakCause.SUPERSEDED, now_ms)
        self._begin_anew(is_death=is_death, now_ms=now_ms, queued=queued)

    def _begin_anew(self, *, is_death: bool, now_ms: float, queued: Set[int] = frozenset()) -> None:
        """What broke off before says nothing about the engine that gets requests now."""
        waiting = self._requests.queue.waiting
        if is_death:
            for request in [each for each in waiting.values() if each.is_inside]:
                if request.entered_as not in queued:
                    self._died(request, now_ms)
        for request in waiting.values():
            request.breaks_here = request.refusals = 0
            request.gives_up_ms, request.not_before_ms = None, now_ms
            request.is_inside = request.is_handed_over = False
        self._requests.queue.queue_again()

    def _died(self, request: ClientRequest, now_ms: float) -> None:
        """An engine that had this request is dead."""
        request.died(now_ms)
        if not request.is_suspect:
            self._requests.queue.end_trial(request)
        elif self._requests.queue.on_trial is request or request.was_tried:
            self._requests.queue.clear_waiting(request)
            self._requests.fail(request, answers.suspect(request.deaths))
        else:
            self._requests.outbox.append(ev.SuspectFound(request.number, request.deaths))

    def _greet(self, now_ms: float) -> None:
        assert self._grant is not None
        self._greet_ms = None
        self._requests.outbox.append(
            ev.GreetEngine(self._greetings.next(), self._grant.engine, self._grant.token)
        )

    def _greeted(self, event: ev.HelloCame | ev.HelloFailed, now_ms: float) -> None:
        if event.greeting != self._greetings.last or self._grant is None:
            return
        if isinstance(event, ev.HelloCame):
            hello = event.hello
            if (hello.engine, hello.token) == (self._grant.engine, self._grant.token):
                self.hello, self._no_hello = hello.as_understood(), ""
                return
            self._no_hello = f"{hello.engine} answered, under token {hello.token}"
        else:
            self._no_hello = event.reason
        self._greet_ms = now_ms + self._greet_again_ms

    # ---- time

    @property
    def _greet_again_ms(self) -> float:
        return GREET_AGAIN_MS

    def _is_overdue(self, request: ClientRequest, now_ms: float) -> bool:
        """Whether it has waited long enough for an engine that can serve it. One that sleeps and
        will wake is none that is missing, so that time counts from when the door opens."""
        hold_ms, park_ms = self.rules.hold_ms, self.rules.park_timeout_ms
        is_resting = self._is_granted and self._door.is_shut and self._door.does_open
        limit_ms = max(hold_ms, park_ms) if is_resting else hold_ms
        return request.held_ms >= limit_ms

    @property
    def _no_engine(self) -> answers.Failure:
        if self._is_granted and self._door.is_shut and not self._door.does_open:
            return answers.resting(self._door.reason)
        return answers.no_engine(self._waits_for)

    def _pass_time(self, now_ms: float) -> None:
        """End what has waited too long; greet again; clear a held answer that lives on."""
        if self._greet_ms is not None and now_ms >= self._greet_ms and self._is_granted:
            self._greet(now_ms)
        self._attempts.look_at_trial(now_ms)
        passed_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        keeps_breaking = answers.keeps_breaking(self._grant.engine if self._grant else "")
        for request in list(self._requests.queue.waiting.values()):
            is_given_up = request.gives_up_ms is not None
            if request.state is RequestState.WAITING:
                # An engine that refuses it, or breaks it off each time, cannot serve it.
                if self._waits_for or is_given_up or request.refusals:
                    request.held_ms += min(passed_ms, now_ms - request.waits_since_ms)
                if self._is_overdue(request, now_ms):
                    self._requests.fail(request, keeps_breaking if is_given_up else self._no_engine)
            elif now_ms - (request.paused_since_ms or 0.0) >= self.rules.park_timeout_ms:
                timeout_s = self.rules.park_timeout_ms / 1000
                self._requests.fail(request, answers.park_timeout(timeout_s, self._waits_for))
            elif request.gives_up_ms is not None and now_ms >= request.gives_up_ms:
                self._requests.fail(request, keeps_breaking, event=request.engine_error)
