"""The attempts of a request: the head of an answer, its replay, its breaks, and refusals.

A break is no failure. A client that has received bytes is parked, and any other waits again. The
gateway sends both again: to the next engine as soon as there is a newer grant, or to the same one
if there is none within `NEWER_GRANT_MS`, under a new attempt, twice at most.
"""

from __future__ import annotations

from gateway.core import answers
from gateway.core import events as ev
from gateway.core.client_request import PROGRESS_TOKENS, ClientRequest, RequestState, Turn
from gateway.core.events import BreakCause
from gateway.core.hot_path import Attempt
from gateway.core.replay import Replay
from gateway.core.requests import Requests
from gateway.core.shared import Numbers
from plumbing.gateway_protocol import Continuation, Hello, Journal

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


def objection(request: ClientRequest, hello: Hello) -> answers.Failure | None:
    """Why it can never be sent to the engine of `hello`."""
    if request.body_bytes > hello.body_bytes_max:
        return answers.too_large(request.body_bytes, hello.body_bytes_max)
    if request.state is not RequestState.PARKED:
        return None
    if hello.continuation_id != request.continuation_id:
        return answers.OTHER_MODEL
    return None if hello.continuation in CONTINUING else answers.CANNOT_CONTINUE


class Attempts:
    """What attempts report (`hot_path.ColdPath`), and what follows for their requests."""

    def __init__(self, requests: Requests, numbers: Numbers) -> None:
        self.requests = requests
        self._numbers = numbers

    def send(self, request: ClientRequest, token: int, hello: Hello, now_ms: float) -> None:
        """Send it to the engine of `hello`, from the start or with its journal."""
        is_resume = request.state is RequestState.PARKED
        self.requests.fire(request, Turn.SEND)
        number = self._numbers.next()
        attempt = Attempt(number, request, hello.engine, token, hello.continuation_id, self)
        self.requests.attempts[attempt.number] = request.attempt = attempt
        request.entered_as = 0 if request.is_inside else number
        # An engine that has handed it over does not work on it again, though it may get it again.
        request.is_inside, request.sent_ms = not request.is_handed_over, now_ms
        self.requests.queue.remove(request)
        journal = Journal(request.tokens, request.chunks) if is_resume else None
        self.requests.outbox.append(
            ev.SendRequest(request.number, attempt.number, hello.engine, token, journal)
        )

    # ---- heads

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
        elif request.state is RequestState.RESUMING:
            if came.is_marked and came.status == 200:
                self._replay(request, now_ms)
            else:
                self.requests.fail(request, answers.refused_resume(attempt.engine, came.status))
        else:
            self._begin(attempt, came)

    def _begin(self, attempt: Attempt, came: ev.HeadCame) -> None:
        request = attempt.owner
        request.is_event_stream = came.is_event_stream
        request.refusals = 0
        is_whole = came.continuation is Continuation.RETRY and request.is_inference
        if came.is_marked and attempt.continuation_id and not request.is_lean:
            request.continuation_id = attempt.continuation_id
            self.requests.fire(request, Turn.STREAM)
            self.requests.outbox.append(
                ev.SendHead(request.number, attempt.number, came.continuation)
            )
            self.requests.weigh(request)
            self._watch(request)
        elif is_whole and not request.is_lean:
            self.requests.fire(request, Turn.HOLD)
        else:
            self._pass_on(attempt)

    def _pass_on(self, attempt: Attempt) -> None:
        """From here on the answer is sent as it comes, and cannot be continued."""
        request = attempt.owner
        self.requests.fire(request, Turn.RELAY)
        request.is_lean, request.held_bytes = True, 0
        self.requests.outbox.append(ev.SendHead(request.number, attempt.number, Continuation.NONE))
        self.requests.weigh(request)

    def held(self, attempt: Attempt, size_bytes: int) -> None:
        """So many more bytes are held of an answer: within the limits, or pass it on."""
        request = attempt.owner
        is_too_much = (
            self.requests.memory_bytes + size_bytes > self.requests.shared.memory_bytes_max
        )
        if is_too_much or request.held_bytes + size_bytes > ANSWER_BYTES_MAX:
            self._pass_on(attempt)
            return
        request.held_bytes += size_bytes
        self.requests.weigh(request)

    def answered(self, attempt: Attempt, now_ms: float) -> None:
        """A response is complete, as HTTP sees it."""
        request = attempt.owner
        if request.state in (RequestState.ANSWERING, RequestState.RELAYING):
            self.finished(request)
        else:  # a marked stream without `hop.END`
            self.broke(attempt, BreakCause.CLOSED, now_ms)

    def finished(self, request: ClientRequest) -> None:
        """An answer is whole."""
        self.requests.whole(request)

    # ---- replays

    def _replay(self, request: ClientRequest, now_ms: float) -> None:
        self.requests.fire(request, Turn.STREAM)
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
        self.requests.fire(request, Turn.JOIN)
        request.rewriter = replay.rewriter()
        tokens, pause_ms = len(request.tokens), now_ms - since_ms
        self.requests.outbox.append(
            ev.StreamResumed(
                request.number,
                attempt.engine,
                attempt.token,
                tokens,
                pause_ms,
                is_same_engine=request.paused_under == attempt.token,
            )
        )
        request.paused_ms += pause_ms
        request.paused_since_ms = request.replay = None
        request.refusals = 0
        self.requests.weigh(request)
        self._watch(request)
        self.requests.look()

    def mismatched(self, request: ClientRequest, why: str) -> None:
        """The replay is not what was delivered."""
        assert request.attempt is not None
        self.requests.fail(request, answers.mismatch(request.attempt.engine, why))

    def weigh(self, request: ClientRequest) -> None:
        self.requests.weigh(request)

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
        self.requests.queue.end_trial(request)
        self.requests.look()

    def look_at_trial(self, now_ms: float) -> None:
        """Clear a suspect whose tokens are not seen, or let the next one have its turn."""
        trial = self.requests.queue.on_trial
        if trial is not None and trial.made_progress(now_ms):
            self.progressed(trial)
        self.requests.queue.limit_trial(now_ms)

    # ---- breaks and refusals

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
        self.requests.drop(request)
        if request.state is RequestState.RELAYING:
            self.requests.fail(request, answers.BROKEN, event=request.engine_error)
            return
        if request.state is RequestState.STREAMING:
            self._pause(attempt, cause, now_ms)
        elif request.state in (RequestState.SENT, RequestState.ANSWERING):
            request.waits_anew(now_ms)
            request.held_bytes = 0
            self.requests.weigh(request)
        self.requests.fire(request, Turn.BREAK)
        request.replay = None
        is_once = request.is_lean or not request.is_inference
        if request.state is RequestState.WAITING and is_once:
            self.requests.fail(request, answers.BROKEN)
            return
        self._wait_for_grant(request, cause, now_ms)
        self.requests.queue.add(request)
        self.requests.look()

    def _pause(self, attempt: Attempt, cause: BreakCause, now_ms: float) -> None:
        request = attempt.owner
        request.paused_since_ms, request.paused_under = now_ms, attempt.token
        request.pauses += 1
        tokens = len(request.tokens)
        self.requests.outbox.append(
            ev.StreamPaused(request.number, cause, attempt.engine, attempt.token, tokens)
        )

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
        self.requests.drop(request)
        self.requests.fire(request, Turn.REFUSE)
        pause_ms = REFUSED_MS * 2.0 ** min(request.refusals, 10)
        request.refusals += 1
        request.not_before_ms = now_ms + min(pause_ms, REFUSED_MAX_MS)
        self.requests.queue.add(request)
        self.requests.look()
