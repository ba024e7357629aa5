"""What becomes of each request: its attempts, the head of its answer, breaks, refusals, its end;
and the memory of all.

A break is no failure. A client that has received bytes is parked, and any other waits again. The
gateway sends both again: to the next engine as soon as there is a newer grant, or to the same one
if there is none within `NEWER_GRANT_MS`, under a new attempt, twice at most.

The memory has one cap. A request that comes when it is reached is *lean*: its answer is neither
held nor journalled, and its class is `none` from the start. If streams grow to the cap, the largest
one gives up its journal and continues as class `none`: one stream does not survive the next
failover, instead of many.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core import answers
from gateway.core import events as ev
from gateway.core.answers import Failure
from gateway.core.client_request import (
    PROGRESS_TOKENS,
    REQUEST_BYTES,
    Attempt,
    ClientRequest,
    RequestState,
    Turn,
)
from gateway.core.events import BreakCause, Ending, GatewayEffect, GatewayRules
from gateway.core.queue import RequestQueue
from gateway.core.replay import Replay
from gateway.core.target import Numbers
from plumbing.gateway_protocol import JOURNAL_TOKENS_MAX, Continuation, Hello, Journal

NEWER_GRANT_MS = 200.0  # a death is followed by a grant in less; a broken connection by none
BREAKS_HERE_MAX = 3  # the first, and two more at the same engine
# The longest that a supervisor takes to judge an engine hung (`hang_alone_ms`): if there is no
# newer grant then, the engine is alive, and it is this request that it does not answer.
GIVE_UP_MS = 30_000.0
REFUSED_MS = 50.0  # doubled with each refusal in a row,
REFUSED_MAX_MS = 1_000.0  # up to this
NEVER_MS = float("inf")

ANSWER_BYTES_MAX = 64 << 20  # an embedding of a large batch; more is passed on as it comes
BUSY = (429, 503)
CONTINUING = (Continuation.EXACT, Continuation.STATE)
REPLAYS = (RequestState.RESUMING, RequestState.REPLAYING)
UNANSWERED = (RequestState.SENT, RequestState.ANSWERING)
UNSENT = (RequestState.WAITING, *UNANSWERED)


class Shared:
    """What all lanes of one gateway share: one memory with one cap, and one outbox, the same list
    at all times, so that the reader of bytes need not know whose they are."""

    def __init__(self, memory_bytes_max: int) -> None:
        self.outbox: list[GatewayEffect] = []
        self.memory_bytes = 0
        self.memory_bytes_max = memory_bytes_max
        self.requests: list[dict[int, ClientRequest]] = []  # of each lane

    def take(self) -> Sequence[GatewayEffect]:
        """The effects in the outbox, which is empty then."""
        found = self.outbox.copy()
        self.outbox.clear()
        return found


def objection(request: ClientRequest, hello: Hello) -> Failure | None:
    """Why it can never be sent to the engine of `hello`."""
    if request.body_bytes > hello.body_bytes_max:
        return answers.too_large(request.body_bytes, hello.body_bytes_max)
    if request.state is not RequestState.PARKED:
        return None
    if hello.continuation_id != request.continuation_id:
        return answers.OTHER_MODEL
    return None if hello.continuation in CONTINUING else answers.CANNOT_CONTINUE


class Requests:
    """Those of one lane (`client_request.ColdPath`). `look` sends those whose turn it is."""

    def __init__(self, rules: GatewayRules, shared: Shared, numbers: Numbers) -> None:
        self.rules = rules
        self.shared = shared
        self.outbox = shared.outbox
        self.requests: dict[int, ClientRequest] = {}
        self.attempts: dict[int, Attempt] = {}  # those that are not over
        self.queue = RequestQueue(rules.resumes_max)
        self.resuming = 0  # replays under way
        self._numbers = numbers
        shared.requests.append(self.requests)

    def look(self) -> None:
        """Another request may have its turn."""
        raise NotImplementedError  # by the gateway, which knows its engine

    def add(self, came: ev.RequestCame, now_ms: float) -> ClientRequest:
        request = ClientRequest(
            *(came.request, came.path, came.body_bytes, came.is_inference, came.is_stream), now_ms
        )
        weight = self.shared.memory_bytes + REQUEST_BYTES + came.body_bytes
        request.is_lean = weight > self.shared.memory_bytes_max
        self.shared.memory_bytes += request.weigh()
        self.requests[request.number] = request
        self.queue.add(request)
        return request

    def fire(self, request: ClientRequest, turn: Turn) -> None:
        """Every change of state goes through here."""
        self.resuming -= request.state in REPLAYS
        request.fire(turn)
        self.resuming += request.state in REPLAYS

    def send(self, request: ClientRequest, token: int, hello: Hello, now_ms: float) -> None:
        """Send it to the engine of `hello`, from the start or with its journal."""
        is_resume = request.state is RequestState.PARKED
        self.fire(request, Turn.SEND)
        number = self._numbers.next()
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
        is_signed = (came.engine, came.token) == (attempt.engine, attempt.token)
        if not is_signed and not (came.is_unsigned_refusal and request.state is RequestState.SENT):
            self.broke(attempt, BreakCause.WRONG_TOKEN, now_ms)
        elif request.state not in (RequestState.SENT, RequestState.RESUMING):
            self.broke(attempt, BreakCause.GARBAGE, now_ms)
        elif came.status in BUSY and request.has_broken:
            self.refused(attempt, now_ms)
        elif request.state is RequestState.SENT:
            self._begin(attempt, came)
        elif came.is_marked and came.status == 200:
            self._replay(request, now_ms)
        else:
            self.fail(request, answers.refused_resume(attempt.engine, came.status))

    def _begin(self, attempt: Attempt, came: ev.HeadCame) -> None:
        request = attempt.owner
        request.is_event_stream = came.is_event_stream
        request.refusals = 0
        is_whole = came.continuation is Continuation.RETRY and request.is_inference
        if came.is_marked and attempt.continuation_id and not request.is_lean:
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

    def _replay(self, request: ClientRequest, now_ms: float) -> None:
        self.fire(request, Turn.STREAM)
        delivered = request.transcript.joined
        request.replay = Replay(delivered, request.tokens)
        if delivered.is_empty and not request.tokens:
            self.joined(request, now_ms)

    def joined(self, request: ClientRequest, now_ms: float) -> None:
        """The replay has reached what was delivered: the client's pause is over."""
        attempt, replay, since_ms = request.attempt, request.replay, request.paused_since_ms
        assert attempt is not None
        assert replay is not None
        assert since_ms is not None
        self.fire(request, Turn.JOIN)
        request.rewriter = replay.rewriter()
        tokens, pause_ms = len(request.tokens), now_ms - since_ms
        is_same_engine = request.paused_under == attempt.token
        self.outbox.append(
            ev.StreamResumed(
                *(request.number, attempt.engine, attempt.token, tokens, pause_ms, is_same_engine)
            )
        )
        request.paused_ms += pause_ms
        request.paused_since_ms = request.replay = None
        request.refusals = 0
        self.weigh(request)
        self._watch(request)
        self.look()

    def mismatched(self, request: ClientRequest, why: str) -> None:
        """The replay is not what was delivered."""
        assert request.attempt is not None
        self.fail(request, answers.mismatch(request.attempt.engine, why))

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
        self.look()

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
            self.fail(request, answers.BROKEN, event=request.engine_error)
            return
        if request.state is RequestState.STREAMING:
            request.paused_since_ms, request.paused_under = now_ms, attempt.token
            request.pauses += 1
            tokens = len(request.tokens)
            self.outbox.append(
                ev.StreamPaused(request.number, cause, attempt.engine, attempt.token, tokens)
            )
        elif request.state in UNANSWERED:
            request.waits_anew(now_ms)
            request.held_bytes = 0
            self.weigh(request)
        self.fire(request, Turn.BREAK)
        request.replay = None
        is_once = request.is_lean or not request.is_inference
        if request.state is RequestState.WAITING and is_once:
            self.fail(request, answers.BROKEN)
            return
        self._wait_for_grant(request, cause, now_ms)
        self.queue.add(request)
        self.look()

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
        self.look()

    # ------------------------------------------------------------------ ends

    def whole(self, request: ClientRequest) -> None:
        """Everything has come. A held answer is sent now, any other was already."""
        is_held = request.state is RequestState.ANSWERING
        self.fire(request, Turn.WHOLE)
        attempt = self._end_attempt(request)  # not dropped: its connection may be used again
        effect = ev.SendAnswer(request.number, attempt)
        self.outbox.append(effect if is_held else ev.EndAnswer(request.number))
        self._forget(request, Ending.WHOLE, "")

    def fail(self, request: ClientRequest, failure: Failure, event: bytes = b"") -> None:
        """It ends without its answer, honestly; `event` is what the engine itself said of it."""
        ending = Ending.REFUSED if request.state in UNSENT else Ending.BROKEN
        self.fire(request, Turn.FAIL)
        if ending is Ending.REFUSED:
            body = answers.error_body(failure, request.path)
            self.outbox.append(
                ev.AnswerError(request.number, failure.status, body, failure.retry_after_s)
            )
        else:
            can_say = request.is_event_stream and request.is_at_boundary
            event = event or answers.error_event(failure, request.path)
            self.outbox.append(ev.AbortAnswer(request.number, event if can_say else b""))
        self._forget(request, ending, failure.code)

    def left(self, request: ClientRequest) -> None:
        """The client is gone."""
        self.fire(request, Turn.LEAVE)
        self._forget(request, Ending.CLIENT_GONE, "")

    def _forget(self, request: ClientRequest, ending: Ending, code: str) -> None:
        self.drop(request)
        self.queue.remove(request)
        self.queue.end_trial(request)
        del self.requests[request.number]
        self.shared.memory_bytes -= request.charged_bytes
        tokens = request.delivered_tokens
        self.outbox.append(
            ev.RequestEnded(request.number, ending, code, tokens, request.pauses, request.paused_ms)
        )
        self.look()

    # ------------------------------------------------------------------ memory

    def weigh(self, request: ClientRequest) -> None:
        """Count its memory again, and stay below the cap."""
        shared = self.shared
        shared.memory_bytes += request.weigh()
        if len(request.tokens) > JOURNAL_TOKENS_MAX:
            self._give_journal_up(request, "tokens")
        while shared.memory_bytes > shared.memory_bytes_max:
            all_requests = (each for requests in shared.requests for each in requests.values())
            streams = [each for each in all_requests if each.state is RequestState.STREAMING]
            if not streams:
                return
            self._give_journal_up(max(streams, key=lambda each: each.charged_bytes), "memory")

    def _give_journal_up(self, request: ClientRequest, reason: str) -> None:
        self.fire(request, Turn.FORGET)
        request.forget_answer()
        request.is_lean = True
        change = request.weigh()
        self.shared.memory_bytes += change
        self.outbox.append(ev.ContinuationLost(request.number, reason, -change))
