"""One request to an engine and its response, on a connection that is left to the next one.

The hot path of a stream is `data_received`: cut the groups, hand each to the core's attempt, and
write to the client what that returns, in one write. Everything cold goes through `Upstreams`.
Between two events the kernel evicts our code from the processor's caches, so an event takes four
times what a loop over this code takes, and what counts is how little of it is run.

The surprising thing: llhttp calls back from within C, where an exception of ours would look like a
bad response. So the reader only collects, and everything happens after it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import cast

from gateway.core.attempt import Attempt
from gateway.core.events import AnswerBroke, AnswerCame, BreakCause, HeadCame
from gateway.server.groups import GroupCutter, whole_group
from gateway.server.idle_connections import IdleConnection
from gateway.server.responses import ResponseReader
from gateway.server.takeover import Buffer, connect_to, send_now
from gateway.server.upstream_owner import BodySink, Upstreams
from plumbing.gateway_protocol import Continuation

_GROUP_AND_CHUNK_END = b"\n\n\r\n"
SLICE_BYTES = 16 * 1024  # of a replay: some 60 events, a millisecond at most


class Upstream(asyncio.Protocol):
    """One attempt's connection. After `drop` nothing of it reaches anybody."""

    __slots__ = (
        *("_cutter", "_is_behind", "_is_between", "_is_head_told", "_is_passed_on", "_is_paused"),
        *("_is_reused", "_outbox", "_owner", "_replayed", "_request", "_sink", "_socket"),
        *("_transport", "_unsent"),
        *("attempt", "head_since_ms", "held", "is_dropped", "response"),
    )

    def __init__(
        self,
        owner: Upstreams[Upstream],
        attempt: Attempt,
        sink: BodySink,
        request: Sequence[Buffer],
        *,
        is_to_head: bool,
    ) -> None:
        self.attempt = attempt
        self.response: ResponseReader = ResponseReader(is_to_head=is_to_head)
        self.held: list[bytes] = []
        self.head_since_ms: float | None = None  # a head has begun then, and is not whole
        self._owner = owner
        self._outbox = owner.outbox
        self._sink = sink
        self._request = request  # as long as it may have to be sent again
        self._unsent: Sequence[Buffer] = ()
        self._socket: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._is_reused = False
        self._cutter: GroupCutter | None = None
        self._is_between = False  # the next byte begins a chunk and, within it, a group
        self._replayed = bytearray()  # that waits for its turn,
        self._is_behind = False  # and the connection is not read on meanwhile
        self._is_head_told = False
        self._is_passed_on = False
        self.is_dropped = False
        self._is_paused = False

    # ------------------------------------------------------------------ for the owner

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait in this process until the engine takes them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def connect(self, path: str) -> socket.socket:
        """Connect and send the request at once: the engine works while the loop takes the socket
        over, which the caller lets it do. A Unix socket connects without waiting.

        Raises:
            OSError: no socket, nobody listens, its backlog is full, or descriptors have run out.
        """
        connection = connect_to(path)
        try:
            self._unsent = send_now(connection, self._request)
        except OSError:  # it has closed already, as reading will tell
            self._unsent = self._request
        self._socket, self._request = connection, ()
        self._owner.sent(self)
        return connection

    def reuse(self, idle: IdleConnection) -> bool:
        """Send the request on this connection. False: the engine has closed it."""
        try:
            self._unsent = send_now(idle.socket, self._request)
        except OSError:
            idle.transport.abort()
            return False
        self._socket, self._is_reused = idle.socket, True
        idle.transport.set_protocol(self)
        self.connection_made(idle.transport)
        self._owner.sent(self)
        return True

    def drop(self) -> None:
        """Close, at the latest when the loop has taken the socket over."""
        self.is_dropped, self._is_between = True, False
        self.held = []
        if self._transport is not None:
            self._transport.abort()

    def pass_on(self) -> None:
        """The head was sent to the client: what is held follows, and from now on all at once."""
        held, self.held = self.held, []
        self._is_passed_on = True
        if self._cutter is None and held:
            self._send(self.attempt.raw(b"".join(held)))

    def send(self, data: bytes) -> None:
        """Bytes of a tunnel."""
        if self._transport is not None and not self.is_dropped:
            self._transport.write(data)

    def resume(self) -> None:
        """The client has room again."""
        self._is_paused = False
        self._resume_reading()

    def read_slice(self) -> bool:
        """Compare a little more of a replay with what the client has; whether to go on with it."""
        if self.is_dropped or self._cutter is None:
            return False
        data = bytes(self._replayed[:SLICE_BYTES])
        del self._replayed[:SLICE_BYTES]
        self._is_behind = bool(self._replayed)
        self._resume_reading()  # `_cut` may leave the connection to another request
        self._sink.gather()
        self._cut(self._cutter, data)
        if self.response.is_whole and not self._is_behind and not self.is_dropped:
            self._end()
        if self._sink.release():
            self._look_at_room()
        return self._is_behind and not self.is_dropped

    # ------------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.is_dropped:
            self._transport.abort()
        elif self._unsent:
            self._transport.writelines(self._unsent)
        self._unsent = ()

    def data_received(self, data: bytes) -> None:
        if self._is_between and (group := whole_group(data)) is not None:
            events, token = group
            if self.attempt.passes(events, token):
                self._send(events)
            else:
                found = self.attempt.group(events, [token], [1], self._owner.now_ms())
                if found:
                    self._send(found)
            if self._outbox:
                self._owner.perform_outbox()
            return
        if self.is_dropped:
            return
        self._sink.gather()
        self._receive(data)
        if self._sink.release():
            self._look_at_room()

    def _receive(self, data: bytes) -> None:
        response = self.response
        try:
            response.feed(data)
        except ValueError:
            self._break(BreakCause.GARBAGE)
            return
        if not self._is_head_told:
            self._tell_head()
            if not self._is_head_told or self.is_dropped:
                return
        body = b""
        if response.pieces:
            body = response.pieces[0] if len(response.pieces) == 1 else b"".join(response.pieces)
            response.pieces.clear()
        if self._is_behind or (self._cutter is not None and self.attempt.is_replaying):
            self._replayed += body
            if not self._is_behind:
                self._is_behind = True
                self._pause_reading()
                self._owner.replays.add(self)
            return
        if self._cutter is not None:
            self._cut(self._cutter, body)
            # What follows the last group then is no byte of the body, so it is the chunk's end.
            self._is_between = self._cutter.is_between and data.endswith(_GROUP_AND_CHUNK_END)
        elif body:
            self._receive_unmarked(body)
        if response.is_whole and not self.is_dropped:
            self._end()

    def pause_writing(self) -> None:
        """The engine takes a tunnel's bytes slower than they come; a request's are all here."""
        if self.response.is_switched:
            self._sink.pause_reading()

    def resume_writing(self) -> None:
        if self.response.is_switched:
            self._sink.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._was_unread(error):
            self._transport, self._is_reused = None, False
            self._owner.connect(self)
            return
        self.response.close()
        if self.is_dropped:
            return
        response = self.response
        is_complete = response.is_switched or (
            response.has_head
            and response.ends_with_connection
            and error is None
            and response.continuation is Continuation.NONE
        )
        if is_complete:
            self._end()
        else:
            self._break(BreakCause.CLOSED)

    def _was_unread(self, error: Exception | None) -> bool:
        """Whether the engine has closed a connection that was idle before it saw the request."""
        is_silent = self.head_since_ms is None and not self._is_head_told
        is_reset = isinstance(error, (ConnectionResetError, BrokenPipeError))
        return self._is_reused and is_reset and is_silent and not self.is_dropped

    def _send(self, data: bytes) -> None:
        """To the client; if it is full, nothing more is read for it. A replay, of which it gets
        nothing, is read all the same: others may wait for its turn to end."""
        self._sink.send_body(data)
        self._look_at_room()

    def _look_at_room(self) -> None:
        if self._sink.is_full and not self._is_paused:
            self._is_paused = True
            self._pause_reading()

    def _pause_reading(self) -> None:
        if self._transport is not None and not self.is_dropped:
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        is_wanted = not self._is_paused and not self._is_behind and not self.is_dropped
        if self._transport is not None and is_wanted:
            self._transport.resume_reading()

    def _tell_head(self) -> None:
        response = self.response
        if not response.has_head:
            if self.head_since_ms is None:
                self.head_since_ms = self._owner.now_ms()
            return
        self._is_head_told, self.head_since_ms = True, None
        self._request = ()
        head = HeadCame(
            self.attempt.number,
            response.status,
            response.engine,
            response.token,
            response.continuation,
            response.is_event_stream,
        )
        if head.is_marked:
            self._cutter = GroupCutter()
        self._owner.handle(head)

    def _receive_unmarked(self, data: bytes) -> None:
        if self._is_passed_on:
            self._send(self.attempt.raw(data))
            return
        self.held.append(data)
        self.attempt.hold(len(data))
        if self._outbox:
            self._owner.perform_outbox()

    def _end(self) -> None:
        """The response is over, as HTTP sees it; a stream without `END` is none to the core."""
        self._leave_connection()  # but its answer is kept
        self._owner.handle(AnswerCame(self.attempt.number))

    def _leave_connection(self) -> None:
        """The answer is over: leave the connection to another request, if nothing is odd."""
        self.is_dropped, self._is_between = True, False
        transport, self._transport = self._transport, None
        if transport is None or self._socket is None:
            return
        response = self.response
        is_read = not self._is_paused and not self._is_behind
        is_flowing = is_read and not transport.get_write_buffer_size()
        if response.status == 200 and response.keeps_alive and is_flowing:
            grant = (self.attempt.engine, self.attempt.token)
            kept = self._owner.idle_connections
            kept.keep(grant, transport, self._socket, is_over=response.is_whole)
        else:
            transport.abort()
        response.close()

    def _cut(self, cutter: GroupCutter, data: bytes) -> None:
        attempt, outbox = self.attempt, self._outbox
        now_ms = self._owner.now_ms()
        out: list[bytes] = []
        for events, tokens, chunks in cutter.feed(data):
            found = attempt.group(events, tokens, chunks, now_ms)
            if found:
                out.append(found)
            if outbox:
                self._flush(out)
                self._owner.perform_outbox()
                if self.is_dropped:
                    return
        if cutter.last is not None:
            found = attempt.end(cutter.last, now_ms)
            if found:
                out.append(found)
            self._flush(out)
            self._leave_connection()
            self._owner.perform_outbox()
            return
        if out:
            self._flush(out)
        if cutter.broken is not None:
            self._break(cutter.broken)

    def _flush(self, out: list[bytes]) -> None:
        if out:
            self._send(out[0] if len(out) == 1 else b"".join(out))
            out.clear()

    def _break(self, cause: BreakCause) -> None:
        self.drop()
        self._owner.handle(AnswerBroke(self.attempt.number, cause))
