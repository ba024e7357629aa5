"""A client's request as the doors keep it, and what of it an engine gets."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

from gateway.core.router import model_in_path
from gateway.server.outline import (
    LARGE_BYTES,
    NO_MEMBERS,
    OUTLINE_BYTES_MAX,
    BodyMembers,
    Outline,
    read_members,
)
from plumbing.gateway_protocol import HEADER_PREFIX, HOP_PATHS

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


@dataclass(slots=True, eq=False)
class HttpRequest:
    """One request. `head` is what the engine gets, without framing; `body` is whole."""

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

    @property
    def is_to_head(self) -> bool:
        return self.method == b"HEAD"

    @property
    def members(self) -> tuple[BodyMembers, str]:
        """The members of the body, and why they cannot be read."""
        if self._members is None:
            self._members = _members_of(self.body, self.outline)
        return self._members

    @property
    def asks_for_stream(self) -> bool:
        return bytes(self.members[0].stream) == b"true"


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


def make_request(
    method: bytes,
    url: bytes,
    headers: Headers,
    body: bytes | bytearray,
    *,
    version: str,
    keeps_alive: bool,
    is_tunnel: bool,
    stripped: frozenset[bytes],
    outline: Outline | None = None,
) -> HttpRequest:
    """`stripped`: names of headers that no engine gets, beside those that `Connection` names."""
    request_id = sane_id(headers)
    dropped = {
        name.strip().lower()
        for each, value in headers
        if each == b"connection"
        for name in value.split(b",")
    } - {b"host", b"content-type", b"authorization"}
    lines = [b"%b %b HTTP/1.1" % (method, _target_of(url))]
    if all(name != b"host" for name, _ in headers):
        lines.append(b"host: gateway")
    lines += [
        b"%b: %b" % (name, value)
        for name, value in headers
        if name not in stripped and name not in dropped and not name.startswith(PRIVATE)
    ]
    lines.append(b"x-request-id: " + request_id)
    if is_tunnel:
        lines.append(b"connection: upgrade\r\nupgrade: websocket")
    return HttpRequest(
        method=method,
        path=path_of(url),
        head=b"\r\n".join(lines) + b"\r\n",
        body=body,
        request_id=request_id,
        is_http_1_0=version == "1.0",
        keeps_alive=keeps_alive and not is_tunnel,
        is_tunnel=is_tunnel,
        wishes=[each for each in headers if each[0] in WISHES],
        outline=outline,
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
