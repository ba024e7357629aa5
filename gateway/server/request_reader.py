"""Reads clients' requests out of the bytes of one connection, each whole, within limits. Opens and
waits for nothing.

Parsed by llhttp (`httptools`), which is strict: it refuses Content-Length together with
Transfer-Encoding, repeated lengths, folded headers and bare line feeds. What it does not limit is
limited here: the length of trailers and of chunks' extensions, which it would collect for ever.

The surprising thing: `Upgrade: h2c`, which Java's client sends with every first request, makes
llhttp skip the body. Such a request is read once more, without that header.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import httptools

from gateway.core.answers import Failure
from gateway.server.requests import (
    BODY_BYTES_MAX,
    LARGE_BYTES,
    NOT_PASSED_ON,
    Headers,
    HttpRequest,
    IncomingRequest,
    Outline,
    is_hop_path,
    needs_no_key,
    path_of,
    sane_id,
)

HEAD_BYTES_MAX = 64 * 1024  # as many proxies; a browser's cookies are some KiB
# What a body may have beside its bytes, for each of them: a chunk of one byte has five.
FRAMING_PER_BYTE = 8
KEYLESS_BYTES_MAX = 4096  # of the body of a ping, which needs no key
PIPELINED_MAX = 32  # requests read ahead on one connection; later ones are not read


HEAD_TOO_LARGE = Failure(
    431,
    "headers_too_large",
    f"The headers of this request exceed the limit of {HEAD_BYTES_MAX} bytes.",
)
OVERLOADED = Failure(503, "overloaded", "Too many requests are being sent at once.")


def _takes_all(headers: Headers) -> Failure | None:
    return None


class Intake:
    """What the readers of all connections share. `bytes`: of the bodies that are being read; whole
    ones are counted by the core. `check` looks at a request's headers before its body is read;
    `stripped`: names of headers that no engine gets."""

    def __init__(
        self,
        bytes_max: int,
        body_bytes_max: Callable[[], int] = lambda: BODY_BYTES_MAX,
        check: Callable[[Headers], Failure | None] = _takes_all,
        stripped: frozenset[bytes] = NOT_PASSED_ON,
    ) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self.body_bytes_max = body_bytes_max  # of one request
        self.check = check
        self.stripped = stripped


class RequestReader:
    """The requests of one connection. After `refused` is set nothing more is read."""

    def __init__(self, intake: Intake) -> None:
        self.ready: deque[HttpRequest] = deque()
        self.refused: Failure | None = None  # to be answered behind what is ready
        self.refused_id = b""  # its id, if it came that far
        self.count = 0  # requests read whole
        self.expects_continue = False  # the client waits for "100 Continue"
        self.rest = b""  # what came behind a request that asks for a tunnel
        self._intake = intake
        self._open: IncomingRequest | None = None
        self._head_bytes = 0
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    def close(self) -> None:
        """Nothing more is read. The parser and this object would keep each other alive."""
        self._parser = None
        self._let_go()

    @property
    def is_idle(self) -> bool:
        """Whether no byte of a further request has arrived."""
        return self._open is None

    @property
    def has_head(self) -> bool:
        """Whether the body of a request is being read."""
        return self._open is not None and self._open.has_head

    @property
    def is_outlining(self) -> bool:
        """Whether a body is being read of which each part takes a moment."""
        return self._open is not None and self._open.outline is not None

    @property
    def body_bytes(self) -> int:
        """How many bytes of an incomplete body have arrived."""
        return self._open.body_bytes if self._open is not None else 0

    def give_up(self) -> None:
        """Refuse the request whose body is being read, for the sake of others."""
        if self._open is not None and self.refused is None:
            self.refused_id = sane_id(self._open.headers)
            self._refuse(OVERLOADED)

    def feed(self, data: bytes) -> None:
        if self.refused is not None or self._parser is None:
            return
        current = self._open if self.has_head else None
        before_bytes = self.body_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgraded(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self.refused is None:  # else it is about what came behind that
                self._refuse(_malformed(error))
        else:
            if self._open is not None and not self._open.has_head:
                self._head_bytes += len(data)
                if self._head_bytes > HEAD_BYTES_MAX:
                    self._refuse(HEAD_TOO_LARGE)
            elif current is not None and current is self._open:
                current.framing_bytes += len(data) - (current.body_bytes - before_bytes)
                if current.framing_bytes > HEAD_BYTES_MAX + FRAMING_PER_BYTE * current.body_bytes:
                    self._refuse(HEAD_TOO_LARGE)

    # ------------------------------------------------------------------ llhttp's callbacks

    def on_message_begin(self) -> None:
        if len(self.ready) >= PIPELINED_MAX:
            self.ready[-1].keeps_alive = False  # the client sends the others again
            self._refuse(Failure(400, "too_many_pipelined", "Too many requests were pipelined."))
            return
        self._open = IncomingRequest()

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
            self.refused_id = sane_id(current.headers)
            self._refuse(refused)

    def on_body(self, body: bytes) -> None:
        current = self._open
        if current is None or self.refused is not None:
            return
        if not current.body:
            current.body = body
        else:
            if isinstance(current.body, bytes):
                current.body = bytearray(current.body)
            current.body += body
        if current.outline is not None:
            current.outline.feed(body)
        current.body_bytes += len(body)
        self._intake.bytes += len(body)
        if current.body_bytes > self._intake.body_bytes_max():
            self.refused_id = sane_id(current.headers)
            self._refuse(self._body_too_large())
        elif self._intake.bytes > self._intake.bytes_max:
            self.refused_id = sane_id(current.headers)
            self._refuse(OVERLOADED)

    def on_message_complete(self) -> None:
        current = self._open
        if current is None or self.refused is not None:
            return
        assert self._parser is not None  # it is calling
        if not self._parser.should_upgrade():
            self._finish(current)

    # ------------------------------------------------------------------ inside

    def _finish(self, current: IncomingRequest) -> None:
        self._let_go()
        self.count += 1
        self.ready.append(current.whole(self._intake.stripped))

    def _refusal(self, current: IncomingRequest) -> Failure | None:
        """Why this request is not read on; looks at everything that its headers say."""
        size = sum(len(name) + len(value) + 4 for name, value in current.headers)
        if size + len(current.url) > HEAD_BYTES_MAX:
            return HEAD_TOO_LARGE
        if current.method == b"CONNECT":
            return Failure(405, "method_not_allowed", "CONNECT is not served here.")
        if current.version not in ("1.0", "1.1"):
            return Failure(505, "http_version", "Only HTTP/1.0 and HTTP/1.1 are spoken here.")
        named = dict(current.headers)
        codings = [value for name, value in current.headers if name == b"transfer-encoding"]
        if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            return Failure(501, "transfer_encoding", "Only chunked transfer encoding is known.")
        # RFC 9112 §6.1 and §3.2: others in front of this one may have read them differently.
        if codings and current.version == "1.0":
            return Failure(400, "bad_request", "HTTP/1.0 has no transfer encodings.")
        if sum(name == b"host" for name, _ in current.headers) > 1:
            return Failure(400, "bad_request", "There is more than one Host header.")
        if is_hop_path(path_of(current.url)):
            return Failure(404, "not_found", "There is nothing at this path.")
        declared = int(named.get(b"content-length", b"0"))  # llhttp has checked it
        refused = self._intake.check(current.headers)
        if refused is not None:
            is_small = declared <= KEYLESS_BYTES_MAX and not codings
            if not (is_small and needs_no_key(current.method, current.url)):
                return refused
        if declared > self._intake.body_bytes_max():
            return self._body_too_large()
        if codings or declared > LARGE_BYTES:
            current.outline = Outline()
        is_expecting = named.get(b"expect", b"").lower() == b"100-continue"
        self.expects_continue = is_expecting and current.version == "1.1"
        return None

    def _body_too_large(self) -> Failure:
        limit = f"This request is larger than the limit of {self._intake.body_bytes_max()} bytes."
        return Failure(413, "request_too_large", limit)

    def _refuse(self, refused: Failure) -> None:
        self.refused = refused
        self._let_go()

    def _let_go(self) -> None:
        """Let go of the request that was being read."""
        self._intake.bytes -= self.body_bytes
        self._open, self.expects_continue = None, False

    def _upgraded(self, rest: bytes) -> None:
        current = self._open
        if current is None or self.refused is not None:
            return
        named = dict(current.headers)
        if current.method == b"GET" and named.get(b"upgrade", b"").lower() == b"websocket":
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


def _malformed(error: Exception) -> Failure:
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return Failure(501, "method_unknown", "This method is not known.")
    return Failure(400, "bad_request", f"This is not a valid HTTP request: {error}.")
