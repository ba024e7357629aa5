"""A client's request as the gateway keeps it, what of it an engine gets, and the members of its
body.

A body of up to `LARGE_BYTES` is read by msgspec in one piece. msgspec needs 30 to 250 ms for 64 MiB
and holds the interpreter meanwhile, on another thread too. So a large body is outlined while it
arrives: `Outline` empties containers and long strings, and msgspec reads the few KiB that are left.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Raw

from gateway.core.wishes import model_in_path
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import HEADER_PREFIX, HOP_PATHS, Continuation, Journal

LARGE_BYTES = 2 << 20  # 1 to 11 ms of msgspec's time
VALUE_BYTES_MAX = 4096  # of a value that is read; an alias of 256 escaped characters has 3,072
OUTLINE_BYTES_MAX = 32 << 10  # the parameters of the largest API are some KiB
# Outside of strings, of blocks in which a member begins or ends: 0.2 us each. Of a body with fifty
# parameters these are some KiB.
LOOKED_BYTES_MAX = 64 << 10
DEPTH_MAX = 500  # msgspec and Python's own parser give up at about a thousand
BLOCK_BYTES = 256  # looked at more closely where a member of the body begins or ends

_NULL = Raw(b"null")
_TOO_LONG = "…".encode()  # in the place of a long string: no model's name, and no key that is read
_BRACKETS = b"[]{}"
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
# As signed bytes: what a bracket does to the depth.
_STEPS = bytes(1 if each in b"[{" else 255 if each in b"]}" else 0 for each in range(256))
_NEWLINE = rb"\n"  # as JSON writes it
_TOKEN = re.compile(rb"[\[\]{}]|[^\[\]{}]+")


class BodyMembers(msgspec.Struct):
    """The members of a body that the gateway reads, each as it is written."""

    model: Raw = _NULL
    priority: Raw = _NULL
    keep_alive: Raw = _NULL
    stream: Raw = _NULL


NO_MEMBERS = BodyMembers()
_MEMBERS = msgspec.json.Decoder(BodyMembers)


def read_members(text: bytes | bytearray) -> tuple[BodyMembers, str]:
    """The members of a body or an outline, and why they cannot be read."""
    try:
        return _MEMBERS.decode(text), ""
    except (msgspec.DecodeError, RecursionError) as error:
        return NO_MEMBERS, str(error)


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


class Outline:
    """The outline of one body, of which `feed` gets every part.

    `text` is the body with empty containers, and without the content of long strings. None: its own
    members take more than `OUTLINE_BYTES_MAX`, there are so many that more than `LOOKED_BYTES_MAX`
    had to be looked at, or it is nested more than `DEPTH_MAX` deep.
    """

    def __init__(self) -> None:
        self.text: bytearray | None = bytearray()
        self._depth = 0
        self._is_in_string = False
        self._string_start = 0  # of a string that is kept, in `text`
        self._looked_bytes = 0
        self._half_escape = b""  # the backslash at the end of the last part

    def feed(self, part: bytes | bytearray) -> None:
        data = self._half_escape + part
        self._half_escape = b""
        if (len(data) - len(data.rstrip(b"\\"))) % 2:
            data, self._half_escape = data[:-1], b"\\"
        # Now every quote begins or ends a string. No name that is looked for has a newline.
        data = data.replace(rb"\\", _NEWLINE).replace(rb"\"", _NEWLINE)
        if not self._pass_over(data):
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                if not self._pass_over(block):
                    self._keep(block)

    def _pass_over(self, data: bytes) -> bool:
        """Whether all of `data` is inside a member of the body, or nothing more is kept."""
        if self.text is None:
            return True
        if self._depth < 2:
            return False
        parts = data.split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        steps = memoryview(outside.translate(_STEPS, _NO_BRACKETS)).cast("b")
        depths = list(accumulate(steps, initial=self._depth))
        if min(depths) < 2:
            return False
        self._depth = depths[-1]
        self._is_in_string ^= len(parts) % 2 == 0
        if max(depths) > DEPTH_MAX:
            self.text = None
        return True

    def _keep(self, block: bytes) -> None:
        """Copy what belongs to the body's own members."""
        for index, part in enumerate(block.split(b'"')):
            if index:
                self._is_in_string = not self._is_in_string
                if self._depth < 2:
                    self._keep_quote()
            if not self._is_in_string:
                if part:
                    self._keep_outside(part)
            elif self._depth < 2 and self.text is not None:
                used = len(self.text) - self._string_start
                self._add(part[: max(0, VALUE_BYTES_MAX + 1 - used)])

    def _keep_quote(self) -> None:
        if self.text is None:
            return
        if self._is_in_string:
            self._string_start = len(self.text) + 1
        elif len(self.text) - self._string_start > VALUE_BYTES_MAX:
            self.text[self._string_start :] = _TOO_LONG
        self._add(b'"')

    def _keep_outside(self, part: bytes) -> None:
        """What is in no string. The brackets of a member's value are kept, and nothing in them."""
        self._looked_bytes += len(part)
        if self._looked_bytes > LOOKED_BYTES_MAX:
            self.text = None
            return
        for token in _TOKEN.findall(part):
            if token in (b"[", b"{"):
                self._depth += 1
                if self._depth <= 2:
                    self._add(token)
            elif token in (b"]", b"}"):
                self._depth -= 1
                if self._depth < 2:
                    self._add(token)
            elif self._depth < 2:
                self._add(token)
            if self._depth > DEPTH_MAX:
                self.text = None

    def _add(self, text: bytes) -> None:
        if self.text is not None:
            self.text += text
            if len(self.text) > OUTLINE_BYTES_MAX:
                self.text = None


BODY_BYTES_MAX = 64 << 20  # until an engine has said how much it reads
ID_CHARS_MAX = 128  # of X-Request-Id; it travels to the engine and into logs

# Of requests: RFC 9110 §7.6.1; `Accept-Encoding` because the hop's comments must be readable.
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

# What a client may say to the gateway itself about a request for a model of a pool.
WISHES = frozenset(
    {b"x-understudy-model", b"x-understudy-priority", b"x-understudy-keep-alive", b"prefer"}
)

# What the gateway answers by itself, as vLLM does without a key.
ENDPOINTS = frozenset({"/health", "/ping", "/version", "/metrics"})

Headers: TypeAlias = "list[tuple[bytes, bytes]]"


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
SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")
WITHOUT_BODY = (b"GET", b"HEAD", b"OPTIONS", b"DELETE")
# Headers of the hop.
MARK = f"{hop.GATEWAY}: %d\r\n{hop.ATTEMPT}: %b\r\n".lower().encode()
JOURNAL = hop.JOURNAL.lower().encode()


@dataclass(slots=True, eq=False)
class HttpRequest:
    """One request of a client. `head` is what the engine gets, without framing; `body` is whole.
    What follows `_members` is known once it is the core's."""

    method: bytes
    path: str  # decoded, without the query
    head: bytes
    body: bytes | bytearray
    request_id: bytes
    is_http_1_0: bool = False
    keeps_alive: bool = True
    is_tunnel: bool = False
    wishes: Headers = field(default_factory=list)  # those headers of `WISHES` that came
    outline: Outline | None = None  # of a large body
    _members: tuple[BodyMembers, str] | None = None
    number: int = 0  # the core's
    model: str = ""  # "" without a pool
    peer: object = None  # the client's address
    came_ms: float = 0.0
    is_fresh: bool = True  # it comes just now, and no engine has got it yet
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
        if self.is_tunnel:
            return False
        return self.method in SAFE_METHODS or self.path in INFERENCE_PATHS

    @property
    def members(self) -> tuple[BodyMembers, str]:
        """The members of the body, and why they cannot be read."""
        if self._members is None:
            self._members = _members_of(self.body, self.outline)
        return self._members

    @property
    def wants_stream(self) -> bool:
        return bool(self.body) and bytes(self.members[0].stream) == b"true"

    def for_engine(self, journal: Journal | None, attempt: bytes) -> tuple[bytes | bytearray, ...]:
        """The request as it goes to an engine, with the journal of what the client has. `attempt`:
        the name of this one."""
        if self.is_tunnel:
            return (self.head + b"\r\n",)
        body, head = self.body, self.head + MARK % (hop.VERSION, attempt.hex().encode())
        if journal is not None:
            body, header = hop.with_journal(body, journal)
            head += b"%b: %b\r\n" % (JOURNAL, header.encode())
        if body or self.method not in WITHOUT_BODY:
            head += b"content-length: %d\r\n" % len(body)
        return (head + b"\r\n", body) if body else (head + b"\r\n",)


def _members_of(body: bytes | bytearray, outline: Outline | None) -> tuple[BodyMembers, str]:
    if not body:
        return NO_MEMBERS, ""
    if outline is None or len(body) <= LARGE_BYTES:
        return read_members(body)
    if outline.text is None:
        what = (
            f"it has too many members, they take more than {OUTLINE_BYTES_MAX} bytes, or they are"
            " nested too deeply"
        )
        return NO_MEMBERS, what
    return read_members(outline.text)


def is_endpoint(method: bytes, path: str) -> bool:
    """Whether the gateway answers this by itself; SageMaker may POST its ping."""
    is_read = method in (b"GET", b"HEAD") or (method, path) == (b"POST", "/ping")
    return path in ENDPOINTS and is_read


def needs_no_key(method: bytes, url: bytes) -> bool:
    """Whether `is_endpoint` is true of this, below `/m/<model>` too."""
    _, path = model_in_path(url.decode("latin-1"))
    return is_endpoint(method, path_of(path.encode("latin-1")))


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


@dataclass(slots=True)
class IncomingRequest:
    """A request that is being read."""

    method: bytes = b""
    version: str = ""
    url: bytes = b""
    headers: Headers = field(default_factory=list)
    body: bytes | bytearray = b""  # one object: parts of two bytes would take twenty times more
    body_bytes: int = 0
    framing_bytes: int = 0  # of the body, beside its own; only what comes with later reads
    has_head: bool = False
    keeps_alive: bool = True
    is_tunnel: bool = False
    outline: Outline | None = None  # of a body that is large, or may be

    def whole(self, stripped: frozenset[bytes]) -> HttpRequest:
        """`stripped`: headers that no engine gets, beside those that `Connection` names."""
        headers, request_id = self.headers, sane_id(self.headers)
        dropped = {
            name.strip().lower()
            for each, value in headers
            if each == b"connection"
            for name in value.split(b",")
        } - {b"host", b"content-type", b"authorization"}
        lines = [b"%b %b HTTP/1.1" % (self.method, _target_of(self.url))]
        if all(name != b"host" for name, _ in headers):
            lines.append(b"host: gateway")
        lines += [
            b"%b: %b" % (name, value)
            for name, value in headers
            if name not in stripped and name not in dropped and not name.startswith(PRIVATE)
        ]
        lines.append(b"x-request-id: " + request_id)
        if self.is_tunnel:
            lines.append(b"connection: upgrade\r\nupgrade: websocket")
        return HttpRequest(
            method=self.method,
            path=path_of(self.url),
            head=b"\r\n".join(lines) + b"\r\n",
            body=self.body,
            request_id=request_id,
            is_http_1_0=self.version == "1.0",
            keeps_alive=self.keeps_alive and not self.is_tunnel,
            is_tunnel=self.is_tunnel,
            wishes=[each for each in headers if each[0] in WISHES],
            outline=self.outline,
        )


def sane_id(headers: Headers) -> bytes:
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


def path_of(url: bytes) -> str:
    path = _target_of(url).partition(b"?")[0].partition(b"#")[0]
    return unquote_to_bytes(path).decode(errors="replace")
