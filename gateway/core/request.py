"""One client's request, from the moment it is whole to its last byte.

Only facts, and `fire`, the only way to change the state. What follows from them is decided by
`desk.py` (breaks, ends) and `order.py` (whose turn it is).
"""

from __future__ import annotations

import math
from array import array
from typing import Protocol

from gateway.core.replay import Replay
from gateway.core.rewriting import Rewriter
from gateway.core.states import TRANSITIONS, IllegalTurn, RequestState, Turn
from gateway.core.transcript import BLOCK_BYTES, Transcript
from plumbing.gateway_protocol import ITEM_BYTES, Continuation

REQUEST_BYTES = 4096  # what a request takes beside its body, in objects here and in the shell
PROGRESS_TOKENS = 32  # so many new tokens say that a request does not kill engines
# An answer without a journal shows no tokens; any engine in use makes 32 in this time.
PROGRESS_MS = 10_000.0


class LiveAttempt(Protocol):
    """The attempt at a request that is under way (`attempt.Attempt`)."""

    number: int
    engine: str
    token: int
    is_over: bool
    transcript: Transcript | None


class ClientRequest:
    """One request. `number` is its age among all others."""

    __slots__ = (
        *("number", "path", "body_bytes", "is_inference", "is_stream", "is_lean", "state"),
        *("attempt", "has_broken", "is_handed_over", "is_inside", "entered_as"),
        *("asked_ms", "lived_ms"),
        *("waits_since_ms", "held_ms", "not_before_ms"),
        *("breaks_here", "refusals", "gives_up_ms", "engine_error"),
        *("continuation", "continuation_id", "is_event_stream", "is_at_boundary"),
        *("transcript", "charged_bytes", "held_bytes"),
        *("forgotten_tokens", "replay", "rewriter", "paused_since_ms", "paused_under"),
        *("pauses", "paused_ms", "deaths", "tokens_at_death", "progress_at", "was_tried"),
        *("priority", "order_key", "wait_ms", "was_requeued"),
    )

    def __init__(
        self,
        number: int,
        path: str,
        body_bytes: int,
        *,
        is_inference: bool,
        is_stream: bool,
        now_ms: float,
    ) -> None:
        self.number = number
        self.path = path
        self.body_bytes = body_bytes
        self.is_inference = is_inference
        self.is_stream = is_stream
        self.is_lean = False  # class none: asked once, neither journalled nor held
        self.state = RequestState.WAITING

        self.attempt: LiveAttempt | None = None  # while an upstream connection works for it
        self.has_broken = False  # an engine began with it
        self.is_handed_over = False  # by the engine that is granted now
        self.is_inside = False  # an engine had it when it died, if that engine has died
        self.entered_as = 0  # the only attempt by which that engine got it; 0: there were more
        self.asked_ms = now_ms
        self.lived_ms = 0.0  # how long the last engine had it
        self.waits_since_ms = now_ms
        self.held_ms = 0.0  # of that, while no engine could be asked
        self.not_before_ms = now_ms
        self.breaks_here = 0  # in a row under one grant
        self.refusals = 0  # in a row
        self.gives_up_ms: float | None = None
        self.engine_error = b""  # the error event that the engine put into the stream last

        self.continuation = Continuation.NONE
        self.continuation_id = ""
        self.is_event_stream = False
        self.is_at_boundary = True  # a further event may be sent behind what was relayed
        self.transcript = Transcript()
        self.charged_bytes = 0
        self.held_bytes = 0
        self.forgotten_tokens = 0  # delivered without a journal
        self.replay: Replay | None = None
        self.rewriter: Rewriter | None = None

        self.paused_since_ms: float | None = None
        self.paused_under = 0  # the token of the grant under which it broke
        self.pauses = 0
        self.paused_ms = 0.0

        self.deaths = 0  # of engines that had it, without progress in between
        self.tokens_at_death = 0
        self.progress_at = 0  # tell the desk at so many tokens; 0: never
        self.was_tried = False  # alone as a suspect, for as long as that may take

        self.order_key = (0.0, number)  # the smallest of a queue is asked first
        # In a pool:
        self.priority = 0
        self.wait_ms = math.inf  # for its model, if nothing was sent
        self.was_requeued = False  # it was sent, and its model had to yield before it was answered

    def fire(self, turn: Turn) -> None:
        """Take one turn of the table.

        Raises:
            IllegalTurn: nothing has changed.
        """
        target = TRANSITIONS.get((self.state, turn))
        if target is None:
            raise IllegalTurn(f"request {self.number}: {turn} in state {self.state}")
        self.state = target
        self.steer()

    def steer(self) -> None:
        """Let groups of its attempt pass by `Attempt.passes`, or have each looked at. For every
        change of what is asked here."""
        if self.attempt is not None:
            is_plain = self.state is RequestState.STREAMING and self.rewriter is None
            passes = is_plain and not self.progress_at
            self.attempt.transcript = self.transcript if passes else None

    @property
    def tokens(self) -> array[int]:
        """Of the journal."""
        return self.transcript.tokens

    @property
    def chunks(self) -> array[int]:
        return self.transcript.chunks

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= 2

    @property
    def delivered_tokens(self) -> int:
        return self.forgotten_tokens + len(self.tokens)

    def died(self, now_ms: float) -> None:
        """The engine that had it is dead."""
        self.deaths = 1 if self.made_progress(now_ms) else self.deaths + 1
        self.tokens_at_death = self.delivered_tokens

    def waits_anew(self, now_ms: float) -> None:
        """Until now it did not wait in vain."""
        self.waits_since_ms, self.held_ms = now_ms, 0.0

    def made_progress(self, now_ms: float) -> bool:
        """Whether it has lived long enough since the last death to be above suspicion."""
        if self.is_stream and self.state is not RequestState.RELAYING:
            return self.delivered_tokens - self.tokens_at_death >= PROGRESS_TOKENS
        lived_ms = self.lived_ms if self.attempt is None else now_ms - self.asked_ms
        return lived_ms >= PROGRESS_MS

    def weigh(self) -> int:
        """The memory that it takes from now on, with room for more; the change of it."""
        if self.is_lean:  # nothing is kept, not even the body once it was sent
            change, self.charged_bytes = REQUEST_BYTES - self.charged_bytes, REQUEST_BYTES
            return change
        self.transcript.pack()
        journal_bytes = ITEM_BYTES * (len(self.tokens) + len(self.chunks))
        room = BLOCK_BYTES if self.state is RequestState.STREAMING else 0
        weight = REQUEST_BYTES + self.body_bytes + self.held_bytes + journal_bytes
        weight += self.transcript.packed_bytes + room
        change = weight - self.charged_bytes
        self.charged_bytes = weight
        self.transcript.room_bytes = room
        return change

    def forget_answer(self) -> None:
        """Let go of what a resume would need."""
        self.forgotten_tokens += len(self.tokens)
        self.transcript = Transcript()
