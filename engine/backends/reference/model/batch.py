"""Which sequence runs next, in which slot, and when it is finished: a pure scheduler.

Owns the slots (each a stretch of KV memory for one sequence), the queue before them and the
progress of every sequence. Knows no logits, no clock and no sockets: `next_work` hands out one
unit of work, the caller does it and reports the resulting token. The running sequences take turns,
so a long prompt never delays the others by more than one chunk.

The surprising thing: work is cut by *position in the sequence* only, never by what else is
running. Float sums depend on how a matrix product is cut, so this is what makes a sequence's
logits bit-identical alone and in a batch. For the same reason the tokens of an answer that is
resumed are run one at a time, as when they were made, and not in the chunks of a prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from engine.backends.reference.link import FinishReason, SamplingParams, finish_reason
from plumbing.errors import InvariantError

# Tokens per prefill unit: large enough that a matrix product is efficient, small enough that a
# 1 B model on one core shows progress well within the 3 s after which generation counts as hung.
PREFILL_CHUNK = 32


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate; `id` is the caller's and unique among unfinished requests."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    made: tuple[int, ...] = ()  # resumed: the tokens of the answer so far, which did not end it
    attempt: bytes = b""  # its name for the gateway


@dataclass(frozen=True, slots=True)
class Work:
    """Run `tokens` of a request's sequence, the first at position `start`, through slot `slot`.

    `samples`: the last token's logits choose the next token, the `index`-th of the answer.
    """

    request: Request
    slot: int
    tokens: tuple[int, ...]
    start: int
    samples: bool
    index: int


@dataclass(slots=True)
class _Running:
    request: Request
    slot: int
    position: int = 0  # tokens of this sequence that are in the KV cache
    made: int = 0  # tokens of the answer so far
    last: int = -1  # the newest of them


class Scheduler:
    """Continuous batching over a fixed number of slots, first come first served."""

    def __init__(self, slots: int, max_context: int) -> None:
        self._max_context = max_context
        self._free = list(range(slots))[::-1]
        self._waiting: dict[int, Request] = {}  # in order of arrival
        self._running: dict[int, _Running] = {}
        self._turns: deque[int] = deque()  # ids of running sequences, the next one first
        self._handed_out: Work | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Start a request, or queue it. The HTTP process has checked it and limits their number."""
        total = len(request.prompt) + len(request.made)
        fits = len(request.prompt) > 0 and total < self._max_context
        fits = fits and request.max_tokens > len(request.made)
        if not fits or request.id in self._waiting or request.id in self._running:
            raise InvariantError(f"request {request.id} is a duplicate or does not fit the context")
        if self._free:
            self._start(request)
        else:
            self._waiting[request.id] = request

    def cancel(self, request_id: int) -> bool:
        """Forget a request; its slot is free at once. False if it is unknown or finished."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        if request_id not in self._running:
            return False
        if self._handed_out is not None and self._handed_out.request.id == request_id:
            raise InvariantError(f"request {request_id} cancelled while its work is under way")
        self._finish(request_id)
        return True

    def next_work(self, resting: Collection[int] = ()) -> Work | None:
        """The next unit, or None when nothing runs. Report it by `done` before asking again.

        The requests of `resting` make no token now.
        """
        if self._handed_out is not None:
            raise InvariantError("work handed out twice without `done`")
        for _ in range(len(self._turns)):
            sequence = self._running[self._turns[0]]
            self._turns.rotate(-1)
            work = _work(sequence)
            if not work.samples or work.request.id not in resting:
                self._handed_out = work
                return work
        return None

    def skip(self, work: Work, position: int) -> Work:
        """The unit at `position` instead of `work`, a request's first: what is before it is in the
        KV cache already."""
        if work is not self._handed_out or work.start:
            raise InvariantError(f"not the work that was handed out, or not the first: {work}")
        sequence = self._running[work.request.id]
        sequence.position = position
        self._handed_out = _work(sequence)
        return self._handed_out

    def done(self, work: Work, token: int | None) -> FinishReason | None:
        """`work` is in the KV cache and gave `token`, if it samples; why that ends the request."""
        if work is not self._handed_out or (token is None) == work.samples:
            raise InvariantError(f"not the work that was handed out, or no token: {work} {token}")
        self._handed_out = None
        sequence = self._running[work.request.id]
        sequence.position += len(work.tokens)
        if token is None:
            return None
        sequence.made += 1
        sequence.last = token
        request = work.request
        most = min(request.max_tokens, self._max_context - len(request.prompt))
        reason = finish_reason(token, sequence.made, most, request.stop_token_ids)
        if reason is not None:
            self._finish(request.id)
        return reason

    def _start(self, request: Request) -> None:
        self._running[request.id] = _Running(request, self._free.pop(), made=len(request.made))
        self._turns.append(request.id)

    def _finish(self, request_id: int) -> None:
        self._free.append(self._running.pop(request_id).slot)
        self._turns.remove(request_id)
        if self._waiting:
            self._start(self._waiting.pop(next(iter(self._waiting))))


def prefill_end(start: int, prompt_tokens: int) -> int:
    """Where the prefill unit that begins at position `start` ends: a function of position only."""
    return min((start // PREFILL_CHUNK + 1) * PREFILL_CHUNK, prompt_tokens)


def _work(sequence: _Running) -> Work:
    request, start = sequence.request, sequence.position
    behind_prompt = start - len(request.prompt)
    if behind_prompt < 0:
        end = prefill_end(start, len(request.prompt))
        samples = end == len(request.prompt) and not request.made
        return Work(
            request, sequence.slot, request.prompt[start:end], start, samples, sequence.made
        )
    is_replayed = behind_prompt < len(request.made)
    token = request.made[behind_prompt] if is_replayed else sequence.last
    samples = behind_prompt + 1 >= len(request.made)
    return Work(request, sequence.slot, (token,), start, samples, sequence.made)
