"""Every request that waits because no engine is active, or has room, in the order in which the
gateway sends it. How long it may wait: `_is_overdue` in `machine.py`, and in a
pool in `lanes.py`.

    streams that were paused      oldest first, so many replays at once
    requests to send again        nothing of them was sent; oldest first
    suspects                      one at a time, streams first
    new requests                  oldest first; while there are suspects, so few at once that a
                                  trial finds room in the engine

In a pool, requests have priorities, and in each queue the one with the smallest `order_key` is
first: the time when it came, as much later as its priority is worse (`lanes.py`).

A *suspect* was in the engine at two deaths and has made fewer than 32 tokens between them, or was
there for less than ten seconds where its tokens cannot be seen. One that kills engines is among
them, and so is all that was there beside it. Alone, each shows what it is: it makes progress and is
cleared, or it is in the engine at a third death and ends. That death explains the earlier ones, so
it clears the suspects that still waited.

A suspect waits for the trials before it, each of `TRIAL_MS` at most, and in the engine for the
`COMPANY_MAX` new requests at most that were sent meanwhile. A request that the engine had queued,
and had not scheduled yet (`EngineGranted.queued`), is not charged with the death.

A request that must not be sent yet waits aside, `delayed`. A paused stream that the engine has
refused keeps new requests back, since they would take the room that it waits for, but only
`REFUSALS_THAT_HOLD` times: one that is refused for ever must not keep everybody out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from enum import IntEnum

from gateway.core.client_request import ClientRequest, RequestState

REFUSALS_THAT_HOLD = 4  # with their pauses, less than a second
# New requests in the engine while there are suspects: one that waits for them shows nothing.
COMPANY_MAX = 4
# A suspect that neither dies nor makes progress keeps the next one waiting this long. Its client
# may read slowly; a prefill takes less.
TRIAL_MS = 30_000.0
# A drill announces that it ends an engine, and the next grant comes within this time. The
# lock server notices late that a supervisor was stopped.
EXPECTED_MS = 60_000.0


class Precedence(IntEnum):
    """The queue that a request waits in."""

    PAUSED = 0
    AGAIN = 1
    SUSPECT = 2
    SUSPECT_HELD = 3  # shows no progress before its end, so the others are heard first
    NEW = 4

    @classmethod
    def of(cls, request: ClientRequest) -> Precedence:
        if request.is_suspect:
            return cls.SUSPECT if request.is_stream else cls.SUSPECT_HELD
        if request.state is RequestState.PARKED or request.is_resumed_by_front:
            return cls.PAUSED
        return cls.AGAIN if request.has_broken else cls.NEW


class RequestQueue:
    """All waiting and parked requests, each in one queue or delayed."""

    def __init__(self, resumes_max: int) -> None:
        self.resumes_max = resumes_max
        self.waiting: dict[int, ClientRequest] = {}
        self.on_trial: ClientRequest | None = None  # the suspect whose turn it is
        self._queues: dict[Precedence, list[tuple[float, int]]] = {
            rank: [] for rank in Precedence
        }  # heaps
        self._delayed: dict[int, ClientRequest] = {}

    def add(self, request: ClientRequest) -> None:
        """It waits from now on; its `not_before_ms` is set."""
        self.waiting[request.number] = request
        self._delayed[request.number] = request

    def remove(self, request: ClientRequest) -> None:
        """It is sent, or over. Its number may stay in a queue, where it is passed over."""
        self.waiting.pop(request.number, None)
        self._delayed.pop(request.number, None)

    def limit_trial(self, now_ms: float) -> None:
        """Let the next suspect have its turn. This one stays a suspect, and ends if an engine dies
        that has it."""
        trial = self.on_trial
        if trial is not None and trial.attempt and now_ms - trial.sent_ms >= TRIAL_MS:
            trial.was_tried, self.on_trial = True, None

    def clear_waiting(self, culprit: ClientRequest) -> None:
        """A death convicts this one. Suspects that the engine did not have keep one death each."""
        for each in self.waiting.values():
            if each.is_suspect and not each.is_inside and each is not culprit:
                each.deaths = 1

    def end_trial(self, request: ClientRequest) -> None:
        """This request is cleared or over."""
        if self.on_trial is request:
            self.on_trial = None

    def queue_again(self) -> None:
        """Requests may have become suspects: find each one's queue anew."""
        self._queues = {rank: [] for rank in Precedence}
        self._delayed = dict(self.waiting)

    def due(
        self, resuming: Callable[[], int], company: Callable[[], int], now_ms: float
    ) -> Iterator[ClientRequest]:
        """Those whose turn it is, one after the other; the caller sends each before the next.

        `resuming` says how many replays are under way, and `company` how many new requests.
        """
        only = next(iter(self.waiting.values())) if len(self.waiting) == 1 else None
        if only is not None and not only.is_suspect and self.on_trial is None:  # nearly always
            is_paused = Precedence.of(only) is Precedence.PAUSED
            is_kept = is_paused and resuming() >= self.resumes_max
            if not is_kept and only.not_before_ms <= now_ms:
                yield only
            return
        self._queue_due(now_ms)
        while (request := self._first(Precedence.PAUSED)) is not None:
            if resuming() >= self.resumes_max:
                return
            yield request
        while (request := self._first(Precedence.AGAIN)) is not None:
            yield request
        if resuming() == 0 and (request := self._next_suspect(now_ms)) is not None:
            yield request
        if not any(self._keeps_new_back(each) for each in self._delayed.values()):
            while (request := self._first(Precedence.NEW)) is not None:
                if self._has_suspects and company() >= COMPANY_MAX:
                    return
                yield request

    def _queue_due(self, now_ms: float) -> None:
        for request in [each for each in self._delayed.values() if each.not_before_ms <= now_ms]:
            del self._delayed[request.number]
            heapq.heappush(self._queues[Precedence.of(request)], request.order_key)

    def _first(self, rank: Precedence) -> ClientRequest | None:
        """The oldest of this queue; what is not waiting here any more is thrown away."""
        queue = self._queues[rank]
        while queue:
            number = queue[0][1]
            request = self.waiting.get(number)
            if (
                request is not None
                and number not in self._delayed
                and Precedence.of(request) is rank
            ):
                return request
            heapq.heappop(queue)
        return None

    @property
    def _first_suspect(self) -> ClientRequest | None:
        return self._first(Precedence.SUSPECT) or self._first(Precedence.SUSPECT_HELD)

    @property
    def _has_suspects(self) -> bool:
        return self.on_trial is not None or self._first_suspect is not None

    def _next_suspect(self, now_ms: float) -> ClientRequest | None:
        if self.on_trial is None:
            self.on_trial = self._first_suspect
            return self.on_trial
        # Its fate is open until it has made progress or has ended, also while it waits itself.
        is_waiting = self.on_trial.number in self.waiting
        return self.on_trial if is_waiting and self.on_trial.not_before_ms <= now_ms else None

    @staticmethod
    def _keeps_new_back(request: ClientRequest) -> bool:
        is_paused = request.state is RequestState.PARKED and not request.is_suspect
        return is_paused and 0 < request.refusals < REFUSALS_THAT_HOLD
