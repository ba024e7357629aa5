"""From a checked body to what the model is asked: tokens of the prompt, limits, sampling.

Owns the checks that need the model's limits, its tokenizer or a grammar. What the fields of a body
may be is in `requests.py` and `constraints.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from engine.backends.reference.grammar import Matcher
from engine.backends.reference.http.replies import ApiError, bad_value
from engine.backends.reference.http.requests import ChatBody, CompletionBody
from engine.backends.reference.http.served import ServedModel
from engine.backends.reference.link import SamplingParams

# Tokenising this much takes about a millisecond, as does a grammar of this size; more is done on a
# thread, off the loop.
INLINE_CHARS_MAX = 4096

Body = CompletionBody | ChatBody


@dataclass(frozen=True)
class Asked:
    """What the model must do for a body. `matcher`: at the beginning of the answer's grammar."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    stops: Sequence[str]
    matcher: Matcher | None


class Asking:
    """Asks the way the served model needs it; `large` is held for work that takes long."""

    def __init__(self, served: ServedModel, large: asyncio.Lock) -> None:
        self._served = served
        self._large = large

    async def of(self, body: Body, request_id: str | None) -> Asked:
        """`request_id` draws the seed of a body that has none. Raises ApiError, UnderstudyError."""
        limits = self._served.limits
        prompt = await self._prompt_tokens(body)
        max_tokens = body.max_tokens or limits.max_context - len(prompt)
        if body.min_tokens > max_tokens:
            what = f"min_tokens is {body.min_tokens}, and the answer ends with {max_tokens} tokens."
            raise bad_value("min_tokens", what)
        outside = [token for token in body.stop_token_ids if token >= limits.vocab_size]
        if outside:
            what = f"stop_token_ids: {outside[0]} is not a token id below {limits.vocab_size}."
            raise bad_value("stop_token_ids", what)
        sampling = body.constrain(body.sampling, self._encode_word, limits.vocab_size)
        if body.seed is None and request_id is not None:
            # So that it is the same at every engine that this request is sent to.
            digest = hashlib.blake2b(
                request_id.encode(errors="surrogateescape"), digest_size=7
            ).digest()
            sampling = structs.replace(sampling, seed=int.from_bytes(digest))
        matcher = await self._matcher(sampling.grammar)
        ends = () if body.ignore_eos and matcher is None else limits.stop_token_ids
        stop_token_ids = tuple(dict.fromkeys((*ends, *body.stop_token_ids)))
        return Asked(prompt, max_tokens, sampling, stop_token_ids, body.stops, matcher)

    async def _matcher(self, grammar: str) -> Matcher | None:
        if not grammar:
            return None
        grammars = self._served.grammars
        assert grammars is not None  # since `prepare`
        if grammars.is_loaded and len(grammar) <= INLINE_CHARS_MAX:
            return grammars.matcher(grammar)
        async with self._large:
            return await asyncio.to_thread(grammars.matcher, grammar)

    async def _prompt_tokens(self, body: Body) -> Sequence[int]:
        limits = self._served.limits
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

    async def _encode(self, body: Body) -> Sequence[int]:
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

    def _encode_word(self, word: str) -> Sequence[int]:
        return self._served.tokenizer.encode(word, special=False)
