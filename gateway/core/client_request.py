"""One client's request, from the moment it is whole to its last byte: its states, its journal, its
facts.

    waiting ─send→ sent ─hold→ answering ──whole──▶ done
       ▲            │  └─stream→ streaming ──whole──▶ done
       └─break, refusal┘           │    ▲
                              break│    │join
                                   ▼    │
                parked ─send→ resuming ─stream→ replaying
                   ▲──break, refusal──┘──break───┘

Nothing was sent to the client in `waiting`, `sent` and `answering`, so a break there costs it
nothing: the request is sent again. `streaming` has sent something, and a break parks. What is sent
in `relaying` cannot be continued, and a break there is the end. `replaying` sends nothing. `fire`
is the only way to change the state. `requests.py`, `attempts.py` and `queue.py` decide what
follows.

The journal (`Transcript`) says what the events sent to a client amount to, and of which tokens they
were made. The hot path appends to `pending` itself, and events are joined and tokens put in their
place later, many at a time. With a thousand streams nothing of one of them is in the processor's
caches when its next event comes, so what counts is how few objects are touched; and joining many
events at once takes no longer than compressing them would.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol, TypeAlias, cast

from gateway.core.replay import Replay, Rewriter
from gateway.core.replay_join import Joined
from plumbing.errors import InvariantError
from plumbing.gateway_protocol import ITEM_BYTES, Continuation


class RequestState(StrEnum):
    WAITING = "waiting"  # for an engine, or its turn
    SENT = "sent"  # no response yet
    ANSWERING = "answering"  # the answer is held until it is whole
    STREAMING = "streaming"  # events go to the client and into the journal
    RELAYING = "relaying"  # class none: bytes go to the client and are forgotten
    PARKED = "parked"  # a paused stream, for an engine or its turn
    RESUMING = "resuming"  # sent again with its journal, no response yet
    REPLAYING = "replaying"  # the engine plays what the client has
    DONE = "done"


class Turn(StrEnum):
    SEND = "send"
    STREAM = "stream"  # the head of a marked stream
    HOLD = "hold"  # the head of an answer that is held
    RELAY = "relay"  # the head of any other, or an answer that outgrew its limit
    BREAK = "break"
    REFUSE = "refuse"  # not now: 429, 503, connection refused
    JOIN = "join"  # the replay has reached what the client has, and is equal to it
    FORGET = "forget"  # the journal is given up for its memory
    WHOLE = "whole"
    FAIL = "fail"  # a deadline, a final refusal, a mismatch, a third death
    LEAVE = "leave"  # the client is gone


_S, _T = RequestState, Turn

TRANSITIONS: Mapping[tuple[RequestState, Turn], RequestState] = {
    (_S.WAITING, _T.SEND): _S.SENT,
    (_S.SENT, _T.STREAM): _S.STREAMING,
    (_S.SENT, _T.HOLD): _S.ANSWERING,
    (_S.SENT, _T.RELAY): _S.RELAYING,
    (_S.SENT, _T.BREAK): _S.WAITING,
    (_S.SENT, _T.REFUSE): _S.WAITING,
    (_S.ANSWERING, _T.RELAY): _S.RELAYING,
    (_S.ANSWERING, _T.BREAK): _S.WAITING,
    (_S.STREAMING, _T.BREAK): _S.PARKED,
    (_S.STREAMING, _T.FORGET): _S.RELAYING,
    (_S.PARKED, _T.SEND): _S.RESUMING,
    (_S.RESUMING, _T.STREAM): _S.REPLAYING,
    (_S.RESUMING, _T.BREAK): _S.PARKED,
    (_S.RESUMING, _T.REFUSE): _S.PARKED,
    (_S.REPLAYING, _T.BREAK): _S.PARKED,
    (_S.REPLAYING, _T.JOIN): _S.STREAMING,
    (_S.ANSWERING, _T.WHOLE): _S.DONE,
    (_S.STREAMING, _T.WHOLE): _S.DONE,
    (_S.RELAYING, _T.WHOLE): _S.DONE,
    (_S.WAITING, _T.FAIL): _S.DONE,
    (_S.RELAYING, _T.FAIL): _S.DONE,
    (_S.PARKED, _T.FAIL): _S.DONE,
    (_S.RESUMING, _T.FAIL): _S.DONE,
    (_S.REPLAYING, _T.FAIL): _S.DONE,
    **{(state, _T.LEAVE): _S.DONE for state in _S if state is not _S.DONE},
}


class IllegalTurn(InvariantError):
    """A turn that the table does not have for this state. The state is unchanged."""


BLOCK_BYTES = 16 * 1024  # twice as much saves a tenth of the time and costs each stream its size
GROUP_BYTES = 80  # what a group in the block takes beside its events' bytes
TOKEN_MAX = (1 << 32) - 1  # token ids travel as unsigned 32-bit numbers
_ONE = array("I", [1])

# What the events of a group were made of: one token, nearly always, or tokens and chunk sizes.
Made: TypeAlias = "int | tuple[array[int], array[int]]"


class Transcript:
    """The sum of the events so far, and the block that is being filled. `pending`: the events of a
    group, what they were made of, the events of the next one, and so on."""

    __slots__ = ("_chunks", "_events", "_joined", "_tokens", "pending", "room_bytes")

    def __init__(self) -> None:
        self.pending: list[bytes | Made] = []
        self.room_bytes = 0  # what may come before memory is counted again
        self._joined = Joined()
        self._events: list[bytes] = []  # whose tokens have been put in their place
        self._tokens = array("I")
        self._chunks = array("I")

    @property
    def tokens(self) -> array[int]:
        """All token ids, in their order."""
        self._settle()
        return self._tokens

    @property
    def chunks(self) -> array[int]:
        """How many tokens each output of the engine had."""
        self._settle()
        return self._chunks

    @property
    def joined(self) -> Joined:
        """What all events amount to."""
        self.pack()
        return self._joined

    @property
    def packed_bytes(self) -> int:
        """The memory that the sum takes."""
        return self._joined.held_bytes

    def add(self, events: bytes, tokens: Sequence[int], chunks: Sequence[int]) -> None:
        """One more group, of any number of tokens.

        Raises:
            OverflowError: not a token id; nothing was added.
        """
        self.pending += (events, (array("I", tokens), array("I", chunks)))

    def pack(self) -> None:
        """Join the block that is being filled, of whatever size it is."""
        self._settle()
        self._joined.add(b"".join(self._events))
        self._events.clear()

    def _settle(self) -> None:
        """Put the tokens of pending groups in their place."""
        if not self.pending:
            return
        made = cast("list[Made]", self.pending[1::2])
        self._events += cast("list[bytes]", self.pending[::2])
        self.pending.clear()
        try:
            self._tokens.fromlist(cast("list[int]", made))  # all or nothing
            self._chunks += _ONE * len(made)
        except TypeError:  # some are of several tokens, or of none
            for each in made:
                tokens, chunks = (array("I", [each]), _ONE) if isinstance(each, int) else each
                self._tokens += tokens
                self._chunks += chunks


REQUEST_BYTES = 4096  # what a request takes beside its body, in objects here and in the shell
PROGRESS_TOKENS = 32  # so many new tokens say that a request does not kill engines
# An answer without a journal shows no tokens; any engine in use makes 32 in this time.
PROGRESS_MS = 10_000.0


class LiveAttempt(Protocol):
    """The attempt at a request that is under way (`hot_path.Attempt`)."""

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
        *("sent_ms", "lived_ms"),
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
        self.is_lean = False  # class none: sent once, neither journalled nor held
        self.state = RequestState.WAITING

        self.attempt: LiveAttempt | None = None  # while an upstream connection works for it
        self.has_broken = False  # an engine began with it
        self.is_handed_over = False  # by the engine that is granted now
        self.is_inside = False  # an engine had it when it died, if that engine has died
        self.entered_as = 0  # the only attempt by which that engine got it; 0: there were more
        self.sent_ms = now_ms
        self.lived_ms = 0.0  # how long the last engine had it
        self.waits_since_ms = now_ms
        self.held_ms = 0.0  # of that, while no engine could serve it
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

        self.order_key = (0.0, number)  # the smallest of a queue is sent first
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
        change of what this looks at."""
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
        lived_ms = self.lived_ms if self.attempt is None else now_ms - self.sent_ms
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
