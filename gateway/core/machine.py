"""The gateway as one plain object: `handle` what happens, perform what it returns.

It is told the time and opens nothing. The bytes of streams go through `attempts[n]` instead
(`client_request.py`), whose effects, rare as they are, wait in `outbox`. Here is what a new grant
means, whose turn it is, and what becomes of each request: its attempts, the head of its answer,
breaks, refusals, its end; and the memory of all.

A newer grant ends every attempt of the older one at once, whatever these connections still have to
say, and every request that the old engine had scheduled when it died is charged with that death
(`queue.py`). A break is no failure. A client that has received bytes is parked, and any other waits
again. The gateway sends both again: to the next engine as soon as there is a newer grant, or to the
same one if there is none within `NEWER_GRANT_MS`, under a new attempt, twice at most.

While the engine rests, its door is shut (`sleep_door.py`): requests wait, and the machine reports
the first one to the shell. An engine that wakes under the same grant is greeted anew.

The memory has one cap. A request that comes when it is reached is *lean*: its answer is neither
held nor journalled, and its class is `none` from the start. If streams grow to the cap, the largest
one gives up its journal and continues as class `none`: one stream does not survive the next
failover, instead of many.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set

from gateway.core import events as ev
from gateway.core.answers import Failure, error_event, failure
from gateway.core.client_request import (
    DELIVERING,
    PROGRESS_TOKENS,
    REQUEST_BYTES,
    Attempt,
    ClientRequest,
    RequestState,
    Turn,
)
from gateway.core.events import BreakCause, Ending, GatewayEffect, GatewayEvent, GatewayRules
from gateway.core.queue import EXPECTED_MS, RequestQueue
from gateway.core.replay import Replay
from plumbing.gateway_protocol import HANDED_OVER, JOURNAL_TOKENS_MAX, Continuation, Hello, Journal
from pool.core.events import Door, OpenDoor, ShutDoor

TICK_MS = 20.0  # a tenth of the shortest wait here, 200 ms
NEWER_GRANT_MS = 200.0  # a death is followed by a grant in less; a broken connection by none
BREAKS_HERE_MAX = 3  # the first, and two more at the same engine
# The longest that a supervisor takes to judge an engine hung (`hang_alone_ms`): if there is no
# newer grant then, the engine is alive, and it is this request that it does not answer.
GIVE_UP_MS = 30_000.0
REFUSED_MS = 50.0  # doubled with each refusal in a row,
REFUSED_MAX_MS = 1_000.0  # up to this
NEVER_MS = float("inf")
UNHEARD = "the lock server has not reported yet which engine is active"
GREET_AGAIN_MS = 50.0  # an engine that is granted answers within milliseconds of serving

ANSWER_BYTES_MAX = 64 << 20  # an embedding of a large batch; more is passed on as it comes
BUSY = (429, 503)
CONTINUING = (Continuation.EXACT, Continuation.STATE)
REPLAYS = (RequestState.RESUMING, RequestState.REPLAYING)
PASSED_MS = 1_000.0  # a front's request waits so long for an engine: another pod may have one
UNANSWERED = (RequestState.SENT, RequestState.ANSWERING)
UNSENT = (RequestState.WAITING, *UNANSWERED)


class Shared:
    """What all lanes of one gateway share: one memory with one cap, and one outbox, the same list
    at all times, so that the reader of bytes need not know whose they are."""

    def __init__(self, memory_bytes_max: int) -> None:
        self.outbox: list[GatewayEffect] = []
        self.numbers = itertools.count(1)  # of attempts and greetings
        self.memory_bytes = 0
        self.memory_bytes_max = memory_bytes_max
        self.requests: list[dict[int, ClientRequest]] = []  # of each lane

    def everything(self) -> Iterator[ClientRequest]:
        """All requests, of all lanes."""
        return (each for requests in self.requests for each in requests.values())

    def take(self) -> Sequence[GatewayEffect]:
        """The effects in the outbox, which is empty then."""
        found = self.outbox.copy()
        self.outbox.clear()
        return found


class LaneTarget:
    """The engine that requests go to: whom the lock server has granted, and what it says of itself.

    An engine that is granted is greeted, and gets no request before it has answered: its hello says
    what it can continue and how large a body it takes. Tokens compare within an era only.
    `greet_at_ms`: when it is to be greeted again; None: it is not.
    """

    def __init__(self) -> None:
        self.grant: ev.EngineGranted | None = None  # the newest
        self.granted_ms = 0.0  # when it was heard of
        self.idle: str | None = None  # why no engine is known to hold the lock, once that was said
        self.idle_ms = 0.0  # since when
        self.hello: Hello | None = None  # of the engine that is granted
        self.last_hello: Hello | None = None  # of any engine so far
        self.greet_at_ms: float | None = None
        self._no_hello = ""  # why it has not answered the last greeting
        self.greeting = 0  # the number of the last one, while its answer counts

    @property
    def is_granted(self) -> bool:
        """Whether an engine holds the lock, as far as is known."""
        return self.grant is not None and self.idle is None

    @property
    def waits_for(self) -> str:
        """What a request waits for now, "" if only for its turn."""
        if self.grant is None or self.idle is not None:
            return self.idle or UNHEARD
        if self.hello is not None:
            return ""
        why = f" ({self._no_hello})" if self._no_hello else ""
        return f"waiting for {self.grant.engine} to answer{why}"

    def take(self, grant: ev.EngineGranted, now_ms: float) -> bool:
        """Note this grant. Whether it is another engine's, or another life's of the same one:
        what is late changes nothing, nor does what is said again, also by a lock server that has
        lost its file and was told of it."""
        old = self.grant
        if old is not None and old.era == grant.era and grant.token < old.token:
            return False
        if old is None or (old.token, old.era) != (grant.token, grant.era):
            self.granted_ms = now_ms
        self.grant, self.idle = grant, None
        if old is not None and (old.engine, old.token) == (grant.engine, grant.token):
            return False
        self.hello = None
        return True

    def lose(self, reason: str, now_ms: float) -> None:
        """No engine holds the lock."""
        if self.idle is None:
            self.idle_ms = now_ms
        self.idle = reason

    def part(self) -> None:
        """The engine must be greeted anew before it gets a request."""
        self.hello, self.greet_at_ms = None, None
        self.greeting = 0  # what an earlier greeting brings is about the past

    def greet(self, number: int) -> ev.GreetEngine:
        assert self.grant is not None
        self.greet_at_ms = None
        self.greeting = number
        return ev.GreetEngine(number, self.grant.engine, self.grant.token)

    def greeted(self, event: ev.HelloCame, greet_at_ms: float) -> None:
        """The answer to a greeting. If it is not the granted engine's, greet again then."""
        if event.greeting != self.greeting or self.grant is None:
            return
        hello, self._no_hello = event.hello, event.problem
        if hello is not None:
            if (hello.engine, hello.token) == (self.grant.engine, self.grant.token):
                self.hello = self.last_hello = hello.as_understood()
                return
            self._no_hello = f"{hello.engine} answered, under token {hello.token}"
        self.greet_at_ms = greet_at_ms


def objection(request: ClientRequest, hello: Hello) -> Failure | None:
    """Why it can never be sent to the engine of `hello`."""
    if request.body_bytes > hello.body_bytes_max:
        sizes = {"size": request.body_bytes, "limit": hello.body_bytes_max}
        return failure("gateway.body_too_large", **sizes)
    if request.is_resumed_by_front:
        is_same = hello.continuation_id == request.passing
        return None if is_same else failure("gateway.other_pod")
    if request.state is not RequestState.PARKED:
        return None
    if hello.continuation_id != request.continuation_id:
        return failure("gateway.other_continuation")
    return None if hello.continuation in CONTINUING else failure("gateway.cannot_continue")


def is_replayed(request: ClientRequest) -> bool:
    """Whether an engine works for it before anything new comes: the prefill of a resume. Engines
    play a journal before they have computed it."""
    if not request.is_resumed_by_front:
        is_joined = request.state in DELIVERING and request.paused_since_ms is not None
        return is_joined or request.state in REPLAYS
    has_new = request.unplayed_tokens < 0
    return request.state in UNANSWERED or (request.state is RequestState.RELAYING and not has_new)


class Gateway:
    """All requests of one gateway (`client_request.ColdPath`); in a pool, those for one model
    (`lanes.py`)."""

    explains_deaths = True  # a request that killed engines clears those that were beside it

    def __init__(self, rules: GatewayRules, shared: Shared | None = None) -> None:
        self.rules = rules
        self.shared = shared or Shared(rules.memory_bytes_max)
        self.outbox = self.shared.outbox
        self.requests: dict[int, ClientRequest] = {}
        self.attempts: dict[int, Attempt] = {}  # those that are not over
        self.queue = RequestQueue(rules.resumes_max)
        self.resuming = 0  # replays under way
        self.shared.requests.append(self.requests)
        self.target = LaneTarget()
        self.door: Door | None = None  # None: an engine that answers a greeting gets requests
        self._is_final = False  # no engine will be granted any more
        self._expected: dict[tuple[str, int], float] = {}  # engine and token → until when
        self._is_wanted = False  # the shell knows that a request waits behind this door
        self._now_ms = self._ticked_ms = 0.0

    def handle(self, event: GatewayEvent | None, now_ms: float) -> Sequence[GatewayEffect]:
        """What follows from `event`, with all that was in the outbox; None: nothing but that.

        Events about attempts, requests and greetings that are over are ignored.
        """
        self._now_ms = now_ms
        if event is not None:
            self._happened(event, now_ms)
        return self.take()

    def take(self) -> Sequence[GatewayEffect]:
        """The effects in the outbox, with those of requests whose turn it is."""
        self.look()
        return self.shared.take()

    def attempt(self, number: int) -> Attempt:
        """One that is not over."""
        return self.attempts[number]

    def _happened(self, event: GatewayEvent, now_ms: float) -> None:
        match event:
            case ev.RequestCame():
                self._came(event, now_ms)
            case ev.HeadCame():
                if (attempt := self.attempts.get(event.attempt)) is not None:
                    self.head(attempt, event, now_ms)
            case ev.AnswerEnded(number, cause):
                if (attempt := self.attempts.get(number)) is None:
                    pass
                elif cause is None:
                    self.answered(attempt, now_ms)
                elif cause is BreakCause.UNREACHED:
                    self.refused(attempt, now_ms)
                else:
                    self.broke(attempt, cause, now_ms)
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

    @property
    def needs_ticks(self) -> bool:
        """Whether anything waits for time to pass."""
        is_waiting = bool(self.queue.waiting) or self.queue.on_trial is not None
        return is_waiting or self.target.greet_at_ms is not None

    @property
    def waits_for(self) -> str:
        """What a request waits for now, "" if only for its turn."""
        return self.target.waits_for if self._rest is None else self._rest.reason

    @property
    def _rest(self) -> ShutDoor | None:
        """The door that the engine that holds the lock sleeps behind."""
        return self.door if self.target.is_granted and isinstance(self.door, ShutDoor) else None

    # ------------------------------------------------------------------ whose turn it is

    def _came(self, came: ev.RequestCame, now_ms: float) -> None:
        request = self.add(came, now_ms)
        if (
            request.is_lean
            and request.passing is None
            and (self.waits_for or len(self.queue.waiting) > 1)
        ):
            self.fail(request, failure("gateway.memory"))

    def look(self) -> None:
        """Send what may be sent now."""
        if not self.queue.waiting:  # nearly always, and looked at four times a request
            return
        if not self._is_final:
            self._send_due()
            return
        for request in list(self.queue.waiting.values()):  # no engine will take it
            self.fail(request, failure("gateway.stopping"))

    def _send_due(self) -> None:
        target = self.target
        if not self._may_send():
            if target.is_granted and not self._is_wanted:
                self._is_wanted = True
                self.outbox.append(ev.DemandChanged())
            return
        if not target.is_granted or target.hello is None or target.grant is None:
            return
        for request in self.queue.due(lambda: self.resuming, lambda: self._company, self._now_ms):
            if not self._has_room:
                break
            why = objection(request, target.hello)
            if why is not None:
                self.fail(request, why)
            else:
                self.send(request, target.grant.token, target.hello, self._now_ms)

    @property
    def _company(self) -> int:
        """New requests that an engine has."""
        return sum(not each.owner.has_broken for each in self.attempts.values())

    def _may_send(self) -> bool:
        """Whether the door is open."""
        return self.door is None or isinstance(self.door, OpenDoor)

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
        self.target.part()
        if self._may_send():
            self._greet()

    def _set_door(self, event: ev.DoorSet, now_ms: float) -> None:
        """What is sent behind a door that is shut would be lost."""
        old, could_send, self.door = self.door, self._may_send(), event.door
        if self.door == old:
            return
        if self._may_send():
            self._open(old, now_ms)
        elif could_send:
            self.target.part()

    def _open(self, old: Door | None, now_ms: float) -> None:
        """The engine has slept under this grant, or another one stands here since."""
        self._is_wanted = False
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
            if self.explains_deaths:
                self.queue.clear_waiting(request)
            self.fail(request, failure("gateway.suspect", deaths=request.deaths))
        else:
            message = (
                f"a request was in flight in {request.deaths} engines that died, without progress"
                " between; the gateway resumes it last and alone"
            )
            data = {"request": request.number, "deaths": request.deaths}
            self.outbox.append(ev.Told("suspect", message, "warning", data))

    def _greet(self) -> None:
        self.outbox.append(self.target.greet(next(self.shared.numbers)))

    # ------------------------------------------------------------------ time

    @property
    def _greet_again_ms(self) -> float:
        return GREET_AGAIN_MS

    def _is_overdue(self, request: ClientRequest, now_ms: float) -> bool:
        """Whether it has waited long enough for an engine that can serve it. One that sleeps and
        will wake is none that is missing, so that time counts from when the door opens."""
        hold_ms, park_ms = self.rules.hold_ms, self.rules.park_timeout_ms
        if request.passing is not None:
            hold_ms = min(hold_ms, PASSED_MS)
        will_wake = self._rest is not None and self._rest.expected_ms != NEVER_MS
        return request.held_ms >= (max(hold_ms, park_ms) if will_wake else hold_ms)

    def _waits_in_vain(self, request: ClientRequest) -> bool:
        """An engine that refuses it, or breaks it off each time, cannot serve it."""
        return bool(self.waits_for or request.gives_up_ms is not None or request.refusals)

    @property
    def _no_engine(self) -> Failure:
        if self._rest is not None and self._rest.expected_ms == NEVER_MS:
            return failure("gateway.resting", why=self._rest.reason)
        why = self.waits_for or "the engine does not answer; retry"
        return failure("no_active_engine", why=why)

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
        keeps_breaking = failure("gateway.keeps_breaking")
        for request in list(self.queue.waiting.values()):
            is_given_up = request.gives_up_ms is not None
            if request.state is RequestState.WAITING:
                if self._waits_in_vain(request):
                    request.held_ms += min(passed_ms, now_ms - request.waits_since_ms)
                if self._is_overdue(request, now_ms):
                    self.fail(request, keeps_breaking if is_given_up else self._no_engine)
            elif now_ms - (request.paused_since_ms or 0.0) >= self.rules.park_timeout_ms:
                why = self.waits_for or "others were first"
                timeout_s = self.rules.park_timeout_ms / 1000
                self.fail(request, failure("gateway.park_timeout", park_s=timeout_s, why=why))
            elif request.gives_up_ms is not None and now_ms >= request.gives_up_ms:
                self.fail(request, keeps_breaking, event=request.engine_error)

    # ------------------------------------------------------------------ attempts

    def add(self, came: ev.RequestCame, now_ms: float) -> ClientRequest:
        request = ClientRequest(
            *(came.request, came.path, came.body_bytes, came.is_inference, came.is_stream),
            *(now_ms, came.passing, came.journal_tokens, came.model, came.key),
        )
        weight = self.shared.memory_bytes + REQUEST_BYTES + came.body_bytes
        request.is_lean = weight > self.shared.memory_bytes_max
        self.shared.memory_bytes += request.weigh()
        self.requests[request.number] = request
        self.queue.add(request)
        return request

    def fire(self, request: ClientRequest, turn: Turn) -> None:
        """Every change of state goes through here."""
        if not request.has_broken and not request.is_resumed_by_front:  # nearly always
            request.fire(turn)
            return
        self.resuming -= is_replayed(request)
        request.fire(turn)
        self.resuming += is_replayed(request)

    def send(self, request: ClientRequest, token: int, hello: Hello, now_ms: float) -> None:
        """Send it to the engine of `hello`, from the start or with its journal."""
        is_resume = request.state is RequestState.PARKED
        self.fire(request, Turn.SEND)
        number = next(self.shared.numbers)
        attempt = Attempt(number, request, token, hello, self)
        self.attempts[number] = request.attempt = attempt
        request.entered_as = 0 if request.is_inside else number
        # An engine that has handed it over does not work on it again, though it may get it again.
        request.is_inside, request.sent_ms = not request.is_handed_over, now_ms
        self.queue.remove(request)
        journal = Journal(request.tokens, request.chunks) if is_resume else None
        self.outbox.append(ev.SendRequest(request.number, number, hello.engine, token, journal))

    def drop(self, request: ClientRequest) -> None:
        """Close its upstream connection: of this attempt nothing reaches anybody any more."""
        if request.attempt is not None:
            self.outbox.append(ev.DropAttempt(self._end_attempt(request)))

    def _end_attempt(self, request: ClientRequest) -> int:
        attempt, request.attempt = request.attempt, None
        assert attempt is not None
        attempt.is_over, attempt.transcript = True, None
        del self.attempts[attempt.number]
        return attempt.number

    # ------------------------------------------------------------------ heads and held answers

    def head(self, attempt: Attempt, came: ev.HeadCame, now_ms: float) -> None:
        """A response begins."""
        request = attempt.owner
        request.is_inside = True
        if (came.engine, came.token) != (attempt.engine, attempt.token):
            self.broke(attempt, BreakCause.WRONG_TOKEN, now_ms)
        elif request.state not in (RequestState.SENT, RequestState.RESUMING):
            self.broke(attempt, BreakCause.GARBAGE, now_ms)
        elif came.status in BUSY and request.has_broken:
            self.refused(attempt, now_ms)
        elif request.state is RequestState.SENT:
            self._begin(attempt, came)
        elif came.is_marked and came.status == 200:
            self._replay(request)
        else:
            why = failure("gateway.resume_refused", engine=attempt.engine, status=came.status)
            self.fail(request, why)

    def _begin(self, attempt: Attempt, came: ev.HeadCame) -> None:
        request = attempt.owner
        request.is_event_stream = came.is_event_stream
        request.refusals = 0
        is_whole = came.continuation is Continuation.RETRY and request.is_inference
        if request.passing is not None:
            request.continuation_id = attempt.continuation_id if came.is_marked else ""
            self.fire(request, Turn.HOLD)  # until its first byte: a break before that costs nothing
        elif came.is_marked and attempt.continuation_id and not request.is_lean:
            request.continuation_id = attempt.continuation_id
            self.fire(request, Turn.STREAM)
            self.outbox.append(ev.SendHead(request.number, attempt.number, came.continuation))
            self.weigh(request)
            self._watch(request)
        elif is_whole and not request.is_lean:
            self.fire(request, Turn.HOLD)
        else:
            self._pass_on(attempt)

    def _pass_on(self, attempt: Attempt) -> None:
        """From here on the answer is sent as it comes, and cannot be continued."""
        request = attempt.owner
        self.fire(request, Turn.RELAY)
        request.is_lean, request.held_bytes = True, 0
        self.outbox.append(ev.SendHead(request.number, attempt.number, Continuation.NONE))
        self.weigh(request)

    def held(self, attempt: Attempt, size_bytes: int) -> None:
        """So many more bytes are held of an answer: within the limits, or pass it on."""
        request = attempt.owner
        if request.passing is not None:
            self._pass_on(attempt)
            return
        is_too_much = self.shared.memory_bytes + size_bytes > self.shared.memory_bytes_max
        if is_too_much or request.held_bytes + size_bytes > ANSWER_BYTES_MAX:
            self._pass_on(attempt)
            return
        request.held_bytes += size_bytes
        self.weigh(request)

    def answered(self, attempt: Attempt, now_ms: float) -> None:
        """A response is complete, as HTTP sees it."""
        if attempt.owner.state in (RequestState.ANSWERING, RequestState.RELAYING):
            self.whole(attempt.owner)
        else:  # a marked stream without `hop.END`
            self.broke(attempt, BreakCause.CLOSED, now_ms)

    # ------------------------------------------------------------------ replays and progress

    def _replay(self, request: ClientRequest) -> None:
        self.fire(request, Turn.STREAM)
        delivered = request.transcript.joined
        request.replay = Replay(delivered, request.tokens)
        if delivered.is_empty and not request.tokens:
            self.joined(request)

    def joined(self, request: ClientRequest) -> None:
        """The replay has reached what was delivered: what follows is new to the client."""
        assert request.replay is not None
        self.fire(request, Turn.JOIN)
        request.rewriter = request.replay.rewriter()
        request.replay = None
        request.refusals = 0
        self.weigh(request)
        self._watch(request)

    def resumed(self, request: ClientRequest, now_ms: float) -> None:
        """The first new token, or the end: the client's pause is over."""
        attempt, since_ms = request.attempt, request.paused_since_ms
        assert attempt is not None
        assert since_ms is not None
        tokens, pause_ms = request.delivered_tokens, now_ms - since_ms
        engine, token = attempt.engine, attempt.token
        self.outbox.append(ev.StreamResumed(request.number, engine, token, tokens, pause_ms))
        self.resuming -= is_replayed(request)
        request.paused_since_ms = None
        self.resuming += is_replayed(request)
        request.steer()

    def played(self, request: ClientRequest, tokens: int) -> None:
        """The shell has passed `tokens` more on to a front."""
        self.resuming -= is_replayed(request)
        request.unplayed_tokens -= tokens
        self.resuming += is_replayed(request)

    def mismatched(self, request: ClientRequest, why: str) -> None:
        """The replay is not what was delivered."""
        assert request.attempt is not None
        engine = request.attempt.engine
        self.fail(request, failure("gateway.replay_mismatch", engine=engine, why=why))

    def _watch(self, request: ClientRequest) -> None:
        """Be told when a suspect, or a request that has broken here, has made progress."""
        is_watched = request.is_suspect or request.breaks_here > 0
        request.progress_at = len(request.tokens) + PROGRESS_TOKENS if is_watched else 0
        request.steer()

    def progressed(self, request: ClientRequest) -> None:
        """It has made enough new tokens to be above suspicion."""
        request.progress_at = request.breaks_here = request.deaths = 0
        request.was_tried = False
        request.steer()
        self.queue.end_trial(request)

    # ------------------------------------------------------------------ breaks and refusals

    def broke(self, attempt: Attempt, cause: BreakCause, now_ms: float) -> None:
        """The answer is not whole and no more of it comes: send it again, park it, or end it."""
        request = attempt.owner
        request.has_broken = True
        request.lived_ms = now_ms - request.sent_ms
        if cause is not BreakCause.ERROR_EVENT:
            request.engine_error = b""
        if cause in (BreakCause.HANDED_OVER, BreakCause.YIELDED):  # it is in no engine now
            request.is_inside = False
            request.is_handed_over = cause is BreakCause.HANDED_OVER
        self.drop(request)
        if request.state is RequestState.RELAYING:
            is_handed_over = cause is BreakCause.YIELDED and request.is_front_stream
            # Behind what may be half an event: the front drops a group that is not whole.
            event = b"\n\n" + HANDED_OVER if is_handed_over else request.engine_error
            self.fail(request, failure("gateway.broken"), event=event)
            return
        begins_pause = request.state is RequestState.STREAMING and request.paused_since_ms is None
        if begins_pause:
            tokens = len(request.tokens)
            self.outbox.append(
                ev.StreamPaused(request.number, cause, attempt.engine, attempt.token, tokens)
            )
        elif request.state in UNANSWERED:
            request.waits_anew(now_ms)
            request.held_bytes = 0
            self.weigh(request)
        self.fire(request, Turn.BREAK)
        if begins_pause:
            request.paused_since_ms = now_ms
        request.replay = None
        is_once = request.is_lean or not request.is_inference or request.passing is not None
        if request.state is RequestState.WAITING and is_once:
            self.fail(request, failure("gateway.broken"))
            return
        self._wait_for_grant(request, cause, now_ms)
        self.queue.add(request)

    def _wait_for_grant(self, request: ClientRequest, cause: BreakCause, now_ms: float) -> None:
        """When it may be sent again if no newer grant comes."""
        if cause in (BreakCause.SUPERSEDED, BreakCause.YIELDED):
            request.not_before_ms = now_ms
            return
        request.not_before_ms = now_ms + NEWER_GRANT_MS
        request.breaks_here += cause is not BreakCause.HANDED_OVER
        if request.breaks_here >= BREAKS_HERE_MAX:
            # An engine that says each time why it failed is alive: nothing is to be waited for.
            said_why = cause is BreakCause.ERROR_EVENT and request.state is RequestState.PARKED
            request.not_before_ms = NEVER_MS
            request.gives_up_ms = now_ms + (0.0 if said_why else GIVE_UP_MS)

    def refused(self, attempt: Attempt, now_ms: float) -> None:
        """Not now: nothing of the request is in the engine."""
        request = attempt.owner
        request.is_inside = attempt.was_inside
        self.drop(request)
        self.fire(request, Turn.REFUSE)
        pause_ms = REFUSED_MS * 2.0 ** min(request.refusals, 10)
        request.refusals += 1
        request.not_before_ms = now_ms + min(pause_ms, REFUSED_MAX_MS)
        self.queue.add(request)

    # ------------------------------------------------------------------ ends

    def whole(self, request: ClientRequest) -> None:
        """Everything has come. A held answer is sent now, any other was already."""
        is_held = request.state is RequestState.ANSWERING
        self.fire(request, Turn.WHOLE)
        attempt = self._end_attempt(request)  # not dropped: its connection may be used again
        self._forget(request, Ending.WHOLE, attempt=attempt if is_held else 0)

    def fail(self, request: ClientRequest, why: Failure, event: bytes = b"") -> None:
        """It ends without its answer, honestly; `event` is what the engine itself said of it."""
        is_unsent = request.state in UNSENT
        self.fire(request, Turn.FAIL)
        if is_unsent:
            self._forget(request, Ending.REFUSED, why)
            return
        can_say = request.is_event_stream and request.is_at_boundary
        if request.passing is not None:
            can_say = bool(event)
        event = event or error_event(why, request.path)
        self._forget(request, Ending.BROKEN, why, event if can_say else b"")

    def left(self, request: ClientRequest) -> None:
        """The client is gone."""
        self.fire(request, Turn.LEAVE)
        self._forget(request, Ending.CLIENT_GONE)

    def _forget(
        self,
        request: ClientRequest,
        ending: Ending,
        why: Failure | None = None,
        event: bytes = b"",
        attempt: int = 0,
    ) -> None:
        self.drop(request)
        self.queue.remove(request)
        self.queue.end_trial(request)
        del self.requests[request.number]
        self.shared.memory_bytes -= request.charged_bytes
        tokens = request.delivered_tokens
        self.outbox.append(ev.RequestEnded(request.number, ending, tokens, attempt, why, event))

    # ------------------------------------------------------------------ memory

    def weigh(self, request: ClientRequest) -> None:
        """Count its memory again, and stay below the cap."""
        shared = self.shared
        shared.memory_bytes += request.weigh()
        if len(request.tokens) > JOURNAL_TOKENS_MAX:
            self._give_journal_up(request, "tokens")
        while shared.memory_bytes > shared.memory_bytes_max:
            streams = [each for each in shared.everything() if each.state is RequestState.STREAMING]
            if not streams:
                return
            self._give_journal_up(max(streams, key=lambda each: each.charged_bytes), "memory")

    def _give_journal_up(self, request: ClientRequest, reason: str) -> None:
        self.fire(request, Turn.FORGET)
        request.forget_answer()
        request.is_lean = True
        self.shared.memory_bytes += request.weigh()
        self.outbox.append(ev.ContinuationLost(request.number, reason))
