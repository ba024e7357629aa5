"""The HTTP routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, and the gateway's.

Owns what happens around every request: headers, errors, reading the body. What may be asked is in
`requests.py` and `asked.py`, the way of an answer in `answering.py`, its looks in `replies.py` and
`stream.py`. Must not know which engine is active: it is given the values of the headers that every
response carries.

The surprising thing: a stream's headers are sent only with its first token. An engine that dies
before has then sent nothing, and the client sees a connection error, not a broken answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.backends.reference.http.answering import Answering
from engine.backends.reference.http.asked import INLINE_CHARS_MAX
from engine.backends.reference.http.replies import ApiError, from_understudy
from engine.backends.reference.http.requests import parse_chat, parse_completion, parse_json
from engine.backends.reference.http.served import ServedModel
from engine.backends.reference.http.stream import EVENT_STREAM
from engine.backends.reference.link import PROMPT_TOKENS_MAX
from plumbing import __version__, hop
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)

# 128 Ki tokens are about half a MiB of text, or one MiB as an array of ids.
BODY_BYTES_MAX = 4 << 20
# Behind a gateway there may be a journal in addition, of as many chunks as tokens at most.
JOURNAL_BYTES_MAX = 2 * hop.ITEM_BYTES * PROMPT_TOKENS_MAX
# A body must arrive this soon after its headers, or a few slow senders hold every connection.
BODY_DEADLINE_S = 30.0

HandlerFn = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(served: ServedModel) -> web.Application:
    routes = _Routes(served)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[routes.errors_as_json])
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{model:.+}", routes.model)
    app.router.add_post("/v1/completions", routes.completions)
    app.router.add_post("/v1/chat/completions", routes.chat_completions)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get(hop.HELLO_PATH, routes.hello)
    app.router.add_post(hop.CANARY_PATH, routes.canary)
    app.on_response_prepare.append(routes.add_headers)
    return app


class _Routes:
    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._large = asyncio.Lock()  # one at a time: each blocks the loop for a moment
        self._answering = Answering(served, self._large)

    # ------------------------------------------------------------------ around every request

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """The engine and its grant: by the token a client recognises a stale engine. And for a
        gateway, what a failover does to this answer: what is no stream can be asked for again."""
        response.headers[hop.ENGINE] = self._served.engine
        response.headers[hop.TOKEN] = str(self._served.token)
        if self._served.is_behind_gateway:
            is_stream = response.content_type == EVENT_STREAM
            default = hop.Continuation.NONE if is_stream else hop.Continuation.RETRY
            response.headers.setdefault(hop.CONTINUATION, default)
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
        self._served.check_model(request.match_info["model"])
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

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """vLLM's gauges. Each request that runs has a slot of the KV cache."""
        link = self._served.link
        running = min(link.in_flight, link.slots)
        values = {
            "num_requests_running": running,
            "num_requests_waiting": link.in_flight - running,
            "kv_cache_usage_perc": running / link.slots,
        }
        labels = f'engine="0",model_name={json.dumps(self._served.model_name)}'
        lines = [
            f"# HELP vllm:{name} As vLLM's.\n"
            f"# TYPE vllm:{name} gauge\nvllm:{name}{{{labels}}} {value}\n"
            for name, value in values.items()
        ]
        return web.Response(text="".join(lines))

    # ------------------------------------------------------------------ the gateway's

    async def hello(self, request: web.Request) -> web.StreamResponse:
        self._check_gateway()
        served = self._served
        hello = hop.Hello(
            engine=served.engine,
            token=served.token,
            continuation_id=served.continuation_id,
            continuation=hop.Continuation.EXACT,
            body_bytes_max=BODY_BYTES_MAX,
            models=(served.model_name,),
            version=hop.VERSION,
            backend_version=__version__,
        )
        return web.json_response(body=msgspec.json.encode(hello))

    async def canary(self, request: web.Request) -> web.StreamResponse:
        self._check_gateway()
        checked = await self._served.link.check()
        document = {"ok": checked.ok, "detail": checked.detail}
        return web.json_response(document, status=200 if checked.ok else 503)

    def _check_gateway(self) -> None:
        if not self._served.is_behind_gateway:
            raise web.HTTPNotFound

    # ------------------------------------------------------------------ generation

    async def completions(self, request: web.Request) -> web.StreamResponse:
        document, journal = await self._body(request)
        return await self._answering.answer(request, parse_completion(document), journal)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        document, journal = await self._body(request)
        return await self._answering.answer(request, parse_chat(document), journal)

    async def _body(self, request: web.Request) -> tuple[dict[str, object], hop.Journal | None]:
        """The client's document and, of a request that is resumed, the answer so far."""
        header = request.headers.get(hop.JOURNAL) if self._served.is_marked(request) else None
        if header is not None:
            request = request.clone(client_max_size=BODY_BYTES_MAX + JOURNAL_BYTES_MAX)
        body, journal = await self._read(request), None
        if header is not None:
            try:
                body, journal = hop.without_journal(body, header)
            except ValueError as error:
                what = f"The journal of this request cannot be read: {error}."
                raise ApiError(400, what, code="resume.bad_journal") from None
        if len(body) <= INLINE_CHARS_MAX:
            return parse_json(body), journal
        async with self._large:
            await asyncio.sleep(0)  # a probe that has arrived meanwhile is answered first
            return parse_json(body), journal

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                return await request.read()
        except TimeoutError as error:
            what = f"The request's body did not arrive within {BODY_DEADLINE_S:g} s."
            raise ApiError(408, what, code="body_deadline") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            what = f"The request's body cannot be read: {error}"
            raise ApiError(400, what, code="bad_body") from error
