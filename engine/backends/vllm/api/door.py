"""What a gateway finds behind the gate: the paths of the private hop, and the journal of a request
that is resumed.

Only behind a gateway. In direct mode clients reach the engine themselves, and to them none of this
exists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from engine.backends.vllm.api.asgi import Headers, Message, Receive, Scope, Send, send_json
from engine.backends.vllm.resume.answer import Answer
from engine.messages import CanaryMsg
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation, Hello, Journal

PREFIX = hop.HEADER_PREFIX.encode()
GATEWAY = hop.GATEWAY.lower().encode()
ATTEMPT = hop.ATTEMPT.lower().encode()
JOURNAL = hop.JOURNAL.lower().encode()
LENGTH = b"content-length"
# One token in each chunk is the most.
JOURNAL_BYTES_MAX = 2 * hop.ITEM_BYTES * hop.JOURNAL_TOKENS_MAX

# The only streams that no parser of reasoning or tools has a hand in.
PLAIN_PATHS = ("/v1/completions",)
RESPONSES_PATH = "/v1/responses"


class Door:
    """What this engine says to a gateway.

    Args:
        hello: what it says of itself under the present grant.
        canary: one real inference.
        has_parsers: its chats go through a parser of reasoning or tools.
        keeps_responses: it stores answers of the Responses API or calls tools for them, so that
            one that is asked again is not the same.
        responses: the class of a stream of the Responses API.
    """

    def __init__(
        self,
        hello: Callable[[], Hello],
        canary: Callable[[], Awaitable[CanaryMsg]],
        *,
        has_parsers: bool = True,
        keeps_responses: bool = True,
        responses: Continuation = Continuation.NONE,
    ) -> None:
        self._responses = responses
        self._hello, self._canary = hello, canary
        self._has_parsers, self._keeps_responses = has_parsers, keeps_responses

    async def answer_hop(self, scope: Scope, send: Send) -> None:
        """A request below `HOP_PATHS`."""
        match scope["method"], scope["path"]:
            case "GET", hop.HELLO_PATH:
                await send_json(send, 200, msgspec.to_builtins(self._hello()))
            case "POST", hop.CANARY_PATH:
                found = await self._canary()
                document = {"ok": found.ok, "detail": found.detail}
                await send_json(send, 200 if found.ok else 503, document)
            case _:
                await send_json(send, 404, {"error": f"{scope['path']} does not exist"})

    def answer_to(self, path: str, journal: Journal | None, attempt: bytes = b"") -> Answer:
        is_kept = self._keeps_responses and path.startswith(RESPONSES_PATH)
        return Answer(
            journal,
            has_boundaries=self._has_parsers and path not in PLAIN_PATHS,
            is_repeatable=not is_kept,
            expected=self._responses if path == RESPONSES_PATH else Continuation.NONE,
            attempt=attempt,
        )


async def take_journal(
    scope: Scope, receive: Receive, body_max: int
) -> tuple[Receive, Journal | None]:
    """Read the journal, if there is one, and take all private headers out of `scope`.

    Raises:
        ValueError: the journal does not fit the request.
    """
    headers: Headers = list(scope["headers"])
    header = dict(headers).get(JOURNAL)
    scope["headers"] = [each for each in headers if not each[0].startswith(PREFIX)]
    if header is None:
        return receive, None
    told = header.decode("latin-1")
    whole = await _read(receive, body_max + JOURNAL_BYTES_MAX)
    body, journal = hop.without_journal(whole, told)
    length = str(len(body)).encode()
    scope["headers"] = [
        (name, length if name == LENGTH else value) for name, value in scope["headers"]
    ]
    return _first(body, receive), journal


async def _read(receive: Receive, bytes_max: int) -> bytes:
    parts, left, is_whole = [], bytes_max, False
    while not is_whole:
        message = await receive()
        if message["type"] != "http.request":
            raise ValueError("the connection ended within the body")
        parts.append(message.get("body", b""))
        left -= len(parts[-1])
        if left < 0:
            raise ValueError(f"it and the body are larger than {bytes_max} bytes")
        is_whole = not message.get("more_body", False)
    return b"".join(parts)


def _first(body: bytes, receive: Receive) -> Receive:
    """Receives the whole `body`, and then what else comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
