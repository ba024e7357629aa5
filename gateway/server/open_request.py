"""What the shell keeps of a request that is being answered, beside the core's number of it."""

from __future__ import annotations

from gateway.server.client import ClientConnection
from gateway.server.requests import HttpRequest
from gateway.server.upstream import Upstream
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation, Journal

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
MARK = f"{hop.GATEWAY}: %d\r\n{hop.ATTEMPT}: %b\r\n".lower().encode()
JOURNAL = hop.JOURNAL.lower().encode()


class OpenRequest:
    """One request, its client, and the connection that works for it, if any."""

    __slots__ = (
        *("came_ms", "client", "continuation", "engine", "http", "is_fresh", "model", "number"),
        *("sent_bytes", "status", "upstream"),
    )

    def __init__(
        self,
        number: int,
        client: ClientConnection,
        http: HttpRequest,
        came_ms: float,
        model: str = "",
    ) -> None:
        self.number = number
        self.model = model  # "" without a pool
        self.client = client
        self.http = http
        self.came_ms = came_ms
        self.upstream: Upstream | None = None
        self.is_fresh = True  # it comes just now, and no engine has got it yet
        self.status = 0
        self.engine = ""
        self.continuation = Continuation.NONE
        self.sent_bytes = 0

    @property
    def may_be_sent_twice(self) -> bool:
        if self.http.is_tunnel:
            return False
        return self.http.method in SAFE_METHODS or self.http.path in INFERENCE_PATHS

    def for_engine(self, journal: Journal | None, attempt: bytes) -> tuple[bytes | bytearray, ...]:
        """The request as it goes to an engine, with the journal of what the client has. `attempt`:
        the name of this one."""
        http, body = self.http, self.http.body
        if http.is_tunnel:
            return (http.head + b"\r\n",)
        head = http.head + MARK % (hop.VERSION, attempt.hex().encode())
        if journal is not None:
            body, header = hop.with_journal(body, journal)
            head += b"%b: %b\r\n" % (JOURNAL, header.encode())
        if body or http.method not in WITHOUT_BODY:
            head += b"content-length: %d\r\n" % len(body)
        return (head + b"\r\n", body) if body else (head + b"\r\n",)

    def head_for_client(self, upstream: Upstream, framing: bytes) -> bytes:
        self.status = upstream.response.status
        return upstream.response.head_for_client(
            self.http.request_id,
            framing=framing,
            keeps_alive=self.http.keeps_alive,
            continuation=self.continuation,
        )
