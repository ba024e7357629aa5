"""The answer to one checked request, whole or as a stream, from its beginning or resumed.

Owns the order: what is asked of the model, the part of the answer that exists already, then the
model's work. A refusal comes before the first byte.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from aiohttp import web

from engine.backends.reference.http.asked import Asked, Asking, Body
from engine.backends.reference.http.model_link import Generation
from engine.backends.reference.http.replies import OpenAiReply
from engine.backends.reference.http.requests import ChatBody
from engine.backends.reference.http.resume import replay
from engine.backends.reference.http.served import ServedModel
from engine.backends.reference.http.stream import MarkedStream, TokenGroup, groups_of, send_stream
from engine.backends.reference.http.text import AnswerText
from plumbing import hop

# Replaying this much takes about a millisecond; more is done on a thread, off the loop.
INLINE_TOKENS_MAX = 256
REQUEST_ID = "X-Request-Id"
REQUEST_ID_CHARS_MAX = 128  # it is part of every event of a stream


class Answering:
    """Answers with one served model; `large` is held for work that takes long."""

    def __init__(self, served: ServedModel, large: asyncio.Lock) -> None:
        self._served = served
        self._large = large
        self._asking = Asking(served, large)

    async def answer(
        self, request: web.Request, body: Body, journal: hop.Journal | None
    ) -> web.StreamResponse:
        served = self._served
        served.check_model(body.model)
        is_marked = served.is_marked(request)
        attempt = request.headers.get(hop.ATTEMPT, "") if is_marked else ""
        given_id = request.headers.get(REQUEST_ID, "")[:REQUEST_ID_CHARS_MAX] if is_marked else ""
        asked = await self._asking.of(body, given_id or None)
        reply = self._reply(body, given_id or uuid.uuid4().hex)
        least = asked.sampling.min_tokens
        answer = AnswerText(served.tokenizer, asked.stops, len(asked.prompt), least)
        replayed = await self._replay(asked, answer, journal)
        with (
            self._mark(request) if is_marked and body.stream else nullcontext() as marked,
            self._generate(asked, replayed, hop.read_attempt(attempt)) as generation,
        ):
            groups = groups_of(replayed, generation, answer)
            if body.stream:
                return await send_stream(request, groups, answer.usage, reply, marked)
            whole = [group.piece async for group in groups]
        text = "".join(piece.text for piece in whole)
        return web.json_response(reply.whole(text, whole[-1].finish_reason, answer.usage))

    def _generate(
        self, asked: Asked, replayed: TokenGroup | None, attempt: bytes
    ) -> AbstractContextManager[Generation | None]:
        """Ask the model, unless what was replayed is the whole answer."""
        if replayed is not None and replayed.piece.finish_reason is not None:
            return nullcontext()
        made = () if replayed is None else replayed.tokens
        generation = self._served.link.generate(
            asked.prompt, asked.max_tokens, asked.sampling, asked.stop_token_ids, made, attempt
        )
        self._served.replayed += len(made)
        return generation

    @contextmanager
    def _mark(self, request: web.Request) -> Iterator[MarkedStream]:
        """While it lasts, a drain may leave this stream to the next engine."""
        if request.transport is None:
            raise ConnectionResetError
        marked = MarkedStream(request.transport)
        if self._served.is_continued:
            marked.leave()
            raise ConnectionResetError
        self._served.streams.add(marked)
        try:
            yield marked
        finally:
            self._served.streams.discard(marked)

    async def _replay(
        self, asked: Asked, answer: AnswerText, journal: hop.Journal | None
    ) -> TokenGroup | None:
        if journal is None or not journal.tokens:
            return None
        arguments = (journal.tokens, asked, answer, self._served.limits.vocab_size)
        if len(journal.tokens) <= INLINE_TOKENS_MAX:
            piece = replay(*arguments)
        else:
            async with self._large:
                piece = await asyncio.to_thread(replay, *arguments)
        return TokenGroup(journal.tokens, piece)

    def _reply(self, body: Body, request_id: str) -> OpenAiReply:
        is_chat, options = isinstance(body, ChatBody), body.stream_options
        wants_usage = body.stream and bool(options.include_usage)
        return OpenAiReply(
            is_chat=is_chat,
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            model=self._served.model_name,
            created=int(time.time()),
            wants_usage=wants_usage,
            has_usage=wants_usage and bool(options.continuous_usage_stats),
        )
