"""Clients' requests: read out of the bytes of one connection, each whole, within limits; and what
an engine gets of them. Opens and waits for nothing.

Parsed by llhttp (`httptools`), which is strict: it refuses Content-Length together with
Transfer-Encoding, repeated lengths, folded headers and bare line feeds. What it does not limit is
limited here: the length of trailers and of chunks' extensions, which it would collect for ever.

The hop's own headers and comments cannot come from a client: headers with its prefix are removed,
and `Accept-Encoding` with them, so that the engine's answer can be read. The body and all other
headers reach the engine as they are.

The surprising thing: `Upgrade: h2c`, which Java's client sends with every first request, makes
llhttp skip the body. Such a request is read once more, without that header. So is any other that
asks for an upgrade, a WebSocket's too: the engine gets it as a plain request.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

import httptools
import msgspec
from msgspec import Raw

from gateway.core.answers import Failure
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import HEADER_PREFIX, HOP_PATHS, Continuation, Journal

BODY_BYTES_MAX = 64 << 20  # until an engine has said how much it reads
HEAD_BYTES_MAX = 64 * 1024  # as many proxies; a browser's cookies are some KiB
ID_CHARS_MAX = 128  # of X-Request-Id; it travels to the engine and into logs
# What a body may have beside its bytes, for each of them: a chunk of one byte has five.
FRAMING_PER_BYTE = 8
KEYLESS_BYTES_MAX = 4096  # of the body of a ping, which needs no key
VALUE_BYTES_MAX = 4096  # of a member that is read; an alias of 256 escaped characters has 3,072
# msgspec takes 1 ms for each MiB of text, 4 ms for each of numbers, and holds the interpreter
# meanwhile. A pool must know the model of any body; where one model serves, a larger one is not
# parsed.
LARGE_BYTES = 2 << 20

# Of requests: RFC 9110 §7.6.1; `Accept-Encoding` because the hop's comments must be readable.
NOT_PASSED_ON = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate"),
        *(b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"content-length", b"expect", b"accept-encoding", b"x-request-id"),
    }
)
PRIVATE = HEADER_PREFIX.encode()
SANE_ID = re.compile(rb"[!-~]{1,%d}" % ID_CHARS_MAX)

# What a client may say to the gateway itself about a request for a model of a pool.
WISHES = frozenset(
    {
        *(b"x-understudy-model", b"x-understudy-priority", b"x-understudy-keep-alive"),
        b"x-session-id",
    }
)

# What the gateway answers by itself, as vLLM does without a key.
ENDPOINTS = frozenset({"/health", "/ping", "/version", "/metrics"})

# Requests that may be sent twice: nothing but the answer changes. So are GET and HEAD anywhere.
INFERENCE_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/v1/messages/count_tokens", "/v1/chat/completions/render", "/v1/completions/render"),
        *("/v1/embeddings", "/v2/embed", "/v1/score", "/score", "/v1/rerank", "/v2/rerank"),
        *("/rerank", "/pooling", "/classify", "/tokenize", "/detokenize"),
        *("/v1/audio/transcriptions", "/v1/audio/translations", "/inference/v1/generate"),
    }
)
PATHS = {path.encode(): path for path in INFERENCE_PATHS}  # as they are nearly always written
SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")
WITHOUT_BODY = (*SAFE_METHODS, b"DELETE")
# Headers of the hop.
MARK = f"{hop.GATEWAY}: {hop.VERSION}\r\n{hop.ATTEMPT}: %b\r\n".lower().encode()
JOURNAL = hop.JOURNAL.lower().encode()
CONTINUATION_ID = hop.CONTINUATION_ID.lower().encode()

Headers: TypeAlias = "list[tuple[bytes, bytes]]"

_NULL = Raw(b"null")


class BodyMembers(msgspec.Struct):
    """The members of a body that the gateway reads, each as it is written."""

    model: Raw = _NULL
    priority: Raw = _NULL
    keep_alive: Raw = _NULL
    stream: Raw = _NULL


_MEMBERS = msgspec.json.Decoder(BodyMembers)
DIGITS_MAX = 18  # of a count in a header; Python reads no number of 4,301 digits


def value_of(raw: Raw) -> object:
    """A member's value; of a long text the beginning, which is no model's name.

    Raises:
        ValueError: it is too long, or not valid, such as text that is not UTF-8.
    """
    written = bytes(memoryview(raw)[: VALUE_BYTES_MAX + 1])
    if len(written) <= VALUE_BYTES_MAX:
        return msgspec.json.decode(written)
    if written.startswith(b'"'):
        return written[1:].decode(errors="replace")
    raise ValueError(f"a value has more than {VALUE_BYTES_MAX} bytes")


@dataclass(slots=True, eq=False)
class HttpRequest:
    """One request of a client. What follows `head` is known once it is whole, what follows `number`
    once it is the core's."""

    method: bytes = b""
    url: bytes = b""
    headers: Headers = field(default_factory=list)  # until it is whole
    named: dict[bytes, bytes] = field(default_factory=dict)  # by name; then those of `WISHES`
    body: bytes | bytearray = b""  # one object: parts of two bytes would take twenty times more
    head_bytes: int = 0
    framing_bytes: int = 0  # of the body, beside its own; only what comes with later reads
    has_head: bool = False
    is_http_1_0: bool = False
    keeps_alive: bool = True
    head: bytes = b""  # what the engine gets, without framing
    path: str = ""  # decoded, without the query
    request_id: bytes = b""
    passing: str | None = None  # of a front: the continuation id that it needs,
    journal: bytes = b""  # which sends a journal behind the body: the value of its header
    body_bytes: int = 0  # without a front's journal,
    journal_tokens: int = 0  # of that journal
    _members: tuple[BodyMembers, str] | None = None
    number: int = 0
    model: str = ""  # "" without a pool
    peer: object = None  # the client's address
    came_ms: float = 0.0
    is_fresh: bool = True  # it comes just now, and no engine has got it yet
    filled_ms: float = 0.0  # when a comment was sent into its pause last
    attempt: int = 0  # the last one
    engine: str = ""  # whom it was sent to last
    status: int = 0  # that the client was sent
    continuation: Continuation = Continuation.NONE
    sent_bytes: int = 0

    @property
    def is_to_head(self) -> bool:
        return self.method == b"HEAD"

    @property
    def may_be_sent_twice(self) -> bool:
        return self.method in SAFE_METHODS or self.path in INFERENCE_PATHS

    @property
    def members(self) -> tuple[BodyMembers, str]:
        """The members of the body, and why they cannot be read."""
        if self._members is None:
            body = self.body[: self.body_bytes]
            try:
                self._members = _MEMBERS.decode(body) if body else BodyMembers(), ""
            except (msgspec.DecodeError, RecursionError) as error:
                self._members = BodyMembers(), str(error)
        return self._members

    @property
    def key(self) -> bytes:
        """Equal for requests that share a prefix: those of a session, or the turns of a chat."""
        return prefix_key(self.body, self.named.get(b"x-session-id", b""))

    @property
    def wants_stream(self) -> bool:
        """As far as it is known: what is taken for no stream is judged by time, not by tokens."""
        is_read = self._members is not None or len(self.body) <= LARGE_BYTES
        return is_read and bytes(self.members[0].stream) == b"true"

    def finish(self, stripped: frozenset[bytes]) -> None:
        """It is whole. `stripped`: headers that no engine gets, beside those that `Connection`
        names."""
        named = self.named
        self.request_id = sane_id(named)
        self.path = PATHS.get(self.url) or path_of(self.url)
        self.body_bytes = len(self.body)
        if self.journal:
            size, tokens, *_ = (*map(_count, self.journal.split(b",", 2)), None)
            self.body_bytes = self.body_bytes if size is None else size
            self.journal_tokens = tokens or 0
        if b"connection" in named:
            lists = [value for name, value in self.headers if name == b"connection"]
            dropped = {name.strip().lower() for each in lists for name in each.split(b",")}
            stripped |= dropped - {b"host", b"content-type", b"authorization"}
        lines = [b"%b %b HTTP/1.1" % (self.method, _target_of(self.url))]
        if b"host" not in named:
            lines.append(b"host: gateway")
        lines += [
            b"%b: %b" % each
            for each in self.headers
            if each[0] not in stripped and not each[0].startswith(PRIVATE)
        ]
        lines.append(b"x-request-id: " + self.request_id)
        self.head = b"\r\n".join(lines) + b"\r\n"
        self.headers = []
        self.named = {name: named[name] for name in WISHES if name in named}

    def for_engine(self, journal: Journal | None, more: bytes) -> tuple[bytes | bytearray, ...]:
        """The request as it goes to an engine, with the journal of what the client has. `more`:
        headers of the hop."""
        body, head = self.body, self.head + more
        if journal is not None:
            body, header = hop.with_journal(body, journal)
            head += b"%b: %b\r\n" % (JOURNAL, header.encode())
        elif self.journal:
            head += b"%b: %b\r\n" % (JOURNAL, self.journal)
        if body or self.method not in WITHOUT_BODY:
            head += b"content-length: %d\r\n" % len(body)
        return (head + b"\r\n", body) if body else (head + b"\r\n",)


def _count(written: bytes) -> int | None:
    """A number in a journal's header; None: it is none, or longer than any that is meant."""
    return int(written) if written.isdigit() and len(written) <= DIGITS_MAX else None


class _Message(msgspec.Struct):
    role: str = ""
    content: Raw = Raw(b"")


class _Chat(msgspec.Struct):
    model: str = ""
    prompt_cache_key: str = ""
    messages: tuple[_Message, ...] = ()
    prompt: Raw = Raw(b"")
    input: tuple[_Message, ...] | str = ""


_CHAT = msgspec.json.Decoder(_Chat)
PREFIX_BYTES = 4096


def prefix_key(body: bytes | bytearray, session: bytes) -> bytes:
    """A digest of what requests with one prefix share, b"" if there is nothing. All turns of a chat
    have its messages up to the first of the user."""
    try:
        chat = _CHAT.decode(body) if body and len(body) <= LARGE_BYTES else _Chat()
    except (ValueError, RecursionError):  # not JSON, another shape, or text that is not UTF-8
        return b""
    turns = chat.input if isinstance(chat.input, tuple) else chat.messages
    first = next((at for at, each in enumerate(turns) if each.role == "user"), 0)
    parts = [bytes(each.content) for each in turns[: first + 1]]
    if said := chat.prompt_cache_key.encode() or session:
        parts = [said]
    elif not turns:
        parts = [bytes(chat.prompt), str(chat.input).encode()]
    if not any(parts):
        return b""
    parts = [chat.model.encode(), *(each[:PREFIX_BYTES] for each in parts)]
    return blake2b(b"\0".join(parts), digest_size=16).digest()


def is_endpoint(method: bytes, path: str) -> bool:
    """Whether the gateway answers this by itself; SageMaker may POST its ping."""
    is_read = method in (b"GET", b"HEAD") or (method, path) == (b"POST", "/ping")
    return path in ENDPOINTS and is_read


def is_hop_path(path: str) -> bool:
    """Whether any server could take `path` for one of the hop's own: below `HOP_PATHS`."""
    parts: list[str] = []
    for part in path.lower().split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return parts[:1] == [HOP_PATHS.strip("/")]


def sane_id(named: Mapping[bytes, bytes]) -> bytes:
    """The client's, if it is sane, else a fresh one."""
    found = named.get(b"x-request-id", b"")
    return found if SANE_ID.fullmatch(found) else fresh_id()


def fresh_id() -> bytes:
    return os.urandom(16).hex().encode()


def _target_of(url: bytes) -> bytes:
    """Origin form, whatever the client sent: a path and a query."""
    if url.startswith(b"/") or url == b"*":
        return url
    after_scheme = url.partition(b"://")[2]
    return b"/" + after_scheme.partition(b"/")[2]


def path_of(url: bytes) -> str:
    path = _target_of(url).partition(b"?")[0].partition(b"#")[0]
    return unquote_to_bytes(path).decode(errors="replace")


def model_in_path(target: str) -> tuple[str, str]:
    """The model in a path such as `/m/chat/v1/models`, and the path behind it, as they are written;
    "" and the whole path where there is none."""
    if not target.startswith("/m/"):
        return "", target
    end = min(
        (found for mark in "/?#" if (found := target.find(mark, 3)) >= 0), default=len(target)
    )
    rest = target[end:]
    return target[3:end], rest if rest.startswith("/") else "/" + rest


# ------------------------------------------------------------------------------ reading

HEAD_TOO_LARGE = Failure(
    431,
    "headers_too_large",
    f"The headers of this request exceed the limit of {HEAD_BYTES_MAX} bytes.",
)
OVERLOADED = Failure(503, "overloaded", "Too many requests are being sent at once.")


class Intake:
    """What the readers of all connections share. `bytes`: of the bodies that are being read; whole
    ones are counted by the core. `check` looks at a request's key before its body is read; a key
    that is checked here is not for the engine. `stripped`: headers that no engine gets."""

    def __init__(
        self,
        bytes_max: int,
        body_bytes_max: Callable[[], int],
        check: Callable[[Headers], Failure | None] | None = None,
        *,
        is_for_fronts: bool = False,
    ) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self.body_bytes_max = body_bytes_max  # of one request
        self.check = check
        self.stripped = NOT_PASSED_ON | ({b"authorization"} if check is not None else set())
        self.is_for_fronts = is_for_fronts


class RequestReader:
    """The requests of one connection, one at a time. After `refused` is set nothing more is read.
    What comes behind a request that waits in `ready` is not read either: that one is the last then,
    and the client sends the others again."""

    def __init__(self, intake: Intake) -> None:
        self.ready: HttpRequest | None = None  # whole, and not taken yet
        self.refused: Failure | None = None  # to be answered
        self.refused_id = b""  # its id, if it came that far
        self.count = 0  # requests read whole
        self.expects_continue = False  # the client waits for "100 Continue"
        self._intake = intake
        self._open: HttpRequest | None = None
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
    def body_bytes(self) -> int:
        """How many bytes of an incomplete body have arrived."""
        return len(self._open.body) if self._open is not None else 0

    def give_up(self) -> None:
        """Refuse the request whose body is being read, for the sake of others."""
        if self._open is not None and self.refused is None:
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
                current.framing_bytes += len(data) - (len(current.body) - before_bytes)
                if current.framing_bytes > HEAD_BYTES_MAX + FRAMING_PER_BYTE * len(current.body):
                    self._refuse(HEAD_TOO_LARGE)

    # ------------------------------------------------------------------ llhttp's callbacks

    def on_message_begin(self) -> None:
        if self.ready is not None:
            self.ready.keeps_alive = False
        else:
            self._open = HttpRequest()

    def on_url(self, url: bytes) -> None:
        if self._open is not None:
            self._open.url += url
            self._open.head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        current = self._open
        if current is not None and not current.has_head:  # else a trailer
            current.headers.append((name.lower(), value))
            current.head_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        current = self._open
        if current is None or self.refused is not None:
            return
        current.has_head, self._head_bytes = True, 0
        assert self._parser is not None  # it is calling
        current.method = self._parser.get_method()
        current.keeps_alive = self._parser.should_keep_alive()
        version = self._parser.get_http_version()
        current.is_http_1_0 = version == "1.0"
        refused = self._refusal(current, version)
        if refused is not None:
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
        self._intake.bytes += len(body)
        if len(current.body) > self._intake.body_bytes_max():
            self._refuse(self._body_too_large())
        elif self._intake.bytes > self._intake.bytes_max:
            self._refuse(OVERLOADED)

    def on_message_complete(self) -> None:
        if self._open is None or self.refused is not None:
            return
        assert self._parser is not None  # it is calling
        if not self._parser.should_upgrade():
            self._finish(self._open)

    # ------------------------------------------------------------------ inside

    def _finish(self, current: HttpRequest) -> None:
        self._let_go()
        self.count += 1
        if self._intake.is_for_fronts:
            current.journal = current.named.get(JOURNAL, b"")
            current.passing = current.named.get(CONTINUATION_ID, b"").decode(errors="replace")
        current.finish(self._intake.stripped)
        self.ready = current

    def _refusal(self, current: HttpRequest, version: str) -> Failure | None:
        """Why this request is not read on; looks at everything that its headers say."""
        if current.head_bytes > HEAD_BYTES_MAX:
            return HEAD_TOO_LARGE
        if current.method == b"CONNECT":
            return Failure(405, "method_not_allowed", "CONNECT is not served here.")
        if version not in ("1.0", "1.1"):
            return Failure(505, "http_version", "Only HTTP/1.0 and HTTP/1.1 are spoken here.")
        named = current.named = dict(current.headers)
        coding, names = named.get(b"transfer-encoding"), [name for name, _ in current.headers]
        if coding is not None:
            if names.count(b"transfer-encoding") > 1 or coding.strip().lower() != b"chunked":
                return Failure(501, "transfer_encoding", "Only chunked transfer encoding is known.")
            # RFC 9112 §6.1 and §3.2: others in front of this one may have read them differently.
            if current.is_http_1_0:
                return Failure(400, "bad_request", "HTTP/1.0 has no transfer encodings.")
        if names.count(b"host") > 1:
            return Failure(400, "bad_request", "There is more than one Host header.")
        declared = int(named.get(b"content-length", b"0"))  # llhttp has checked it
        check = self._intake.check
        refused = None if check is None else check(current.headers)
        if refused is not None:
            is_small = declared <= KEYLESS_BYTES_MAX and coding is None
            _, in_model = model_in_path(current.url.decode("latin-1"))
            path = path_of(in_model.encode("latin-1"))
            if not (is_small and is_endpoint(current.method, path)):
                return refused
        if declared > self._intake.body_bytes_max():
            return self._body_too_large()
        is_expecting = named.get(b"expect", b"").lower() == b"100-continue"
        self.expects_continue = is_expecting and not current.is_http_1_0
        return None

    def _body_too_large(self) -> Failure:
        limit = f"This request is larger than the limit of {self._intake.body_bytes_max()} bytes."
        return Failure(413, "request_too_large", limit)

    def _refuse(self, refused: Failure) -> None:
        if self.ready is not None:  # it is about what came behind that
            self.ready.keeps_alive = False
            return
        if self._open is not None and self._open.has_head:
            self.refused_id = sane_id(self._open.named)
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
