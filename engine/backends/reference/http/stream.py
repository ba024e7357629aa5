"""An answer as groups: the tokens of one output of the model with their text, and as events.

Owns the order of events and what is one write. Behind a gateway every group ends with the comment
that the private hop asks for (`plumbing/hop.py`), in the same write as its events, also where it
has none: then its tokens made half a character, or what may begin a stop string.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from aiohttp import web

from engine.backends.reference.http.model_link import Generation
from engine.backends.reference.http.replies import DONE, OpenAiReply, TokenUsage, sse
from engine.backends.reference.http.text import AnswerText, Piece
from plumbing import hop

LEAVE_S = 0.2  # most of a switchover is faster
EVENT_STREAM = "text/event-stream"
SSE_HEADERS = {
    "Content-Type": f"{EVENT_STREAM}; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True)
class TokenGroup:
    tokens: Sequence[int]
    piece: Piece


async def groups_of(
    replayed: TokenGroup | None, generation: Generation | None, answer: AnswerText
) -> AsyncIterator[TokenGroup]:
    """The whole answer: what existed before, then what the model makes, up to and including the
    group with the finish reason. `generation` may be None if `replayed` has that."""
    reason = None
    if replayed is not None:
        reason = replayed.piece.finish_reason
        yield replayed
    while reason is None:
        assert generation is not None
        token = await generation.next()
        piece = answer.push(token)
        reason = piece.finish_reason
        yield TokenGroup((token.token,), piece)


class MarkedStream:
    """A gateway's stream, which another engine can continue: what a drain needs to leave it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.has_begun = False
        self.has_ended = False

    def leave(self) -> None:
        """Close the connection behind a whole group, since each is one write, and say so. What the
        gateway does not read in time, because its client does not, is lost to it. One that the
        gateway has left already, to park the stream itself, is left alone."""
        if self.has_ended or self._transport.is_closing():
            return
        if self.has_begun:
            self._transport.write(b"%x\r\n%b\r\n" % (len(hop.HANDED_OVER), hop.HANDED_OVER))
        self._transport.close()
        asyncio.get_running_loop().call_later(LEAVE_S, self._transport.abort)


async def send_stream(
    request: web.Request,
    groups: AsyncIterator[TokenGroup],
    usage: TokenUsage,
    reply: OpenAiReply,
    marked: MarkedStream | None,
) -> web.StreamResponse:
    """`usage` is that of the newest group. `marked`: it is for a gateway."""
    response = web.StreamResponse(headers=SSE_HEADERS)
    if marked is not None:
        response.headers[hop.CONTINUATION] = hop.Continuation.EXACT
    async for group in groups:
        events = b""
        if not response.prepared:
            await response.prepare(request)
            if opening := reply.opening():
                events += sse(opening)
        events += _events(group, usage, reply, marked is not None)
        if marked is not None:
            marked.has_begun, marked.has_ended = True, group.piece.finish_reason is not None
        if events:
            await response.write(events)
    await response.write_eof()
    return response


def _events(group: TokenGroup, usage: TokenUsage, reply: OpenAiReply, is_marked: bool) -> bytes:
    piece = group.piece
    events = sse(reply.chunk(piece.text, usage)) if piece.text else b""
    if piece.finish_reason is not None:
        events += sse(reply.last_chunk(piece.finish_reason, usage))
    if is_marked:
        events += hop.group_end(group.tokens, (len(group.tokens),))
    if piece.finish_reason is not None:
        events += sse(reply.usage_chunk(usage)) if reply.wants_usage else b""
        events += DONE + (hop.END if is_marked else b"")
    return events
