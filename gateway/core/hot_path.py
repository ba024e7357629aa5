"""One request on one upstream connection, and the hot path: bytes in, bytes to the client out.

The shell cuts a marked stream behind each comment of the hop and calls `group`; at `hop.END` it
calls `end`. An answer that is not marked is held, and `hold` told of its bytes, until `SendHead`
says to pass it on; from then on it goes through `raw`. Each returns what to send to the client now,
often nothing: an attempt that is over says nothing, and a replay is not for the client. After each
of them the shell looks at `Gateway.outbox`, as a cold thing may have happened too.

    data = attempt.group(events, tokens, chunks, now_ms)
    if data:
        client.write(data)
    if gateway.outbox:
        perform(gateway.take())

The surprising thing: bytes and tokens are taken in by one statement, and the bytes go to the client
in the same call. What a client was sent and what the journal has cannot differ.
"""

from __future__ import annotations

import re
from typing import Protocol

from gateway.core.client_request import (
    GROUP_BYTES,
    TOKEN_MAX,
    ClientRequest,
    RequestState,
    Transcript,
)
from gateway.core.events import BreakCause
from gateway.core.replay import ReplayMismatch, Rest

# An error event of chat and completions, of Responses, of Anthropic messages. No text of a model
# can look like it: inside a JSON string the quotes would be escaped, and lines do not end there.
_ERROR_EVENT = re.compile(
    rb'^data: ?\{ ?"error"|^event: ?error\r?$|^data: ?\{"type": ?"error"', re.MULTILINE
)


class ColdPath(Protocol):
    """What an attempt tells of, all of it rare (`attempts.py`)."""

    def broke(self, attempt: Attempt, cause: BreakCause, now_ms: float) -> None: ...
    def joined(self, request: ClientRequest, now_ms: float) -> None: ...
    def mismatched(self, request: ClientRequest, why: str) -> None: ...
    def finished(self, request: ClientRequest) -> None: ...
    def weigh(self, request: ClientRequest) -> None: ...
    def progressed(self, request: ClientRequest) -> None: ...
    def held(self, attempt: Attempt, size_bytes: int) -> None: ...


class Attempt:
    """`number` is the one of the events; `is_over` once nothing of it may reach the client.
    `continuation_id` is the engine's, from its hello."""

    __slots__ = (
        *("_cold", "continuation_id", "engine", "is_over", "number", "owner", "token"),
        *("transcript", "was_inside"),
    )

    def __init__(
        self,
        number: int,
        request: ClientRequest,
        engine: str,
        token: int,
        continuation_id: str,
        cold: ColdPath,
    ) -> None:
        self.number = number
        self.owner = request
        self.engine = engine
        self.token = token
        self.continuation_id = continuation_id
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
        """The events in front of `hop.END`; `EndAnswer` is then in the outbox."""
        request = self.owner
        if self.is_over or (b'"error"' in events and self._is_error(events, now_ms)):
            return b""
        if request.state is RequestState.REPLAYING:
            rest = self._replay(events, [], now_ms, is_last=True)
            if rest is None:
                return b""
            events = rest.events
        elif request.state not in (RequestState.STREAMING, RequestState.RELAYING):
            self._cold.broke(self, BreakCause.GARBAGE, now_ms)
            return b""
        if request.rewriter is not None:
            events = request.rewriter.rewrite(events)
        self._cold.finished(request)
        return events

    def raw(self, data: bytes) -> bytes:
        """Bytes of the body of an answer that is passed on as it comes."""
        if self.is_over:
            return b""
        self.owner.is_at_boundary = data.endswith(b"\n\n")
        return data

    def hold(self, size_bytes: int) -> None:
        """So many more bytes of the answer are held; over the limit `SendHead` is in the outbox."""
        if not self.is_over and self.owner.state is RequestState.ANSWERING:
            self._cold.held(self, size_bytes)

    def _group_elsewhere(
        self, events: bytes, tokens: list[int], chunks: list[int], now_ms: float
    ) -> bytes:
        """A group of a stream that keeps no journal, or of a replay."""
        if self.owner.state is RequestState.REPLAYING:
            rest = self._replay(events, tokens, now_ms, is_last=False)
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

    def _replay(
        self, events: bytes, tokens: list[int], now_ms: float, *, is_last: bool
    ) -> Rest | None:
        """What of a replay is new; None if nothing can be yet, or ever."""
        assert self.owner.replay is not None  # made with the state
        try:
            rest = self.owner.replay.feed(events, tokens, is_last)
        except ReplayMismatch as mismatch:
            self._cold.mismatched(self.owner, str(mismatch))
            return None
        if rest is not None:
            self._cold.joined(self.owner, now_ms)
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
