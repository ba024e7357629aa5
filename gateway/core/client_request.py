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
is the only way to change the state. `requests.py` and `queue.py` decide what follows.

An `Attempt` is the request on one upstream connection, and the hot path: bytes in, bytes to the
client out. The shell cuts a marked stream behind each comment of the hop and calls `group`; at
`hop.END` it calls `end`. An answer that is not marked is held, and `hold` told of its bytes, until
`SendHead` says to pass it on; from then on it goes through `raw`. Each returns what to send to the
client now, often nothing: an attempt that is over says nothing, and a replay is not for the client.
After each of them the shell looks at the outbox, as a cold thing may have happened too.

    data = attempt.group(events, tokens, chunks, now_ms)
    if data:
        client.write(data)
    if gateway.outbox:
        perform(gateway.handle(None, now_ms))

The surprising thing: bytes and tokens are taken in by one statement, and the bytes go to the client
in the same call. What a client was sent and what the journal has cannot differ.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gateway.core.events import BreakCause
from gateway.core.replay import (
    BLOCK_BYTES,
    GROUP_BYTES,
    TOKEN_MAX,
    Replay,
    ReplayMismatch,
    Rest,
    Rewriter,
    Transcript,
)
from plumbing.errors import InvariantError
from plumbing.gateway_protocol import Hello
from plumbing.transitions import Table


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

TABLE: Table[RequestState, Turn] = Table(
    {
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
    },
    start=[_S.WAITING],
)


DELIVERING = (RequestState.STREAMING, RequestState.RELAYING)
REQUEST_BYTES = 4096  # what a request takes beside its body, in objects here and in the shell
PROGRESS_TOKENS = 32  # so many new tokens say that a request does not kill engines
# An answer without a journal shows no tokens; any engine in use makes 32 in this time.
PROGRESS_MS = 10_000.0


@dataclass(slots=True, eq=False)
class ClientRequest:
    """One request. `number` is its age among all others."""

    number: int
    path: str
    body_bytes: int
    is_inference: bool
    is_stream: bool
    sent_ms: float
    passing: str | None = None  # a front has its journal, of this continuation id
    unplayed_tokens: int = 0  # of that journal; below 0 once there is a new token
    model: str = ""  # in a pool, and in a fleet:
    key: bytes = b""  # requests with one key share a prefix
    is_lean: bool = False  # class none: sent once, neither journalled nor held
    state: RequestState = RequestState.WAITING

    attempt: Attempt | None = None  # while an upstream connection works for it
    has_broken: bool = False  # an engine began with it
    is_handed_over: bool = False  # by the engine that is granted now
    is_inside: bool = False  # an engine had it when it died, if that engine has died
    entered_as: int = 0  # the only attempt by which that engine got it; 0: there were more
    lived_ms: float = 0.0  # how long the last engine had it
    waits_since_ms: float = field(init=False)
    held_ms: float = 0.0  # of that, while no engine could serve it
    not_before_ms: float = 0.0
    breaks_here: int = 0  # in a row under one grant
    refusals: int = 0  # in a row
    gives_up_ms: float | None = None
    engine_error: bytes = b""  # the error event that the engine put into the stream last

    continuation_id: str = ""
    is_event_stream: bool = False
    is_at_boundary: bool = True  # a further event may be sent behind what was relayed
    transcript: Transcript = field(default_factory=Transcript)
    charged_bytes: int = 0
    held_bytes: int = 0
    forgotten_tokens: int = 0  # delivered without a journal
    replay: Replay | None = None
    rewriter: Rewriter | None = None

    paused_since_ms: float | None = None  # until the first new token, or the end

    deaths: int = 0  # of engines that had it, without progress in between
    tokens_at_death: int = 0
    progress_at: int = 0  # say so at so many tokens; 0: never
    was_tried: bool = False  # alone as a suspect, for as long as that may take

    order_key: tuple[float, int] = field(init=False)  # the smallest of a queue is sent first
    # In a pool:
    priority: int = 0
    was_requeued: bool = False  # it was sent, and its model had to yield before it was answered

    def __post_init__(self) -> None:
        self.waits_since_ms, self.order_key = self.sent_ms, (0.0, self.number)

    def fire(self, turn: Turn) -> None:
        """Take one turn of the table.

        Raises:
            InvariantError: the table does not have it for this state; nothing has changed.
        """
        target = TABLE.target(self.state, turn)
        if target is None:
            raise InvariantError(f"request {self.number}: {turn} in state {self.state}")
        self.state = target
        self.steer()

    def steer(self) -> None:
        """Let groups of its attempt pass by `Attempt.passes`, or have each looked at. For every
        change of what this looks at."""
        if self.attempt is not None:
            is_plain = self.state is RequestState.STREAMING and self.rewriter is None
            passes = is_plain and not self.progress_at and self.paused_since_ms is None
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

    @property
    def is_resumed_by_front(self) -> bool:
        return bool(self.passing)

    @property
    def is_front_stream(self) -> bool:
        """Whether a front has begun to read it, and resumes it elsewhere."""
        is_passed = self.passing is not None and self.state is RequestState.RELAYING
        return is_passed and bool(self.continuation_id)

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
        room = BLOCK_BYTES if self.state is RequestState.STREAMING else 0
        weight = REQUEST_BYTES + self.body_bytes + self.held_bytes + room
        weight += self.transcript.pack()
        change = weight - self.charged_bytes
        self.charged_bytes = weight
        self.transcript.room_bytes = room
        return change

    def forget_answer(self) -> None:
        """Let go of what a resume would need."""
        self.forgotten_tokens += len(self.tokens)
        self.transcript = Transcript()


# An error event of chat and completions, of Responses, of Anthropic messages. No text of a model
# can look like it: inside a JSON string the quotes would be escaped, and lines do not end there.
_ERROR_EVENT = re.compile(
    rb'^data: ?\{ ?"error"|^event: ?error\r?$|^data: ?\{"type": ?"error"', re.MULTILINE
)


class ColdPath(Protocol):
    """What an attempt tells of, all of it rare (`requests.py`)."""

    def broke(self, attempt: Attempt, cause: BreakCause, now_ms: float) -> None: ...
    def joined(self, request: ClientRequest) -> None: ...
    def resumed(self, request: ClientRequest, now_ms: float) -> None: ...
    def mismatched(self, request: ClientRequest, why: str) -> None: ...
    def whole(self, request: ClientRequest) -> None: ...
    def weigh(self, request: ClientRequest) -> None: ...
    def progressed(self, request: ClientRequest) -> None: ...
    def played(self, request: ClientRequest, tokens: int) -> None: ...
    def held(self, attempt: Attempt, size_bytes: int) -> None: ...


class Attempt:
    """`number` is the one of the events; `is_over` once nothing of it may reach the client.
    `continuation_id` is the engine's, from its hello."""

    __slots__ = (
        *("_cold", "continuation_id", "engine", "is_over", "number", "owner", "token"),
        *("transcript", "was_inside"),
    )

    def __init__(
        self, number: int, request: ClientRequest, token: int, hello: Hello, cold: ColdPath
    ) -> None:
        self.number = number
        self.owner = request
        self.engine = hello.engine
        self.token = token
        self.continuation_id = hello.continuation_id
        self.is_over = False
        self.transcript: Transcript | None = None  # the owner's, while groups may just pass
        self.was_inside = request.is_inside
        self._cold = cold

    @property
    def request(self) -> int:
        """The number of the request that it works for."""
        return self.owner.number

    @property
    def is_replaying(self) -> bool:
        """Whether what comes now is compared with what the client has."""
        return self.owner.replay is not None and not self.is_over

    def passes(self, events: bytes, token: int) -> bool:
        """Take in a group of one token, at most `TOKEN_MAX`, that may be sent as it is: nearly
        every one. False: nothing has happened, and `group` is to look at it."""
        transcript = self.transcript
        if transcript is None or events.rfind(b'"error"') >= 0:  # a third of what `in` takes
            return False
        transcript.pending += (events, token)
        transcript.room_bytes -= len(events) + GROUP_BYTES
        if transcript.room_bytes < 0:
            self._cold.weigh(self.owner)
        return True

    def group(self, events: bytes, tokens: list[int], chunks: list[int], now_ms: float) -> bytes:
        """One whole group of a marked stream, its comment cut off. Groups are not merged."""
        request = self.owner
        if self.is_over:
            return b""
        if chunks == [1] and tokens[0] <= TOKEN_MAX and self.passes(events, tokens[0]):
            return events
        if b'"error"' in events and self._is_error(events, now_ms):
            return b""
        if tokens and request.paused_since_ms is not None and request.state in DELIVERING:
            self._cold.resumed(request, now_ms)
        if request.state is not RequestState.STREAMING:
            return self._group_elsewhere(events, tokens, chunks, now_ms)
        if request.rewriter is not None:
            events = request.rewriter.rewrite(events)
        transcript = request.transcript
        try:
            transcript.add(events, tokens, chunks)  # they add up: `hop.read_group_end`
        except OverflowError:  # not a token id
            self._cold.broke(self, BreakCause.GARBAGE, now_ms)
            return b""
        transcript.room_bytes -= len(events) + 8 * len(tokens) + GROUP_BYTES
        if transcript.room_bytes < 0:
            self._cold.weigh(request)
        if request.progress_at and len(request.tokens) >= request.progress_at:
            self._cold.progressed(request)
        return events

    def end(self, events: bytes, now_ms: float) -> bytes:
        """The events in front of `hop.END`; `RequestEnded` is then in the outbox."""
        request = self.owner
        if self.is_over or (b'"error"' in events and self._is_error(events, now_ms)):
            return b""
        if request.state is RequestState.REPLAYING:
            rest = self._replay(events, [], is_last=True)
            if rest is None:
                return b""
            events = rest.events
        elif request.state not in DELIVERING:
            self._cold.broke(self, BreakCause.GARBAGE, now_ms)
            return b""
        if request.paused_since_ms is not None:
            self._cold.resumed(request, now_ms)
        if request.rewriter is not None:
            events = request.rewriter.rewrite(events)
        self._cold.whole(request)
        return events

    def raw(self, data: bytes) -> bytes:
        """Bytes of the body of an answer that is passed on as it comes."""
        if self.is_over:
            return b""
        self.owner.is_at_boundary = data.endswith(b"\n\n")
        return data

    def played(self, tokens: int) -> bool:
        """The shell has passed `tokens` more on to a front. Whether the stream has a new one."""
        if not self.is_over:
            self._cold.played(self.owner, tokens)
        return self.owner.unplayed_tokens < 0

    def hold(self, size_bytes: int) -> None:
        """So many more bytes of the answer are held; over the limit `SendHead` is in the outbox."""
        if not self.is_over and self.owner.state is RequestState.ANSWERING:
            self._cold.held(self, size_bytes)

    def _group_elsewhere(
        self, events: bytes, tokens: list[int], chunks: list[int], now_ms: float
    ) -> bytes:
        """A group of a stream that keeps no journal, or of a replay."""
        if self.owner.state is RequestState.REPLAYING:
            rest = self._replay(events, tokens, is_last=False)
            if rest is None:
                return b""
            # The rest is a group of its own, without the tokens that the journal has already.
            is_new = rest.has_new_tokens
            return self.group(
                rest.events, tokens if is_new else [], chunks if is_new else [], now_ms
            )
        if self.owner.state is not RequestState.RELAYING:  # before its head
            self._cold.broke(self, BreakCause.GARBAGE, now_ms)
            return b""
        self.owner.forgotten_tokens += len(tokens)
        rewriter = self.owner.rewriter  # it was resumed once, when it had a journal
        return events if rewriter is None else rewriter.rewrite(events)

    def _replay(self, events: bytes, tokens: list[int], *, is_last: bool) -> Rest | None:
        """What of a replay is new; None if nothing can be yet, or ever."""
        assert self.owner.replay is not None  # made with the state
        try:
            rest = self.owner.replay.feed(events, tokens, is_last)
        except ReplayMismatch as mismatch:
            self._cold.mismatched(self.owner, str(mismatch))
            return None
        if rest is not None:
            self._cold.joined(self.owner)
        return rest

    def _is_error(self, events: bytes, now_ms: float) -> bool:
        """Whether the engine says in its stream that it failed: a break, not content."""
        found = _ERROR_EVENT.search(events)
        if found is None:
            return False
        # The event alone: behind it vLLM writes the same `[DONE]` as behind a whole answer.
        self.owner.engine_error = events[found.start() :].partition(b"\n\n")[0] + b"\n\n"
        self._cold.broke(self, BreakCause.ERROR_EVENT, now_ms)
        return True
