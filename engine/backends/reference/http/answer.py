"""Tokens of one answer become text, stop strings end it, and pieces come out. Pure.

Owns what a client may see of a token: nothing of a stop token, nothing of a stop string, and never
half a character. Knows no HTTP and no link beyond the `Token` message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.reference.http.openai.replies import TokenInfo
from engine.backends.reference.http.text import UNFINISHED, StopStrings, Tokenizer
from engine.backends.reference.link import Token


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be sent, the tokens that it settles, and why the answer ends with it."""

    text: str
    tokens: tuple[TokenInfo, ...]
    finish_reason: str | None

    @property
    def is_empty(self) -> bool:
        return not self.text and self.finish_reason is None


class Answer:
    """The tokens of one request in order. After a `finish_reason`, push no more."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, wants_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream()
        self._stops = StopStrings(stop)
        self._wants_logprobs = wants_logprobs
        self._held: list[TokenInfo] = []  # tokens whose text is not settled
        self.token_count = 0

    def push(self, token: Token) -> Piece:
        self.token_count += 1
        is_last = token.finish_reason is not None
        text = ""
        if token.finish_reason != "stop":
            text = self._stream.push(token.token)
            if self._wants_logprobs:
                self._held.append(self._info(token))
        if is_last:
            text += self._stream.finish()
        text, is_stopped = self._stops.push(text)
        reason = "stop" if is_stopped else token.finish_reason
        if is_last and not is_stopped:
            text += self._stops.finish()
        tokens: tuple[TokenInfo, ...] = ()
        if text or reason is not None:
            tokens, self._held = tuple(self._held), []
        return Piece(text, tokens, reason)

    def _info(self, token: Token) -> TokenInfo:
        assert token.logprob is not None  # it was asked for
        return TokenInfo(
            *self._spelled(token.token),
            token.logprob,
            tuple((*self._spelled(other.token), other.logprob) for other in token.top),
        )

    def _spelled(self, token: int) -> tuple[str, bytes | None]:
        """Text and bytes; no bytes for a token that is no whole character by itself."""
        text = self._tokenizer.token_text(token)
        return text, None if UNFINISHED in text else text.encode()
