"""The text of prompts and answers: tokenizer, chat template, and an answer's text token by token.

The surprising thing: one token is not one piece of text. A character may be spread over several
tokens, so text is held back until no later token can change it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import tokenizers
from tokenizers.decoders import DecodeStream

from engine.backends.reference.completions import ChatMessage, Usage
from engine.backends.reference.config import ASSISTANT_TURN, BOS, CHAT_SPECIALS, END_OF_TURN
from engine.backends.reference.generation import FinishReason, TokenRequest, finish_reason
from engine.backends.shards import read_file
from plumbing.errors import UsageError


class Tokenizer:
    """A checkpoint's `tokenizer.json`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: str) -> Tokenizer:
        """Read the tokenizer of a checkpoint. Raises as `read_file`."""
        path = os.path.join(directory, "tokenizer.json")
        content = read_file(path)
        try:
            return cls(tokenizers.Tokenizer.from_buffer(content))
        except Exception as error:  # the library raises bare Exception
            text = f"{path} is no tokenizer of the tokenizers library ({error}); download it again."
            raise UsageError("model.broken", text) from None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; with `special`, also those that the tokenizer adds (a beginning of text).

        A batch of one: the library's `encode` keeps the interpreter lock (a text of 4 MB blocked
        every other thread for 6 s, measured), its `encode_batch` releases it.
        """
        encoded = self._tokenizer.encode_batch([text], add_special_tokens=special)
        return list(encoded[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> Callable[[int], str | None]:
        """A function from each token in turn to the text that it settles, if any."""
        return partial(DecodeStream(skip_special_tokens=True).step, self._tokenizer)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt of a chat by the one template of this backend, the random model's; encode it
        with `special=False`.

        Raises:
            UsageError: `model.no_chat_template`: the checkpoint lacks the template's tokens.
        """
        if any(self._tokenizer.token_to_id(name) is None for name in CHAT_SPECIALS):
            raise UsageError(
                "model.no_chat_template",
                "The reference backend has no chat template for this checkpoint; send a prompt to"
                " /v1/completions instead.",
            )
        turns = (f"<|{each.role}|>{each.text}{END_OF_TURN}" for each in messages)
        return f"{BOS}{''.join(turns)}{ASSISTANT_TURN}"


class TextStream:
    """Tokens in, text out, never half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream()
        self._tokens: list[int] = []
        self._sent = 0  # characters of their text

    def push(self, token: int) -> str:
        """The text that `token` settles; often "" and sometimes more than one token's."""
        self._tokens.append(token)
        text = self._stream(token) or ""
        self._sent += len(text)
        return text

    def finish(self) -> str:
        """The text held back, now that no token follows."""
        return self._tokenizer.decode(self._tokens)[self._sent :]


class StopStrings:
    """Cuts text before the stop string that is complete first; of two that end at once, the longer.

    The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be sent, whether a stop string was met); after that, push no more."""
        text, self._held = self._held + text, ""
        found = [(text.index(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if found:
            return text[: sum(min(found))], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text held back because it might have begun a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class Piece(NamedTuple):
    """Text that may be sent, why the answer ends with it (None: it does not), and the tokens that
    it is made of, of one output of the model or of a journal."""

    text: str
    finish_reason: str | None
    tokens: Sequence[int] = ()


class AnswerText:
    """The text of one answer. After a piece with a `finish_reason`, push no more.

    A client sees nothing of a stop token or a stop string, and never half a character. Stop strings
    are looked for behind the first `min_tokens` tokens only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        prompt_tokens: int = 0,
        min_tokens: int = 0,
    ) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = StopStrings(stop)
        self._prompt_tokens, self._min_tokens = prompt_tokens, min_tokens
        self._made = 0  # tokens of the answer so far

    @property
    def usage(self) -> Usage:
        made, prompt = self._made, self._prompt_tokens
        names = "prompt_tokens", "completion_tokens", "total_tokens"
        return dict(zip(names, (prompt, made, prompt + made), strict=True))

    def push(self, token: int, reason: FinishReason | None) -> Piece:
        """`reason` "stop": it is a stop token, which has no text."""
        self._made += 1
        text = "" if reason == "stop" else self._stream.push(token)
        if reason is not None:
            text += self._stream.finish()
        if self._made > self._min_tokens:
            text, is_stopped = self._stops.push(text)
            if is_stopped:
                return Piece(text, "stop", (token,))
            if reason is not None:
                text += self._stops.finish()
        return Piece(text, reason, (token,))


def replay(request: TokenRequest, answer: AnswerText, vocab_size: int) -> Piece:
    """What was made of a request that is resumed, as one piece; `answer` continues behind it.

    Another engine made these tokens, so they must be tokens that this request could have had: an
    answer joined from two requests would look whole. The text layer gets them one by one, as when
    they were made. The piece has a finish reason if they had ended the answer.

    Raises:
        UsageError: `resume.bad_journal`.
    """
    tokens = request.made
    if len(tokens) > request.max_tokens:
        raise _bad(f"it has {len(tokens)} tokens, and the answer ends with {request.max_tokens}")
    texts: list[str] = []
    piece = Piece("", None)
    for made, token in enumerate(tokens, 1):
        if piece.finish_reason is not None:
            raise _bad(f"the answer ends with token {made - 1}, and the journal has {len(tokens)}")
        if token >= vocab_size:
            raise _bad(f"its token {made} is {token}, and the vocabulary ends at {vocab_size - 1}")
        reason = finish_reason(token, made, request.max_tokens, request.stop_token_ids)
        if reason == "stop" and made <= request.sampling.min_tokens:
            raise _bad(f"it ends with {made} tokens, and min_tokens asks for more")
        piece = answer.push(token, reason)
        texts.append(piece.text)
    return Piece("".join(texts), piece.finish_reason, tokens)


def _bad(what: str) -> UsageError:
    what = f"The journal is not one of this request: {what}; send the request without a journal."
    return UsageError("resume.bad_journal", what)
