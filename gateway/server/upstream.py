"""One request to an engine and its response, on a connection that is left to the next one.

The hot path of a stream is `data_received`: cut the groups, hand each to the core's attempt, and
write to the client what that returns, in one write. Everything cold goes through `Upstreams`.
Between two events the kernel evicts our code from the processor's caches, so an event takes four
times what a loop over this code takes, and what counts is how little of it is run. llhttp calls
back from within C, where an exception of ours would look like a bad response, so the reader only
collects, and everything happens after it.

A replay takes a microsecond or more for each token, and a failover starts many long ones at once.
So they are read in slices, in turns, `TURN_S` in each turn of the loop: clients, other streams and
the watchdog's beat wait no longer for them.

Using an idle connection again saves a connect here, and an accept and a turn of the loop in the
engine. Idle connections do not delay a drain: the engine closes them at the end. Anything that
happens on one ends it, but for the last chunk of the answer before, which many servers write behind
everything else. A request may cross the engine's close. On a Unix socket the kernel says whether
the engine has read it: sending fails, or reading does with ECONNRESET, if it has not. Only such a
request is sent again; end of file is a break, as on any other connection.

`GroupCutter` cuts a marked stream behind the hop's comments and does not look into events. A dying
engine may write an error event that no comment follows, and keep its connection. Such an event is a
group of its own: the core knows what it means.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, cast

from gateway.core.client_request import Attempt
from gateway.core.events import AnswerEnded, BreakCause, GatewayEffect, GatewayEvent, HeadCame
from gateway.core.fleet import AHEAD_MS
from gateway.server.channels import Buffer
from gateway.server.client import ClientConnection
from gateway.server.responses import ResponseReader
from plumbing.gateway_protocol import END, GROUP_MARK, HANDED_OVER, Continuation, read_group_end


def send_now(connection: socket.socket, parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """Send as much as the kernel takes now; what remains.

    Raises:
        OSError: the other side has closed, or nothing can be taken.
    """
    sent_bytes = connection.sendmsg(parts)
    left: list[Buffer] = []
    for part in parts:
        if sent_bytes < len(part):
            left.append(memoryview(part)[sent_bytes:])
        sent_bytes = max(0, sent_bytes - len(part))
    return left


IDLE_MAX = 32  # of one engine: as many as clients are accepted in one turn of the loop
# Engines close theirs after five seconds (uvicorn), so requests hardly ever cross that.
IDLE_S = 2.0
_LAST_CHUNK = b"0\r\n\r\n"

Grant: TypeAlias = "tuple[str, int]"  # of an engine, by id and token


class IdleConnection(asyncio.Protocol):
    """One of them, from when it is a connection's protocol. `is_over`: the answer before has ended
    with its last byte."""

    transport: asyncio.Transport

    def __init__(self, owner: IdleConnections, grant: Grant, *, is_over: bool = True) -> None:
        self._owner, self.grant, self.is_over = owner, grant, is_over
        self.since_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._owner.keep(self)

    def data_received(self, data: bytes) -> None:
        if self.is_over or data != _LAST_CHUNK:
            self._owner.close(self)
        self.is_over = True

    def eof_received(self) -> None:
        self._owner.close(self)  # `connection_lost` comes a turn later, and a request maybe before

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.forget(self)


class IdleConnections(dict[Grant, dict[IdleConnection, None]]):
    """Those of one gateway. Each is for requests to one engine under one grant; of each grant the
    longest idle is first."""

    most, idle_s = IDLE_MAX, IDLE_S

    def keep(self, idle: IdleConnection) -> None:
        """Take it; the one that has been idle longest gives its place up."""
        same = self.get(idle.grant, {})
        if len(same) >= self.most:
            self.close(next(iter(same)))
        self.setdefault(idle.grant, {})[idle] = None

    def find(self, grant: Grant) -> IdleConnection | None:
        """The one that was used last, for one more request."""
        for idle in reversed(self.get(grant, {})):
            if idle.is_over:
                self.forget(idle)
                return idle
        return None

    def forget(self, idle: IdleConnection) -> None:
        same = self.get(idle.grant, {})
        same.pop(idle, None)
        if not same:
            self.pop(idle.grant, None)

    def close(self, *which: IdleConnection) -> None:
        for idle in which:
            self.forget(idle)
            idle.transport.abort()

    def close_old(self, idle_s: float) -> None:
        """Close those that have been idle for `idle_s`."""
        now_s = time.monotonic()
        for same in list(self.values()):
            self.close(*[each for each in same if now_s - each.since_s >= idle_s])


TURN_S = 0.005  # a slice more is less than twice that, unless one event has megabytes


class Upstreams(Protocol):
    """Who opens these connections: the shell around the core."""

    replays: ReplayTurns

    def connect(self, upstream: Upstream) -> None: ...
    def handle(self, event: GatewayEvent) -> None: ...
    def perform_outbox(self) -> None: ...
    @property
    def idle_connections(self) -> IdleConnections: ...
    @property
    def outbox(self) -> Sequence[GatewayEffect]:
        """Always the same one."""

    def now_ms(self) -> float: ...


class ReplayTurns:
    """The replays that have something to read."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Upstream] = deque()

    def add(self, upstream: Upstream) -> None:
        """Call its `read_slice` until that says that there is no more."""
        if not self._waiting:
            self._loop.call_soon(self._take_turns)
        self._waiting.append(upstream)

    def _take_turns(self) -> None:
        end_s = time.monotonic() + TURN_S
        while self._waiting:
            upstream = self._waiting.popleft()
            if upstream.read_slice():
                self._waiting.append(upstream)
            if time.monotonic() >= end_s:
                break
        if self._waiting:
            self._loop.call_soon(self._take_turns)


_CHUNK_END = b"\n\n\r\n"  # of one with whole events
SLICE_BYTES = 16 * 1024  # of a replay: some 60 events, a millisecond at most


class Upstream(asyncio.Protocol):
    """One attempt's connection. After `drop` nothing of it reaches anybody."""

    __slots__ = (
        *("_client", "_cutter", "_is_between", "_is_passed_on", "_is_passing", "_is_paused"),
        *("_is_reused", "_is_to_pod", "_journal_cutter", "_outbox", "_owner", "_replayed"),
        *("_request", "_transport", "attempt", "held", "is_dropped", "response"),
    )

    def __init__(
        self,
        owner: Upstreams,
        attempt: Attempt,
        client: ClientConnection,
        request: Sequence[Buffer],
        *,
        is_to_head: bool,
        is_to_pod: bool = False,
    ) -> None:
        """`is_to_pod`: the pod's gateway signs it."""
        self._is_passing = attempt.owner.passing is not None  # the answer keeps its marks
        self._is_to_pod = is_to_pod
        self.attempt = attempt
        self.response: ResponseReader = ResponseReader(is_to_head=is_to_head)
        self.held: list[bytes] = []
        self._owner = owner
        self._outbox = owner.outbox
        self._client = client
        self._request = request  # what is to be sent, or may have to be sent again
        self._transport: asyncio.Transport | None = None
        self._is_reused = False  # the connection, and nothing of the response has come
        self._cutter: GroupCutter | None = None
        self._is_between = False  # the next byte begins a chunk and, within it, a group
        # Of a front's resume, until what is passed on is new.
        self._journal_cutter = GroupCutter() if attempt.owner.is_resumed_by_front else None
        self._replayed = bytearray()  # that waits for its turn; nothing more is read meanwhile
        self._is_passed_on = False
        self.is_dropped = False
        self._is_paused = False

    # ------------------------------------------------------------------ for the owner

    def connect(self, path: str) -> socket.socket:
        """Connect and send the request at once: the engine works while the loop takes the socket
        over, which the caller lets it do. A Unix socket connects without waiting.

        Raises:
            OSError: no socket, no listener, its backlog is full, or descriptors have run out.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        with contextlib.suppress(OSError):  # it has closed already, as reading will tell
            self._request = send_now(connection, self._request)
        return connection

    def reuse(self, idle: IdleConnection) -> None:
        """Send the request on this connection; on another one, if the engine has closed it."""
        self._is_reused = True
        idle.transport.set_protocol(self)
        self.connection_made(idle.transport)

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
        self._resume_reading()  # `_cut` may leave the connection to another request
        self._client.gather()
        self._cut(self._cutter, data)
        if self.response.is_whole and not self._replayed and not self.is_dropped:
            self._end()
        if self._client.release():
            self._await_room()
        return bool(self._replayed) and not self.is_dropped

    # ------------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.is_dropped:
            self._transport.abort()
        elif self._request:
            self._transport.writelines(self._request)
        if not self._is_reused:
            self._request = ()

    def data_received(self, data: bytes) -> None:
        if self._is_between and self._is_passing:
            if is_whole_chunk(data):
                if self._client.send_chunks(data):
                    self._await_room()
                return
        elif self._is_between and (group := whole_group(data)) is not None:
            events, token = group
            if not self.attempt.passes(events, token):
                events = self.attempt.group(events, [token], [1], self._owner.now_ms())
            if self._client.send_body(events):
                self._await_room()
            if self._outbox:
                self._owner.perform_outbox()
            return
        if self.is_dropped:
            return
        self._client.gather()
        self._receive(data)
        if self._client.release():
            self._await_room()

    def _receive(self, data: bytes) -> None:
        response, self._is_reused = self.response, False
        is_new = not response.has_head
        try:
            response.feed(data)
        except ValueError:
            self._break(BreakCause.GARBAGE)
            return
        if is_new and response.has_head:
            self._tell_head()
        if self.is_dropped or not response.has_head:
            return
        body = b""
        if response.pieces:
            body = response.pieces[0] if len(response.pieces) == 1 else b"".join(response.pieces)
            response.pieces.clear()
        if self._replayed or (body and self._cutter is not None and self.attempt.is_replaying):
            if not self._replayed:
                self._pause_reading()
                self._owner.replays.add(self)
            self._replayed += body
            return
        if self._cutter is not None:
            self._cut(self._cutter, body)
            # What follows the last group then is no byte of the body, so it is the chunk's end.
            self._is_between = self._cutter.is_between and data.endswith(_CHUNK_END)
        elif body:
            self._receive_unmarked(body)
            if self._journal_cutter is not None and not self.is_dropped:
                self._count_played(self._journal_cutter, body)
            elif self._is_passing and self._is_passed_on:
                # What is behind the body's last byte is the chunk's end.
                self._is_between = body.endswith(b"\n\n") and data.endswith(_CHUNK_END)
        if response.is_whole and not self.is_dropped:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if self._was_unread(error):
            self._transport, self._is_reused = None, False
            self._owner.connect(self)
            return
        self.response.close()
        if self.is_dropped:
            return
        response = self.response
        is_complete = (
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
        is_reset = isinstance(error, (ConnectionResetError, BrokenPipeError))
        return self._is_reused and is_reset and not self.is_dropped

    def _send(self, data: bytes) -> None:
        """To the client; if it is full, nothing more is read for it. A replay, of which it gets
        nothing, is read all the same: others may wait for its turn to end."""
        if self._client.send_body(data):
            self._await_room()

    def _await_room(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._pause_reading()

    def _pause_reading(self) -> None:
        if self._transport is not None and not self.is_dropped:
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        is_wanted = not self._is_paused and not self._replayed and not self.is_dropped
        if self._transport is not None and is_wanted:
            self._transport.resume_reading()

    def _tell_head(self) -> None:
        response = self.response
        self._request = ()
        engine, token = response.engine, response.token
        if self._is_to_pod:
            token = response.incarnation
            engine = self.attempt.engine if token else ""
        head = HeadCame(
            *(self.attempt.number, response.status, engine, token),
            response.continuation,
            response.is_event_stream,
            response.token,
            response.continuation_id,
        )
        if head.is_marked and not self._is_passing:
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

    def _count_played(self, cutter: GroupCutter, data: bytes) -> None:
        tokens = sum(len(tokens) for _, tokens, _ in cutter.feed(data))
        if self.attempt.played(tokens) or cutter.broken is not None:
            self._journal_cutter = None
            self._owner.perform_outbox()  # another one may be sent, and a turn begins

    def _end(self) -> None:
        """The response is over, as HTTP sees it; a stream without `END` is none to the core."""
        self._leave_connection()  # but its answer is kept
        self._owner.handle(AnswerEnded(self.attempt.number))

    def _leave_connection(self) -> None:
        """The answer is over: leave an engine's connection to another request, if nothing is
        odd."""
        self.is_dropped, self._is_between = True, False
        transport, self._transport = self._transport, None
        if transport is None:
            return
        response = self.response
        is_read = not self._is_paused and not self._replayed and not self._is_to_pod
        is_flowing = is_read and not transport.get_write_buffer_size()
        if response.status == 200 and response.keeps_alive and is_flowing:
            grant, kept = (self.attempt.engine, self.attempt.token), self._owner.idle_connections
            idle = IdleConnection(kept, grant, is_over=response.is_whole)
            transport.set_protocol(idle)
            idle.connection_made(transport)
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
        self._owner.handle(AnswerEnded(self.attempt.number, cause))


class PrefillAhead(asyncio.Protocol):
    """A resume that a pod gets while another one still has the stream. It is dropped at its first
    new token, so the pod's prefix cache has what the stream needs when it comes, or when it has
    taken as long as the front waits for it."""

    def __init__(self, request: Sequence[Buffer], tokens: int, done: Callable[..., object]) -> None:
        """`tokens`: of the journal. `done(is_broken=True)`: the pod ended it."""
        self._request, self._left, self._done, self._is_dropped = request, tokens, done, False
        self._response, self._cutter = ResponseReader(is_to_head=False), GroupCutter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.writelines(self._request)
        self._deadline = asyncio.get_running_loop().call_later(AHEAD_MS / 1000, self._drop)

    def _drop(self) -> None:
        self._is_dropped = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        response = self._response
        try:
            response.feed(data)
            for _, tokens, _ in self._cutter.feed(b"".join(response.pieces)):
                self._left -= len(tokens)
        except ValueError:
            self._transport.abort()
            return
        response.pieces.clear()
        if self._left < 0 or response.is_whole:
            self._drop()

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self._response.close()
        self._done(is_broken=not self._is_dropped)


# The events of one output of an engine, at most: those of a long prompt's logprobs are some MiB.
GROUP_BYTES_MAX = 16 << 20

_MARK_IN_LINE = b"\n" + GROUP_MARK
# How engines report their own end within a stream: OpenAI's form and Anthropic's.
_ERRORS = (b'data: {"error"', b"event: error")
_NEWLINE = ord("\n")
_ONE_TOKEN = b"|1\n\n\r\n"  # ends a chunk with one group of one token
_TOKEN_DIGITS_MAX = 9  # so that it is less than 32 bits; larger ones are parsed

# At the beginning of a line, up to an empty one; the look behind follows, since a search for what
# begins with text is fast.
_COMMENT = re.compile(rb"%b(?<![^\n]%b)(.*?)\n\n" % (GROUP_MARK, GROUP_MARK), re.DOTALL)

# The size of a chunk as it is nearly always written, by the length of the chunk with its framing.
_SIZES = {
    len(line) + size + 2: line
    for size, line in ((each, b"%x\r\n" % each) for each in range(1, 4096))
}

# Whole events, and the tokens and chunks that they were made of.
MarkedGroup: TypeAlias = "tuple[bytes, list[int], list[int]]"


def is_whole_chunk(data: bytes) -> bool:
    """Whether `data` is one chunk of HTTP with whole events, as it nearly always is."""
    size_line = _SIZES.get(len(data))
    return size_line is not None and data.startswith(size_line) and data.endswith(_CHUNK_END)


def whole_group(data: bytes) -> tuple[bytes, int] | None:
    """The events and the token of `data` as it is nearly always: one chunk of HTTP with one group
    of one token, and no more.

    Behind a whole chunk and a whole group it need not be parsed then. None: parse it. Only digits
    are between the first mark and the end, so there is no other one.
    """
    size_line = _SIZES.get(len(data))
    end = data.find(_MARK_IN_LINE)
    token = data[end + len(_MARK_IN_LINE) : -len(_ONE_TOKEN)]
    if (
        size_line is None
        or end < 0
        or not token.isdigit()
        or len(token) > _TOKEN_DIGITS_MAX
        or not data.startswith(size_line)
        or not data.endswith(_ONE_TOKEN)
    ):
        return None
    return data[len(size_line) : end + 1], int(token)


class GroupCutter:
    """One stream. A group that is not whole waits in `_rest`, and is lost when the stream breaks.

    `last`: the events in front of `END`, once that has come. `broken`: why nothing more can follow;
    the groups before that are good.
    """

    def __init__(self) -> None:
        self.last: bytes | None = None
        self.broken: BreakCause | None = None
        self._rest = bytearray()
        self._seen = 0  # bytes of `_rest` in which no comment begins

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins a group."""
        return not self._rest and self.broken is None and self.last is None

    def feed(self, data: bytes) -> list[MarkedGroup]:
        """The groups that are whole now."""
        if self.broken is not None or self.last is not None:
            return []
        if not self._rest:
            return self._cut(data)
        self._rest += data
        if self._rest.find(_MARK_IN_LINE, self._seen) < 0 and not self._is_over():
            self._look_at_rest()
            return []
        return self._cut(bytes(self._rest))

    def _is_over(self) -> bool:
        """Whether `_rest`, without a comment behind others, is to be looked at as a whole,
        which is not done for each of many events: it is copied then."""
        rest = self._rest
        is_begun = rest.startswith((GROUP_MARK, *_ERRORS))
        return is_begun or rest.endswith((END, HANDED_OVER))

    def _cut(self, data: bytes) -> list[MarkedGroup]:
        groups: list[MarkedGroup] = []
        parts = _COMMENT.split(data)
        try:
            for events, made in zip(parts[:-1:2], parts[1::2], strict=True):
                if made.endswith(b"|1") and made[:-2].isdigit():  # nearly always
                    groups.append((events, [int(made[:-2])], [1]))
                else:
                    groups.append((events, *read_group_end(b"%b%b\n\n" % (GROUP_MARK, made))))
        except ValueError:
            self.broken = BreakCause.GARBAGE
            return groups
        self._seen = 0 if groups else self._seen
        self._keep(data, len(data) - len(parts[-1]))
        if self._rest.startswith(_ERRORS) and b"\n\n" in self._rest:
            groups.append((bytes(self._rest), [], []))
            self._rest.clear()
            self._seen = 0
        return groups

    def _keep(self, data: bytes, start: int) -> None:
        """What follows the last group: nothing, the beginning of another one, or the end."""
        if start == len(data):
            self._rest.clear()
            self._seen = 0
        elif _is_last_line(END, data, start):
            self.last = data[start : -len(END)]
        elif _is_last_line(HANDED_OVER, data, start):
            self.broken = BreakCause.HANDED_OVER
        else:
            self._rest = bytearray(data[start:])
            self._look_at_rest()

    def _look_at_rest(self) -> None:
        rest = self._rest
        if len(rest) > GROUP_BYTES_MAX:
            self.broken = BreakCause.GARBAGE
        # A comment that has begun keeps its place until its end has come.
        begun = rest.find(_MARK_IN_LINE, self._seen)
        self._seen = begun if begun >= 0 else max(0, len(rest) - len(_MARK_IN_LINE))


def _is_last_line(comment: bytes, data: bytes, start: int) -> bool:
    begin = len(data) - len(comment)
    is_line = begin == start or (begin > start and data[begin - 1] == _NEWLINE)
    return is_line and data.endswith(comment)
