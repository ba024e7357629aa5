"""The HTTP routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`.

Owns the way of one request: body, checks, tokens of the prompt, generation, answer. What may be
asked and how answers look is in `openai/`. Must not know who is active: it is told what to put
into the headers that every response carries.

The surprising thing: a stream's headers are sent only with its first token, because until then
the model may still refuse, and a refusal has a status of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.backends.reference.http.answer import Answer, Piece
from engine.backends.reference.http.model_link import Generation, ModelLink
from engine.backends.reference.http.openai import errors
from engine.backends.reference.http.openai.errors import ApiError
from engine.backends.reference.http.openai.replies import (
    DONE,
    ChatShape,
    CompletionShape,
    Shape,
    Usage,
    model_card,
    model_list,
    sse,
)
from engine.backends.reference.http.openai.requests import (
    GenerationRequest,
    parse_chat,
    parse_completion,
    parse_json,
)
from engine.backends.reference.http.text import Tokenizer
from engine.backends.reference.link import Ready
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)

# 128 Ki tokens are about half a MiB of text, or one MiB as an array of ids.
BODY_BYTES_MAX = 4 << 20
# A body has this long to arrive after its headers, or a few slow senders hold every connection.
BODY_DEADLINE_S = 30.0
# Tokenising this much takes about a millisecond; more goes to a thread, off the loop.
INLINE_CHARS_MAX = 4096

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
HandlerFn = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Service:
    """What the routes need to know, kept up to date by the backend."""

    model_name: str
    tokenizer: Tokenizer
    link: ModelLink
    engine: str = ""
    token: int = 0
    is_draining: bool = False
    rejected: int = 0
    ready: Ready | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    handling: int = 0  # requests between their headers and the end of their answer
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    heard: Callable[[asyncio.BaseProtocol], None] = lambda protocol: None

    def __post_init__(self) -> None:
        self.idle.set()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        self.handling += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.handling -= 1
            if not self.handling:
                self.idle.set()

    def limits(self) -> Ready:
        if self.ready is None:
            raise errors.unavailable("not_ready", "This engine is still preparing its weights.")
        return self.ready


def make_app(service: Service) -> web.Application:
    routes = _Routes(service)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[routes.errors_as_json])
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{model:.+}", routes.model)
    app.router.add_post("/v1/completions", routes.completions)
    app.router.add_post("/v1/chat/completions", routes.chat_completions)
    app.on_response_prepare.append(routes.add_headers)
    return app


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._large = asyncio.Lock()  # one at a time: each holds the loop for a moment

    # ------------------------------------------------------------------ around every request

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Who answered, under which grant: a client can tell a stale engine by the token."""
        response.headers["X-Understudy-Engine"] = self._service.engine
        response.headers["X-Understudy-Token"] = str(self._service.token)
        if self._service.is_draining:
            response.headers["Connection"] = "close"  # the next request is for the next engine
            response.force_close()

    @web.middleware
    async def errors_as_json(self, request: web.Request, handler: HandlerFn) -> web.StreamResponse:
        self._service.heard(request.protocol)
        try:
            with self._service.request():
                return await handler(request)
        except ApiError as error:
            refusal = error
        except UnderstudyError as error:
            refusal = errors.from_understudy(error)
        except web.HTTPRequestEntityTooLarge:
            refusal = errors.body_too_large(BODY_BYTES_MAX)
        except web.HTTPException as error:
            what = f"{request.method} {request.path:.100}: {error.reason}."
            refusal = ApiError(error.status, what, code="no_such_route")
        except ConnectionResetError:
            return web.Response(status=499)  # the client left: nobody reads this
        except Exception:
            logger.exception("a request failed: %s %s", request.method, request.path)
            what = "This engine failed at the request; its log says why."
            refusal = ApiError(500, what, code="internal_error", kind="server_error")
        if refusal.status in (429, 503):
            self._service.rejected += 1
        return web.json_response(refusal.body(), status=refusal.status, headers=refusal.headers())

    # ------------------------------------------------------------------ models

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(model_list([self._card()]))

    async def model(self, request: web.Request) -> web.StreamResponse:
        self._check_model(request.match_info["model"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, object]:
        service = self._service
        context = service.limits().max_context
        return model_card(
            service.model_name, service.created, context, service.engine, service.token
        )

    def _check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self._service.model_name:
            raise errors.model_not_found(asked, self._service.model_name)

    # ------------------------------------------------------------------ generation

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_completion(await self._body(request)))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_chat(await self._body(request)))

    async def _body(self, request: web.Request) -> dict[str, object]:
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                body = await request.read()
        except TimeoutError as error:
            what = f"The request's body did not arrive within {BODY_DEADLINE_S:g} s."
            raise ApiError(408, what, code="body_deadline") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            what = f"The request's body cannot be read: {error}"
            raise ApiError(400, what, code="bad_body") from error
        if len(body) <= INLINE_CHARS_MAX:
            return parse_json(body)
        async with self._large:
            await asyncio.sleep(0)  # a probe that has come meanwhile is answered first
            return parse_json(body)

    async def _generate(
        self, request: web.Request, wanted: GenerationRequest
    ) -> web.StreamResponse:
        self._check_model(wanted.model)
        limits = self._service.limits()
        prompt = await self._prompt_tokens(wanted, limits)
        answer = Answer(
            self._service.tokenizer,
            wanted.stop,
            wants_logprobs=wanted.sampling.logprobs is not None,
        )
        shape = self._shape(wanted)
        stop_token_ids = () if wanted.ignore_eos else limits.stop_token_ids
        max_tokens = wanted.max_tokens or limits.max_context - len(prompt)
        with self._service.link.generate(
            prompt, max_tokens, wanted.sampling, stop_token_ids
        ) as generation:
            if wanted.stream:
                return await _stream(request, wanted, generation, answer, shape, len(prompt))
            return await _whole(generation, answer, shape, len(prompt))

    async def _prompt_tokens(self, wanted: GenerationRequest, limits: Ready) -> tuple[int, ...]:
        param = "messages" if wanted.is_chat else "prompt"
        tokens = await self._encode(wanted)
        asked = 0 if wanted.max_tokens is None else wanted.max_tokens
        if len(tokens) + max(1, asked) > limits.max_context:
            raise errors.context_too_long(len(tokens), asked, limits.max_context, param)
        if not tokens:
            raise errors.bad_value(param, f"{param} is empty; send at least one token.")
        if max(tokens) >= limits.vocab_size:
            raise errors.bad_value(
                param,
                f"{param} holds the token {max(tokens)}, and this model's vocabulary ends at"
                f" {limits.vocab_size - 1}.",
            )
        return tokens

    async def _encode(self, wanted: GenerationRequest) -> tuple[int, ...]:
        tokenizer, text = self._service.tokenizer, wanted.prompt
        if wanted.is_chat:
            text = tokenizer.render_chat([dict(message) for message in wanted.messages])
        if not isinstance(text, str):
            return text
        special = not wanted.is_chat  # a chat template writes its own
        if len(text) <= INLINE_CHARS_MAX:
            return tuple(tokenizer.encode(text, special=special))
        async with self._large:
            return tuple(await asyncio.to_thread(tokenizer.encode, text, special=special))

    def _shape(self, wanted: GenerationRequest) -> Shape:
        kind = ChatShape if wanted.is_chat else CompletionShape
        return kind(
            id=f"{'chatcmpl' if wanted.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            model=self._service.model_name,
            created=int(time.time()),
            wants_logprobs=wanted.sampling.logprobs is not None,
            wants_usage=wanted.include_usage,
        )


async def _whole(
    generation: Generation, answer: Answer, shape: Shape, prompt_tokens: int
) -> web.StreamResponse:
    pieces: list[Piece] = []
    while not pieces or pieces[-1].finish_reason is None:
        pieces.append(answer.push(await generation.next()))
    return web.json_response(
        shape.whole(
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.tokens],
            pieces[-1].finish_reason or "",
            Usage(prompt_tokens, answer.token_count),
        )
    )


async def _stream(
    request: web.Request,
    wanted: GenerationRequest,
    generation: Generation,
    answer: Answer,
    shape: Shape,
    prompt_tokens: int,
) -> web.StreamResponse:
    piece = answer.push(await generation.next())
    response = web.StreamResponse(headers=SSE_HEADERS)
    await response.prepare(request)
    opening = shape.opening()
    if opening is not None:
        await response.write(sse(opening))
    while True:
        if piece.text or piece.tokens:
            await response.write(sse(shape.chunk(piece.text, piece.tokens)))
        if piece.finish_reason is not None:
            break
        piece = answer.push(await generation.next())
    last = sse(shape.last_chunk(piece.finish_reason))
    if wanted.include_usage:
        last += sse(shape.usage_chunk(Usage(prompt_tokens, answer.token_count)))
    await response.write(last + DONE)
    await response.write_eof()
    return response
