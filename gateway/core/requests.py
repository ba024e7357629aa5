"""The requests that the gateway has: how each begins and ends, and the memory of all.

The memory has one cap. A request that comes when it is reached is *lean*: its answer is neither
held nor journalled, and its class is `none` from the start. If streams grow to the cap, the largest
one gives up its journal and continues as class `none`: one stream does not survive the next
failover, instead of many.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.core import answers
from gateway.core import events as ev
from gateway.core.answers import Failure
from gateway.core.client_request import REQUEST_BYTES, ClientRequest, RequestState, Turn
from gateway.core.events import Ending, GatewayRules
from gateway.core.hot_path import Attempt
from gateway.core.queue import RequestQueue
from gateway.core.shared import Shared
from plumbing.gateway_protocol import JOURNAL_TOKENS_MAX

REPLAYS = (RequestState.RESUMING, RequestState.REPLAYING)
UNSENT = (RequestState.WAITING, RequestState.SENT, RequestState.ANSWERING)


class Requests:
    """Owns the requests. `look` is called when another one may have its turn."""

    def __init__(self, rules: GatewayRules, look: Callable[[], None], shared: Shared) -> None:
        self.rules = rules
        self.shared = shared
        self.look = look
        self.all: dict[int, ClientRequest] = {}
        self.attempts: dict[int, Attempt] = {}  # those that are not over
        self.queue = RequestQueue(rules.resumes_max)
        self.outbox = shared.outbox
        self.resuming = 0  # replays under way
        shared.requests.append(self.all)

    @property
    def memory_bytes(self) -> int:
        """Of all lanes together."""
        return self.shared.memory_bytes

    @property
    def company(self) -> int:
        """New requests that an engine has."""
        return sum(not each.owner.has_broken for each in self.attempts.values())

    def add(self, came: ev.RequestCame, now_ms: float) -> ClientRequest:
        request = ClientRequest(
            came.request,
            came.path,
            came.body_bytes,
            is_inference=came.is_inference,
            is_stream=came.is_stream,
            now_ms=now_ms,
        )
        weight = self.shared.memory_bytes + REQUEST_BYTES + came.body_bytes
        request.is_lean = weight > self.shared.memory_bytes_max
        self.shared.memory_bytes += request.weigh()
        self.all[request.number] = request
        self.queue.add(request)
        return request

    def fire(self, request: ClientRequest, turn: Turn) -> None:
        """Every change of state goes through here."""
        self.resuming -= request.state in REPLAYS
        request.fire(turn)
        self.resuming += request.state in REPLAYS

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

    # ---- ends

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

    def fail_waiting(self, failure: Failure) -> None:
        """No engine will take those that wait: each ends now."""
        for request in list(self.queue.waiting.values()):
            self.fail(request, failure)

    def left(self, request: ClientRequest) -> None:
        """The client is gone."""
        self.fire(request, Turn.LEAVE)
        self._forget(request, Ending.CLIENT_GONE, "")

    def _forget(self, request: ClientRequest, ending: Ending, code: str) -> None:
        self.drop(request)
        self.queue.remove(request)
        self.queue.end_trial(request)
        del self.all[request.number]
        self.shared.memory_bytes -= request.charged_bytes
        tokens = request.delivered_tokens
        self.outbox.append(
            ev.RequestEnded(request.number, ending, code, tokens, request.pauses, request.paused_ms)
        )
        self.look()

    # ---- memory

    def weigh(self, request: ClientRequest) -> None:
        """Count its memory again, and stay below the cap."""
        self.shared.memory_bytes += request.weigh()
        if len(request.tokens) > JOURNAL_TOKENS_MAX:
            self._give_journal_up(request, "tokens")
        while self.shared.memory_bytes > self.shared.memory_bytes_max:
            streams = [
                each
                for requests in self.shared.requests
                for each in requests.values()
                if each.state is RequestState.STREAMING
            ]
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
