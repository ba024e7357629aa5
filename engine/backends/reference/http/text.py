"""Text to tokens and back: tokenizer, chat template, and the text of an answer, token by token.

Owns everything about characters. Knows no model and imports no numpy: it runs in the HTTP process.
The surprising thing: one token is not one piece of text. A character may be spread over several
tokens, so text is held back until no later token can change it. The pieces sent, put together, are
exactly what decoding all tokens at once would give, cut before the first stop string.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.backends.reference.http.replies import TokenUsage
from engine.backends.reference.link import TokenMsg
from engine.backends.shards import read_file, read_json
from plumbing.errors import UsageError

UNFINISHED = "\ufffd"  # how a decoder shows bytes that are not (yet) a character


class Tokenizer:
    """`tokenizer.json` with the special tokens and the chat template beside it."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, settings: dict[str, Any], template: str | None
    ) -> None:
        self._tokenizer = tokenizer
        self._specials = {
            name: _token_name(settings.get(name)) for name in ("bos_token", "eos_token")
        }
        self._template = None if template is None else _compile(template)

    @classmethod
    def load(cls, directory: str) -> Tokenizer:
        """Read the tokenizer of a checkpoint. Raises as `read_file`."""
        path = os.path.join(directory, "tokenizer.json")
        read_json(path)  # for its messages; the library's own name neither file nor cause
        content = read_file(path)
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise UsageError(
                "model.broken",
                f"{path} is not a tokenizer that the tokenizers library can read ({error}); "
                "download it again.",
            ) from None
        settings_path = os.path.join(directory, "tokenizer_config.json")
        settings = read_json(settings_path) if os.path.exists(settings_path) else {}
        return cls(tokenizer, settings, _read_template(directory, settings))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; with `special`, also those that the tokenizer adds (a beginning of text).

        A batch of one: the library's `encode` keeps the interpreter lock (a text of 4 MB blocked
        every other thread for 6 s, measured), its `encode_batch` releases it.
        """
        encoded = self._tokenizer.encode_batch([text], add_special_tokens=special)
        return list(encoded[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt that the chat template makes; encode it with `special=False`.

        Raises:
            UsageError: `model.no_chat_template`; `request.bad_messages` when the template refuses.
        """
        if self._template is None:
            raise UsageError(
                "model.no_chat_template",
                "This checkpoint has no chat template; send a prompt to /v1/completions instead.",
            )
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._specials
            )
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                "request.bad_messages",
                f"The model's chat template refuses these messages: {error}.",
            ) from None


class TextStream:
    """Tokens in, text out, never half a character.

    Decodes a window: `_window[:_known]` is there for context only (some tokenizers strip the space
    before the first token) and its text was sent. The window restarts where the text is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0
        self._sent = 0  # characters of the window's text that were sent

    def push(self, token: int) -> str:
        """The text that `token` settles; often "" and sometimes more than one token's."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith(UNFINISHED):
            # Later tokens may complete it. Byte-level decoders show one such sign for the bytes so
            # far, byte-fallback ones one for each byte, and then also for whole characters before.
            return self._send(text, len(text.rstrip(UNFINISHED)))
        new = self._send(text, len(text))
        if new:
            self._window = self._window[self._known :]
            self._known = len(self._window)
            self._sent = len(self._tokenizer.decode(self._window))
        return new

    def finish(self) -> str:
        """The text held back, now that no token follows."""
        text = self._tokenizer.decode(self._window)
        return self._send(text, len(text))

    def _send(self, text: str, end: int) -> str:
        new = text[self._sent : end]
        self._sent = max(self._sent, end)
        return new


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be sent, and why the answer ends with it (None: it does not)."""

    text: str
    finish_reason: str | None


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
        self._min_tokens = min_tokens
        self.usage = TokenUsage(prompt_tokens)

    def push(self, token: TokenMsg) -> Piece:
        self.usage.completion_tokens += 1
        text = "" if token.finish_reason == "stop" else self._stream.push(token.token)
        if token.finish_reason is not None:
            text += self._stream.finish()
        if self.usage.completion_tokens <= self._min_tokens:
            return Piece(text, token.finish_reason)
        text, is_stopped = self._stops.push(text)
        if is_stopped:
            return Piece(text, "stop")
        if token.finish_reason is not None:
            text += self._stops.finish()
        return Piece(text, token.finish_reason)


class StopStrings:
    """Cuts text before the stop string that is complete first; of two that end at once, the longer.

    The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted((stop for stop in stops if stop), key=len, reverse=True)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be sent, whether a stop string was met); after that, push no more."""
        if not self._stops:
            return text, False
        text, self._held = self._held + text, ""
        found = [(text.index(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if found:
            end, minus_length = min(found)
            return text[: end + minus_length], True
        keep = max(_overlap(text, stop) for stop in self._stops)
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


def _read_template(directory: str, settings: dict[str, Any]) -> str | None:
    """A file of its own (transformers ≥ 4.51) wins over the key in `tokenizer_config.json`."""
    path = os.path.join(directory, "chat_template.jinja")
    if os.path.exists(path):
        try:
            return read_file(path).decode()
        except UnicodeDecodeError as error:
            raise UsageError(
                "model.broken", f"{path} cannot be read: {error}; copy it again."
            ) from None
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None


def _compile(template: str) -> jinja2.Template:
    """As transformers compiles it: sandboxed, because a template is foreign code."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise UsageError(
            "model.broken",
            f"The chat template of the checkpoint is not valid jinja2 ({error}); download its "
            "tokenizer files again.",
        ) from None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _token_name(value: Any) -> str:
    """A special token is written as a string, or as an object with its text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
