"""The HTTP routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`.

Owns the path of one request: body, checks, tokens of the prompt, generation, answer. What may be
asked is in `requests.py`, how answers look in `replies.py`. Must not know which engine is active:
it is given the values of the headers that every response carries.

The surprising thing: a stream's headers are sent only with its first token. An engine that dies
before has then sent nothing, and the client sees a connection error, not a broken answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.backends.reference.http.model_link import Generation, ModelLink
from engine.backends.reference.http.replies import (
    DONE,
    ApiError,
    OpenAiReply,
    bad_value,
    from_understudy,
    sse,
)
from engine.backends.reference.http.requests import (
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
    parse_json,
)
from engine.backends.reference.http.text import AnswerText, Piece, Tokenizer
from engine.backends.reference.link import ReadyMsg
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)

# 128 Ki tokens are about half a MiB of text, or one MiB as an array of ids.
BODY_BYTES_MAX = 4 << 20
# A body must arrive this soon after its headers, or a few slow senders hold every connection.
BODY_DEADLINE_S = 30.0
# Tokenising this much takes about a millisecond; more is done on a thread, off the loop.
INLINE_CHARS_MAX = 4096

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
HandlerFn = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ServedModel:
    """The model that the routes serve, and the engine's state; the backend keeps it up to date."""

    model_name: str
    tokenizer: Tokenizer
    link: ModelLink
    engine: str = ""
    token: int = 0
    is_draining: bool = False
    rejected: int = 0
    ready: ReadyMsg | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    requests_open: int = 0  # between their headers and the end of their answer
    on_request: Callable[[asyncio.BaseProtocol], None] = lambda protocol: None

    @property
    def limits(self) -> ReadyMsg:
        assert self.ready is not None  # connections are accepted only afterwards
        return self.ready


def make_app(served: ServedModel) -> web.Application:
    routes = _Routes(served)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[routes.errors_as_json])
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{model:.+}", routes.model)
    app.router.add_post("/v1/completions", routes.completions)
    app.router.add_post("/v1/chat/completions", routes.chat_completions)
    app.on_response_prepare.append(routes.add_headers)
    return app


class _Routes:
    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._large = asyncio.Lock()  # one at a time: each blocks the loop for a moment

    # ------------------------------------------------------------------ around every request

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """The engine and its grant: by the token a client recognises a stale engine."""
        response.headers["X-Understudy-Engine"] = self._served.engine
        response.headers["X-Understudy-Token"] = str(self._served.token)
        if self._served.is_draining:
            response.headers["Connection"] = "close"  # the next request is for the next engine
            response.force_close()

    @web.middleware
    async def errors_as_json(self, request: web.Request, handler: HandlerFn) -> web.StreamResponse:
        self._served.on_request(request.protocol)
        self._served.requests_open += 1
        try:
            return await handler(request)
        except ApiError as error:
            refusal = error
        except UnderstudyError as error:
            refusal = from_understudy(error)
        except web.HTTPRequestEntityTooLarge:
            what = f"The request body exceeds the limit of {BODY_BYTES_MAX} bytes; shorten it."
            refusal = ApiError(413, what, code="body_too_large")
        except web.HTTPException as error:
            what = f"{request.method} {request.path:.100}: {error.reason}."
            refusal = ApiError(error.status, what, code="no_such_route")
        except ConnectionResetError:
            return web.Response(status=499)  # the client has left and does not read this
        except Exception:
            logger.exception("a request failed: %s %s", request.method, request.path)
            what = "This engine failed to process the request; see its log."
            refusal = ApiError(500, what, code="internal_error", kind="server_error")
        finally:
            self._served.requests_open -= 1
        if refusal.is_temporary:
            self._served.rejected += 1
        return web.json_response(refusal.body(), status=refusal.status, headers=refusal.headers())

    # ------------------------------------------------------------------ models

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        self._check_model(request.match_info["model"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, object]:
        """OpenAI's keys, vLLM's `max_model_len`, llama-swap's `status`."""
        served = self._served
        return {
            "id": served.model_name,
            "object": "model",
            "created": served.created,
            "owned_by": "understudy",
            "max_model_len": served.limits.max_context,
            "status": {"value": "loaded"},
            "meta": {"understudy": {"engine": served.engine, "token": served.token}},
        }

    def _check_model(self, asked: str | None) -> None:
        name = self._served.model_name
        if asked not in (None, name):
            what = f"The model {asked!r:.500} does not exist; this engine serves {name!r}."
            raise ApiError(404, what, code="model_not_found", param="model")

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
            await asyncio.sleep(0)  # a probe that has arrived meanwhile is answered first
            return parse_json(body)

    async def _generate(
        self, request: web.Request, body: CompletionBody | ChatBody
    ) -> web.StreamResponse:
        self._check_model(body.model)
        limits = self._served.limits
        prompt = await self._prompt_tokens(body, limits)
        is_chat = isinstance(body, ChatBody)
        reply = OpenAiReply(
            is_chat=is_chat,
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            model=self._served.model_name,
            created=int(time.time()),
            wants_usage=body.stream and bool(body.stream_options.include_usage),
        )
        answer = AnswerText(self._served.tokenizer, body.stops, len(prompt))
        stop_token_ids = () if body.ignore_eos else limits.stop_token_ids
        max_tokens = body.max_tokens or limits.max_context - len(prompt)
        with self._served.link.generate(
            prompt, max_tokens, body.sampling, stop_token_ids
        ) as generation:
            pieces = _pieces(generation, answer)
            if body.stream:
                return await _stream(request, pieces, answer, reply)
            whole = [piece async for piece in pieces]
        text = "".join(piece.text for piece in whole)
        return web.json_response(reply.whole(text, whole[-1].finish_reason, answer.usage))

    async def _prompt_tokens(
        self, body: CompletionBody | ChatBody, limits: ReadyMsg
    ) -> Sequence[int]:
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        tokens = await self._encode(body)
        count, asked = len(tokens), body.max_tokens or 0
        if count + max(1, asked) > limits.max_context:
            needed = f"{count} prompt tokens" + (f" and {asked} completion tokens" if asked else "")
            raise ApiError(
                400,
                f"The context length is {limits.max_context} tokens, but the request needs"
                f" {needed}; shorten the prompt or lower max_tokens.",
                code="context_length_exceeded",
                param=param,
            )
        if not tokens:
            raise bad_value(param, f"{param} is empty; send at least one token.")
        if max(tokens) >= limits.vocab_size:
            last = limits.vocab_size - 1
            what = f"{param} contains the token {max(tokens)}, but the vocabulary ends at {last}."
            raise bad_value(param, what)
        return tokens

    async def _encode(self, body: CompletionBody | ChatBody) -> Sequence[int]:
        tokenizer, special = self._served.tokenizer, isinstance(body, CompletionBody)
        if isinstance(body, ChatBody):  # a chat template writes its own special tokens
            text = tokenizer.render_chat([message.plain() for message in body.messages])
        elif isinstance(body.prompt, str):
            text = body.prompt
        else:
            return body.prompt
        if len(text) <= INLINE_CHARS_MAX:
            return tokenizer.encode(text, special=special)
        async with self._large:
            return await asyncio.to_thread(tokenizer.encode, text, special=special)


async def _pieces(generation: Generation, answer: AnswerText) -> AsyncIterator[Piece]:
    """The answer up to and including the piece with the finish reason."""
    reason = None
    while reason is None:
        piece = answer.push(await generation.next())
        reason = piece.finish_reason
        yield piece


async def _stream(
    request: web.Request, pieces: AsyncIterator[Piece], answer: AnswerText, reply: OpenAiReply
) -> web.StreamResponse:
    response = web.StreamResponse(headers=SSE_HEADERS)
    async for piece in pieces:
        if not response.prepared:
            await response.prepare(request)
            if opening := reply.opening():
                await response.write(sse(opening))
        if piece.text:
            await response.write(sse(reply.chunk(piece.text)))
        if piece.finish_reason is not None:
            last = sse(reply.last_chunk(piece.finish_reason))
            usage = sse(reply.usage_chunk(answer.usage)) if reply.wants_usage else b""
            await response.write(last + usage + DONE)
    await response.write_eof()
    return response
