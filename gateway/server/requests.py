"""Reads clients' requests out of the bytes of one connection, each whole, within limits. Opens and
waits for nothing.

Parsed by llhttp (`httptools`), which is strict: it refuses Content-Length together with
Transfer-Encoding, repeated lengths, folded headers and bare line feeds.

The surprising thing: `Upgrade: h2c`, which Java's client sends with every first request, makes
llhttp skip the body. Such a request is read once more, without that header.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

import httptools
import msgspec

from gateway.server.refusals import Refused
from plumbing.hop import HEADER_PREFIX, HOP_PATHS

HEAD_BYTES_MAX = 64 * 1024  # as many proxies; a browser's cookies are some KiB
PIPELINED_MAX = 32  # requests read ahead on one connection; later ones are not read
BODY_BYTES_MAX = 64 << 20  # until an engine has said how much it reads
ID_CHARS_MAX = 128  # of X-Request-Id; it travels to the engine and into logs

# RFC 9110 §7.6.1; `Accept-Encoding` because the hop's comments must be readable.
NOT_PASSED_ON = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate"),
        *(b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"content-length", b"expect", b"accept-encoding", b"x-request-id"),
    }
)
PRIVATE = HEADER_PREFIX.encode()
REQUEST_ID = b"x-request-id"
SANE_ID = re.compile(rb"[!-~]{1,%d}" % ID_CHARS_MAX)

Headers: TypeAlias = "list[tuple[bytes, bytes]]"


@dataclass(slots=True, eq=False)
class HttpRequest:
    """One request. `head` is what the engine gets, without framing; `body` is whole."""

    method: bytes
    path: str  # decoded, without the query
    head: bytes
    body: bytes
    request_id: bytes
    is_http_1_0: bool = False
    keeps_alive: bool = True
    is_tunnel: bool = False

    @property
    def is_to_head(self) -> bool:
        return self.method == b"HEAD"

    @property
    def asks_for_stream(self) -> bool:
        try:
            return _STREAM_FLAG.decode(self.body).stream is True
        except msgspec.DecodeError:
            return False


class _StreamFlag(msgspec.Struct):
    stream: bool | None = None


_STREAM_FLAG = msgspec.json.Decoder(_StreamFlag)


@dataclass(slots=True)
class _Open:
    """The request that is being read."""

    method: bytes = b""
    version: str = ""
    url: bytes = b""
    headers: Headers = field(default_factory=list)
    body: list[bytes] = field(default_factory=list)
    body_bytes: int = 0
    has_head: bool = False
    keeps_alive: bool = True
    is_tunnel: bool = False


class RequestReader:
    """The requests of one connection. After `refused` is set nothing more is read."""

    def __init__(
        self,
        body_bytes_max: Callable[[], int],
        check: Callable[[Headers], Refused | None],
        stripped: frozenset[bytes] = frozenset(),
    ) -> None:
        """`check` looks at the headers of a request before its body is read; `stripped`: names of
        headers that no engine gets."""
        self.ready: deque[HttpRequest] = deque()
        self.refused: Refused | None = None  # to be answered behind what is ready
        self.refused_id = fresh_id()
        self.count = 0  # requests read whole
        self.expects_continue = False  # the client waits for "100 Continue"
        self.rest = b""  # what came behind a request that asks for a tunnel
        self._body_bytes_max = body_bytes_max
        self._check = check
        self._stripped = stripped | NOT_PASSED_ON
        self._open: _Open | None = None
        self._head_bytes = 0
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    def close(self) -> None:
        """Nothing more is read. The parser and this object would keep each other alive."""
        self._parser = None

    @property
    def is_idle(self) -> bool:
        """Whether not even a byte of a further request has come."""
        return self._open is None

    @property
    def has_head(self) -> bool:
        """Whether the body of a request is being read."""
        return self._open is not None and self._open.has_head

    @property
    def body_bytes(self) -> int:
        """How much of a body has come that is not whole yet."""
        return self._open.body_bytes if self._open is not None else 0

    def feed(self, data: bytes) -> None:
        if self.refused is not None or self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgraded(data[upgrade.args[0] :])
        except httptools.HttpParserInvalidMethodError:
            self._refuse(Refused(501, "method_unknown", "This method is not known."))
        except httptools.HttpParserError as error:
            if self.refused is None:
                self._refuse(_malformed(error))
        else:
            if self._open is not None and not self._open.has_head:
                self._head_bytes += len(data)
                if self._head_bytes > HEAD_BYTES_MAX:
                    self._refuse(_head_too_large())

    # ------------------------------------------------------------------ llhttp's callbacks

    def on_message_begin(self) -> None:
        if len(self.ready) >= PIPELINED_MAX:
            self.ready[-1].keeps_alive = False  # the client sends the others again
            self._refuse(Refused(400, "too_many_pipelined", "Too many requests were pipelined."))
            return
        self._open = _Open()

    def on_url(self, url: bytes) -> None:
        if self._open is not None:
            self._open.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._open is not None and not self._open.has_head:  # else a trailer
            self._open.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        current = self._open
        if current is None or self.refused is not None:
            return
        current.has_head, self._head_bytes = True, 0
        assert self._parser is not None  # it is calling
        current.method = self._parser.get_method()
        current.version = self._parser.get_http_version()
        current.keeps_alive = self._parser.should_keep_alive()
        refused = self._refusal(current)
        if refused is not None:
            self.refused_id = _request_id(current.headers)
            self._refuse(refused)

    def on_body(self, body: bytes) -> None:
        current = self._open
        if current is None or self.refused is not None:
            return
        current.body.append(body)
        current.body_bytes += len(body)
        if current.body_bytes > self._body_bytes_max():
            self.refused_id = _request_id(current.headers)
            self._refuse(_body_too_large(self._body_bytes_max()))

    def on_message_complete(self) -> None:
        current = self._open
        if current is None or self.refused is not None:
            return
        assert self._parser is not None  # it is calling
        if not self._parser.should_upgrade():
            self._finish(current)

    # ------------------------------------------------------------------ inside

    def _finish(self, current: _Open) -> None:
        self._open, self.expects_continue = None, False
        self.count += 1
        self.ready.append(_make(current, self._stripped))

    def _refusal(self, current: _Open) -> Refused | None:
        """Why this request is not read on; looks at everything that its headers say."""
        size = sum(len(name) + len(value) + 4 for name, value in current.headers)
        if size + len(current.url) > HEAD_BYTES_MAX:
            return _head_too_large()
        if current.method == b"CONNECT":
            return Refused(405, "method_not_allowed", "CONNECT is not served here.")
        if current.version not in ("1.0", "1.1"):
            return Refused(505, "http_version", "Only HTTP/1.0 and HTTP/1.1 are spoken here.")
        named = dict(current.headers)
        if named.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
            return Refused(501, "transfer_encoding", "Only chunked transfer encoding is known.")
        if is_hop_path(_path_of(current.url)):
            return Refused(404, "not_found", "There is nothing at this path.")
        refused = self._check(current.headers)
        if refused is not None:
            return refused
        declared = int(named.get(b"content-length", b"0"))  # llhttp has checked it
        if declared > self._body_bytes_max():
            return _body_too_large(self._body_bytes_max())
        is_expecting = named.get(b"expect", b"").lower() == b"100-continue"
        self.expects_continue = is_expecting and current.version == "1.1"
        return None

    def _refuse(self, refused: Refused) -> None:
        self.refused, self._open, self.expects_continue = refused, None, False

    def _upgraded(self, rest: bytes) -> None:
        current = self._open
        if current is None or self.refused is not None:
            return
        if dict(current.headers).get(b"upgrade", b"").lower() == b"websocket":
            current.is_tunnel, self.rest = True, rest
            self._finish(current)
            return
        lines = [b"%b %b HTTP/1.1" % (current.method, current.url)]
        lines += [
            b"%b: %b" % each
            for each in current.headers
            if each[0] not in (b"upgrade", b"http2-settings", b"connection")
        ]
        self._parser = httptools.HttpRequestParser(self)
        self.feed(b"\r\n".join(lines) + b"\r\n\r\n" + rest)


def is_hop_path(path: str) -> bool:
    """Whether any server could take `path` for one of the hop's own: below `HOP_PATHS`."""
    if "understudy" not in path.lower():
        return False
    parts: list[str] = []
    for part in path.lower().split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return parts[:1] == [HOP_PATHS.strip("/")]


def _make(current: _Open, stripped: frozenset[bytes]) -> HttpRequest:
    request_id = _request_id(current.headers)
    dropped = {
        name.strip().lower()
        for each, value in current.headers
        if each == b"connection"
        for name in value.split(b",")
    } - {b"host", b"content-type", b"authorization"}
    lines = [b"%b %b HTTP/1.1" % (current.method, _target_of(current.url))]
    if all(name != b"host" for name, _ in current.headers):
        lines.append(b"host: gateway")
    lines += [
        b"%b: %b" % (name, value)
        for name, value in current.headers
        if name not in stripped and name not in dropped and not name.startswith(PRIVATE)
    ]
    lines.append(b"x-request-id: " + request_id)
    if current.is_tunnel:
        lines.append(b"connection: upgrade\r\nupgrade: websocket")
    return HttpRequest(
        method=current.method,
        path=_path_of(current.url),
        head=b"\r\n".join(lines) + b"\r\n",
        body=current.body[0] if len(current.body) == 1 else b"".join(current.body),
        request_id=request_id,
        is_http_1_0=current.version == "1.0",
        keeps_alive=current.keeps_alive and not current.is_tunnel,
        is_tunnel=current.is_tunnel,
    )


def _request_id(headers: Headers) -> bytes:
    """The client's, if it is sane, else a fresh one."""
    for name, value in headers:
        if name == REQUEST_ID and SANE_ID.fullmatch(value):
            return value
    return fresh_id()


def fresh_id() -> bytes:
    return secrets.token_hex(16).encode()


def _target_of(url: bytes) -> bytes:
    """Origin form, whatever the client sent: a path and a query."""
    if url.startswith(b"/") or url == b"*":
        return url
    after_scheme = url.partition(b"://")[2]
    return b"/" + after_scheme.partition(b"/")[2]


def _path_of(url: bytes) -> str:
    path = _target_of(url).partition(b"?")[0].partition(b"#")[0]
    return unquote_to_bytes(path).decode(errors="replace")


def _head_too_large() -> Refused:
    return Refused(
        431,
        "headers_too_large",
        f"The headers of this request exceed the limit of {HEAD_BYTES_MAX} bytes.",
    )


def _body_too_large(bytes_max: int) -> Refused:
    return Refused(
        413,
        "request_too_large",
        f"This request is larger than the limit of {bytes_max} bytes.",
    )


def _malformed(error: Exception) -> Refused:
    return Refused(400, "bad_request", f"This is not a valid HTTP request: {error}.")
