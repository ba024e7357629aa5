"""The aiohttp application: OpenAI's routes, and those of the gateway.

Owns the way of a request: body, checks against the model's limits, prompt, the part of the answer
that exists already, then the model's work and the stream of its text. A refusal comes before the
first byte. What a body may hold is in `completions.py`, text in `text.py`. Which engine is active
is not known here: `ServedModel` has the values of the headers that every response carries.

The surprising thing: behind a gateway every output of the model ends with the comment of the
private hop (`plumbing/gateway_protocol.py`), in the same write as its events, also where it has
none because its tokens made half a character.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.backends.reference.completions import BODIES, AnyBody, ChatBody, OpenAiReply, parse_body
from engine.backends.reference.generation import TokenRequest
from engine.backends.reference.rank import ModelLoop
from engine.backends.reference.ranks import Ready
from engine.backends.reference.text import AnswerText, Piece, Tokenizer, replay
from engine.backends.shards import read_file
from plumbing import __version__
from plumbing import gateway_protocol as hop
from plumbing.errors import UnderstudyError, UsageError

logger = logging.getLogger(__name__)

# 128 Ki tokens are about half a MiB of text, or one MiB as an array of ids.
BODY_BYTES_MAX = 4 << 20
# Behind a gateway there may be a journal in addition, of as many chunks as tokens at most.
JOURNAL_BYTES_MAX = 2 * hop.ITEM_BYTES * hop.JOURNAL_TOKENS_MAX
# Tokenising so many characters, or replaying so many tokens, takes milliseconds; more is done one
# request at a time, on a thread.
INLINE_MAX = 1024
REQUEST_ID = "X-Request-Id"
REQUEST_ID_CHARS_MAX = 128  # it is part of every event of a stream
LEAVE_S = 0.2  # most of a switchover is faster
EVENT_STREAM = "text/event-stream"
SSE_HEADERS = {
    "Content-Type": f"{EVENT_STREAM}; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

# Of refusals that are neither the client's fault (400) nor ours (500).
STATUS = {"engine.queue_full": 429, "model_not_found": 404}
# How long a client is asked to wait before it tries again: a slot is free after about a request's
# time, and another engine takes over in less.
RETRY_AFTER_S = 1
HandlerFn = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


def continuation_id(directory: str, model_name: str, ready: Ready) -> str:
    """Two engines with the same one give the same answer to a request.

    It covers everything that decides the next token or its text: weights, arithmetic and release
    (in the identity of the weights), tokenizer and the limit of the context. Raises as `read_file`.
    """
    found = hashlib.blake2b(read_file(os.path.join(directory, "tokenizer.json")), digest_size=16)
    others = {
        "hop": hop.VERSION,
        "identity": ready.identity,
        "model_name": model_name,
        "stop_token_ids": ready.stop_token_ids,
        "max_context": ready.max_context,
        "tokenizers": metadata.version("tokenizers"),
    }
    found.update(json.dumps(others, sort_keys=True).encode())
    return f"reference-{found.hexdigest()}"


class MarkedStream:
    """A gateway's stream, which another engine can continue: what a drain needs to leave it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.has_begun = False
        self.has_ended = False

    def leave(self) -> None:
        """Close the connection behind a whole piece, since each is one write, and say so. What the
        gateway does not read in time, because its client does not, is lost to it. A stream that the
        gateway has left already, to park it, is left alone."""
        if self.has_ended or self._transport.is_closing():
            return
        if self.has_begun:
            self._transport.write(b"%x\r\n%b\r\n" % (len(hop.HANDED_OVER), hop.HANDED_OVER))
        self._transport.close()
        asyncio.get_running_loop().call_later(LEAVE_S, self._transport.abort)


@dataclass(eq=False)
class ServedModel:
    """The model with its routes, and the state of its engine, which the backend keeps up to date.

    `names`: its own first, then aliases. `is_behind_gateway`: the connections are the gateway's,
    whose headers are obeyed. `is_continued`: a drain leaves streams to the next engine.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    model: ModelLoop
    ready: Ready
    engine: str
    token: int = 0
    is_behind_gateway: bool = False
    is_draining: bool = False
    is_continued: bool = False
    continuation_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    requests_open: int = 0  # between their headers and the end of their answer
    streams: set[MarkedStream] = field(default_factory=set)  # that another engine can continue
    _large: asyncio.Lock = field(default_factory=asyncio.Lock)  # held for work that takes long

    # ------------------------------------------------------------------ around every request

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """The engine and its token, by which a client recognises a stale engine; and for a gateway,
        what a failover does to this answer: one that is no stream can be requested again."""
        response.headers[hop.ENGINE] = self.engine
        response.headers[hop.TOKEN] = str(self.token)
        if self.is_behind_gateway:
            is_stream = response.content_type == EVENT_STREAM
            default = hop.Continuation.NONE if is_stream else hop.Continuation.RETRY
            response.headers.setdefault(hop.CONTINUATION, default)
        if self.is_draining:
            response.headers["Connection"] = "close"  # the next request is for the next engine
            response.force_close()

    @web.middleware
    async def errors_as_json(self, request: web.Request, handler: HandlerFn) -> web.StreamResponse:
        self.requests_open += 1
        try:
            return await handler(request)
        except UnderstudyError as error:
            status = STATUS.get(error.code) or (400 if isinstance(error, UsageError) else 500)
            self.model.counts.rejected += status == 429
            return refusal(status, error.code.removeprefix("engine."), error.message)
        except web.HTTPRequestEntityTooLarge:
            what = f"The request body exceeds the limit of {BODY_BYTES_MAX} bytes; shorten it."
            return refusal(413, "body_too_large", what)
        except web.HTTPException as error:
            what = f"{request.method} {request.path:.100}: {error.reason}."
            return refusal(error.status, "no_such_route", what)
        except ConnectionResetError:
            return web.Response(status=499)  # the client has left and does not read this
        except Exception:
            logger.exception("a request failed: %s %s", request.method, request.path)
            what = "This engine failed to process the request; see its log."
            return refusal(500, "internal_error", what)
        finally:
            self.requests_open -= 1

    # ------------------------------------------------------------------ models, gateway

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's keys, and vLLM's `max_model_len`."""
        card = {
            "id": self.names[0],
            "object": "model",
            "created": self.created,
            "owned_by": "understudy",
            "max_model_len": self.ready.max_context,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def hello(self, request: web.Request) -> web.StreamResponse:
        if not self.is_behind_gateway:
            raise web.HTTPNotFound
        hello = hop.Hello(
            engine=self.engine,
            token=self.token,
            continuation_id=self.continuation_id,
            continuation=hop.Continuation.EXACT,
            body_bytes_max=BODY_BYTES_MAX,
            models=(self.names[0],),
            version=hop.VERSION,
            backend_version=__version__,
            slots=self.model.slots,
        )
        return web.json_response(body=msgspec.json.encode(hello))

    def is_marked(self, request: web.Request) -> bool:
        """Whether the request is from a gateway of this release, which can continue the answer. Not
        where the body is compressed: a journal behind it would be taken for a part of it."""
        is_plain = "Content-Encoding" not in request.headers
        is_gateways = request.headers.get(hop.GATEWAY) == str(hop.VERSION)
        return self.is_behind_gateway and is_gateways and is_plain

    # ------------------------------------------------------------------ completions

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body, journal = await self._body(request)
        return await self._answer(request, parse_body(request.path, body), journal)

    async def _body(self, request: web.Request) -> tuple[bytes, Sequence[int]]:
        """The client's body and, of a request that is resumed, the tokens so far."""
        header = request.headers.get(hop.JOURNAL) if self.is_marked(request) else None
        if header is not None:
            request = request.clone(client_max_size=BODY_BYTES_MAX + JOURNAL_BYTES_MAX)
        try:
            body = await request.read()
        except (web.RequestPayloadError, HttpProcessingError) as error:
            what = f"The request's body cannot be read: {error}"
            raise UsageError("bad_body", what) from error
        if header is None:
            return body, ()
        try:
            body, journal = hop.without_journal(body, header)
        except ValueError as error:
            what = f"The journal of this request cannot be read: {error}."
            raise UsageError("resume.bad_journal", what) from None
        return body, journal.tokens

    async def _answer(
        self, request: web.Request, body: AnyBody, journal: Sequence[int]
    ) -> web.StreamResponse:
        """`journal`: the tokens of the answer that another engine has made."""
        if body.model is not None and body.model not in self.names:
            what = f"The model {body.model:.64} does not exist; this pod serves {self.names[0]!r}."
            raise UsageError("model_not_found", what)
        is_marked = self.is_marked(request)
        headers = request.headers
        given_id = headers.get(REQUEST_ID, "")[:REQUEST_ID_CHARS_MAX] if is_marked else ""
        attempt = hop.read_attempt(headers.get(hop.ATTEMPT, "")) if is_marked else b""
        wanted = await self._model_request(body, given_id, attempt, tuple(journal))
        least = wanted.sampling.min_tokens
        answer = AnswerText(self.tokenizer, body.stops, len(wanted.prompt), least)
        replayed = None
        if journal:
            vocab_size = self.ready.vocab_size
            replayed = await self._apart(len(journal), lambda: replay(wanted, answer, vocab_size))
        reply = OpenAiReply(body, self.names[0], given_id or uuid.uuid4().hex)
        marking = self._mark(request) if is_marked and body.stream else nullcontext()
        with marking as marked:
            async with aclosing(self._pieces(wanted, replayed, answer)) as pieces:
                if body.stream:
                    return await send_stream(request, pieces, answer, reply, marked)
                whole = [piece async for piece in pieces]
        text = "".join(piece.text for piece in whole)
        return web.json_response(reply.whole(text, whole[-1].finish_reason, answer.usage))

    async def _pieces(
        self, wanted: TokenRequest, replayed: Piece | None, answer: AnswerText
    ) -> AsyncGenerator[Piece, None]:
        """The whole answer: what existed before, then what the model makes, up to and including the
        piece with the finish reason. The model is not asked if what was replayed has that."""
        if replayed is not None:
            if replayed.finish_reason is not None:
                yield replayed
                return
            self.model.counts.replayed += len(wanted.made)
        with self.model.generate(wanted) as tokens:
            piece = replayed
            if piece is not None:
                yield piece
            while piece is None or piece.finish_reason is None:
                made = await tokens.get()
                piece = answer.push(made.token, made.finish_reason)
                yield piece

    async def _model_request(
        self, body: AnyBody, request_id: str, attempt: bytes, made: tuple[int, ...]
    ) -> TokenRequest:
        """Checks `body` against the model's limits. Raises UsageError."""
        limits, tokenizer, is_chat = self.ready, self.tokenizer, isinstance(body, ChatBody)
        # The chat template writes its own special tokens.
        prompt = tokenizer.render_chat(body.messages) if isinstance(body, ChatBody) else body.prompt
        if isinstance(prompt, str):
            text = prompt
            prompt = await self._apart(len(text), lambda: tokenizer.encode(text, not is_chat))
        room = limits.max_context - len(prompt)
        max_tokens = body.limit or room
        if room < max(1, max_tokens):
            raise UsageError(
                "context_length_exceeded",
                f"The context length is {limits.max_context} tokens, and the prompt has"
                f" {len(prompt)}; shorten it, or lower max_tokens ({body.limit}).",
            )
        sampling = body.sampling(_seed_of(request_id))
        biased = (token for token, _ in sampling.logit_bias)
        last = limits.vocab_size - 1
        largest = max((*prompt, *body.stop_token_ids, *biased), default=0)
        for is_wrong, what in (
            (not prompt, "The prompt is empty; send at least one token."),
            (largest > last, f"{largest} is no token id: the vocabulary ends at {last}."),
            (
                body.min_tokens > max_tokens,
                f"min_tokens is {body.min_tokens}, and the answer ends with {max_tokens} tokens.",
            ),
        ):
            if is_wrong:
                raise UsageError("invalid_value", what)
        ends = () if body.ignore_eos else limits.stop_token_ids
        stops = tuple(dict.fromkeys((*ends, *body.stop_token_ids)))
        return TokenRequest(0, tuple(prompt), max_tokens, sampling, stops, made, attempt)

    async def _apart(self, size: int, work: Callable[[], T]) -> T:
        """Do large work on a thread, so that probes and streams go on meanwhile."""
        if size <= INLINE_MAX:
            return work()
        async with self._large:
            return await asyncio.to_thread(work)

    @contextmanager
    def _mark(self, request: web.Request) -> Iterator[MarkedStream]:
        """While it lasts, a drain may leave this stream to the next engine."""
        if request.transport is None:
            raise ConnectionResetError
        marked = MarkedStream(request.transport)
        if self.is_continued:
            marked.leave()
            raise ConnectionResetError
        self.streams.add(marked)
        try:
            yield marked
        finally:
            self.streams.discard(marked)


async def send_stream(
    request: web.Request,
    pieces: AsyncIterator[Piece],
    answer: AnswerText,
    reply: OpenAiReply,
    marked: MarkedStream | None,
) -> web.StreamResponse:
    """`answer` made the newest piece. `marked`: it is for a gateway.

    The headers leave with the first token. An engine that dies before has sent nothing, and the
    client sees a connection error, not a broken answer.
    """
    response = web.StreamResponse(headers=SSE_HEADERS)
    if marked is not None:
        response.headers[hop.CONTINUATION] = hop.Continuation.EXACT
    async for piece in pieces:
        events, reason = b"", piece.finish_reason
        if not response.prepared:
            await response.prepare(request)
            events = reply.opening()
        if piece.text:
            events += reply.event(piece.text, answer.usage)
        if reason is not None:
            events += reply.event("", answer.usage, reason)
        if marked is not None:
            events += hop.group_end(piece.tokens, (len(piece.tokens),))
            marked.has_begun, marked.has_ended = True, reason is not None
        if reason is not None:
            events += reply.end(answer.usage) + (b"" if marked is None else hop.END)
        if events:
            await response.write(events)
    await response.write_eof()
    return response


def refusal(status: int, code: str, message: str) -> web.Response:
    """An error of OpenAI's shape; `code` is stable."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if status == 429 else kind
    error = {"message": message, "type": kind, "param": None, "code": code}
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else {}
    return web.json_response({"error": error}, status=status, headers=headers)


def _seed_of(request_id: str) -> int:
    """For a request without a seed: the same at every engine that a gateway sends it to."""
    if not request_id:
        return secrets.randbits(63)
    name = request_id.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest())


def make_app(served: ServedModel) -> web.Application:
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[served.errors_as_json])
    app.router.add_get("/v1/models", served.list_models)
    app.router.add_get("/v1/models/{model:.+}", served.list_models)
    for path in BODIES:
        app.router.add_post(path, served.complete)
    app.router.add_get(hop.HELLO_PATH, served.hello)
    app.on_response_prepare.append(served.add_headers)
    return app
