"""Clients that send requests continuously and timestamp the text that they receive.

One connection per request: a kept-alive connection would hide a refusal. Timestamps are those of
the bytes, which HTTP libraries do not offer, and a stream that ended must be told from one that was
cut; so answers are read as a gateway reads an engine's. The end of an exchange is recorded as the
socket saw it; the verdict comes later.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.core.replay_join import events_in
from gateway.server.responses import POD, ResponseReader
from plumbing.errors import ProtocolError, UsageError
from plumbing.service.clock import SystemClock
from plumbing.text import join_address, split_address
from understudy.drill.records import End, Exchange, Prompt
from understudy.pod.table import reachable

# Longer than any hold or budget after which a healthy pod responds (503 comes after 10 s).
SILENCE_MAX_S = 60.0
REFUSED_PAUSE_S = 0.02  # else a refusing port gets thousands of connections a second

READ_BYTES = 64 * 1024
PENDING_MAX_BYTES = 1024 * 1024  # of one event
OK = 200

clock = SystemClock()


@dataclass(slots=True)
class Target:
    """The address of requests.

    The rest is for an address outside the pod (`outside_target`), whose host may be a name:
    `prefix` of the paths, `tls` for https.
    """

    host: str
    port: int
    url: str = ""
    prefix: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)


def inside_target(address: str) -> Target:
    """The pod's own `address`, which the lock server reports, reached on this machine."""
    host, port = split_address(address)
    return Target(reachable(host), port)


def outside_target(url: str) -> Target:
    """An address outside the pod: a Service, an Ingress, a proxy.

    Raises:
        UsageError: `drill.bad_url`.
    """
    bad = UsageError(
        "drill.bad_url",
        f"--url {url} is not a base address; name one such as http://SERVICE:8000 or"
        " https://HOST/PREFIX",
    )
    try:
        parts = urlsplit(url)
        host, port, is_tls = parts.hostname, parts.port, parts.scheme == "https"
    except ValueError:  # a port that is no number
        raise bad from None
    if not host or parts.scheme not in ("http", "https") or parts.query or parts.username:
        raise bad
    tls = ssl.create_default_context() if is_tls else None
    return Target(host, port or (443 if is_tls else 80), url, parts.path.rstrip("/"), tls)


async def send(target: Target, prompt: Prompt, silence_max_s: float = SILENCE_MAX_S) -> Exchange:
    """Send one request and wait until the answer ends in any way."""
    named = str(prompt.body.get("model", ""))
    exchange = Exchange(prompt=prompt.key, sent_ms=clock.now_ms(), model=named)
    answer, writer = AnswerReader(exchange), None
    try:
        async with asyncio.timeout(silence_max_s) as silence:
            reader, writer = await _sent(target, _request(target, prompt))
            while not answer.is_done:
                data, heard_ms = await reader.read(READ_BYTES), clock.now_ms()
                if not data:
                    raise ConnectionError("the connection was closed before the end of the answer")
                answer.feed(data, heard_ms)
                silence.reschedule(asyncio.get_running_loop().time() + silence_max_s)
        exchange.end = End.DONE
        exchange.detail = answer.body[:200].decode("utf-8", "replace")
    except TimeoutError:
        exchange.end, exchange.detail = End.HUNG, f"silent for {silence_max_s:g} s"
    except ConnectionRefusedError as error:
        exchange.end, exchange.detail = End.REFUSED, str(error)
    except OSError as error:
        exchange.end, exchange.detail = End.CUT, str(error) or type(error).__name__
    except ProtocolError as error:
        is_said = error.code == "drill.error_event"
        exchange.end, exchange.detail = End.CUT if is_said else End.GARBLED, error.message
    finally:
        answer.response.close()
        if writer is not None:
            writer.transport.abort()
        exchange.ended_ms = clock.now_ms()
    return exchange


async def _sent(
    target: Target, request: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which `request` was sent."""
    if target.url:  # the name is resolved each time, since a Service's may change
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
        rest = request
    else:
        sock, rest = await _send_at_once(target, request)
        reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(rest)
    return reader, writer


async def _send_at_once(target: Target, request: bytes) -> tuple[socket.socket, bytes]:
    """Connect and send `request`; returns the socket and the part of `request` not sent yet.

    Both in one step where the kernel connects at once, as on one host: a drain closes connections
    without a request, and an iteration of the loop takes long on a busy machine.
    """
    address = target.host, target.port
    sock = socket.socket(socket.AF_INET6 if ":" in target.host else socket.AF_INET)
    try:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(address)
        try:
            return sock, request[sock.send(request) :]
        except BlockingIOError:  # not connected yet
            await asyncio.get_running_loop().sock_connect(sock, address)
            return sock, request
    except BaseException:
        sock.close()
        raise


async def stream_without_pause(
    target: Target,
    prompts: Sequence[Prompt],
    start: int,
    done: Callable[[Exchange], None],
    stopping: asyncio.Event,
    most: float = math.inf,
    silence_max_s: float = SILENCE_MAX_S,
) -> None:
    """One client: sends the prompts in turn, from number `start`, at most so many, until `stopping`
    is set."""
    for sent in itertools.count():
        if sent >= most or stopping.is_set():
            return
        exchange = await send(target, prompts[(start + sent) % len(prompts)], silence_max_s)
        done(exchange)
        if exchange.end is End.REFUSED or exchange.status >= 400:
            await pause(stopping, REFUSED_PAUSE_S)


async def pause(stopping: asyncio.Event, seconds: float) -> None:
    """Until `stopping` is set, at most so long."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopping.wait(), seconds)


def _request(target: Target, prompt: Prompt) -> bytes:
    body = json.dumps(prompt.body).encode()
    head = (
        f"POST {target.prefix}{prompt.path} HTTP/1.1\r\n"
        f"Host: {urlsplit(target.url).netloc or target.address}\r\n"
        "Content-Type: application/json\r\n"
        "Connection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


# ------------------------------------------------------------------ the answer, sans IO


class AnswerReader:
    """Records the bytes of an answer in its exchange; `is_done` once it is whole: a stream with its
    end marker. `body`: of an answer that is not a stream."""

    def __init__(self, exchange: Exchange) -> None:
        self.body = b""
        self.response = ResponseReader(is_to_head=False)
        self._exchange = exchange
        self._has_end_marker = False
        self._pending = b""  # an event that has not ended

    @property
    def is_done(self) -> bool:
        response = self.response
        return self._has_end_marker if response.is_event_stream else response.is_whole

    def feed(self, data: bytes, at_ms: float) -> None:
        """Take up `data`, which came at `at_ms`.

        Raises:
            ProtocolError: this is not an HTTP answer, or its events are not JSON.
        """
        response, exchange = self.response, self._exchange
        try:
            response.feed(data)
        except ValueError as error:
            raise ProtocolError("drill.not_http", f"{error}: {data[:80]!r}") from error
        if response.has_head and not exchange.status:
            exchange.status = response.status
            exchange.engine, exchange.token = response.engine or None, response.token or None
            exchange.pod = dict(response.headers).get(POD, b"").decode("latin-1")
        body = b"".join(response.pieces)
        response.pieces.clear()
        if response.is_event_stream:
            received = (self._pending + body).replace(b"\r\n", b"\n")
            whole, _, self._pending = received.rpartition(b"\n\n")
            for payload, _ in events_in(whole):
                self._event(payload, at_ms)
        else:
            self.body = (self.body + body)[:PENDING_MAX_BYTES]
            if self.is_done and exchange.status == OK:
                self._event(self.body, at_ms)
        if len(self._pending) > PENDING_MAX_BYTES:
            raise ProtocolError("drill.endless", f"no end after {len(self._pending)} bytes")

    def _event(self, payload: bytes, at_ms: float) -> None:
        """One OpenAI event or whole answer, of a completion or of a chat."""
        if payload == b"[DONE]":
            self._has_end_marker = True
        if payload in (b"", b"[DONE]"):
            return
        exchange = self._exchange
        try:
            event = json.loads(payload)
            if "error" in event:
                raise ProtocolError("drill.error_event", f"error event {payload[:200]!r}")
            (choice, *_) = event.get("choices") or [{}]
            content = choice.get("delta") or choice.get("message") or {}
            exchange.tokens = (event.get("usage") or {}).get("completion_tokens", exchange.tokens)
            exchange.finish_reason = choice.get("finish_reason") or exchange.finish_reason
            text = choice.get("text") or content.get("content") or ""
        except (ValueError, AttributeError, TypeError, KeyError, IndexError) as error:
            raise ProtocolError("drill.bad_event", f"invalid event: {payload[:80]!r}") from error
        if text:
            if exchange.first_token_ms is None:
                exchange.first_token_ms = at_ms
            exchange.last_token_ms = at_ms
            exchange.text += text
            if self.response.is_event_stream:
                exchange.text_ms.append(at_ms)
                exchange.piece_ends.append(len(exchange.text))
            exchange.chunks += 1
