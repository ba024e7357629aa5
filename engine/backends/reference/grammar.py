"""Grammars that an answer must match: a choice, a regular expression, a JSON schema.

Owns what is asked of the library, llguidance: which source a grammar has, and which tokens may
follow an answer so far. Both processes use it: HTTP to refuse what is not a grammar and journals
that no grammar allows, the model to choose tokens. Imports no numpy. The library and its tables of
the vocabulary, a third of a second for 128,000 tokens, are loaded in a thread once the engine is
prepared: else the first stream with a grammar would wait for them in the middle of a takeover.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

from engine.backends.shards import read_file
from plumbing.errors import UsageError

REGEX, JSON_SCHEMA = "regex", "json"  # how a source begins
ERROR_CHARS_MAX = 300  # it quotes what the client has sent


def of_choice(choices: Sequence[str]) -> str:
    """The source of: one of these texts, whole."""
    return of_regex("|".join("".join(_literal(letter) for letter in text) for text in choices))


def of_regex(pattern: str) -> str:
    """The source of: a text that matches the whole `pattern` (Rust's syntax, no look-around)."""
    return f"{REGEX}:{pattern}"


def of_json_schema(schema: str) -> str:
    """The source of: a JSON document that `schema`, itself JSON, allows."""
    return f"{JSON_SCHEMA}:{schema}"


class Grammars:
    """Makes matchers over the tokens of one checkpoint."""

    def __init__(self, directory: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`end_ids`: the tokens that end an answer, and so may follow a whole one only."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._tokenizer: Any = None
        self._loading = threading.Lock()

    def preload(self) -> None:
        """Begin to load what the first grammar needs. What cannot be loaded is that one's error."""
        with contextlib.suppress(RuntimeError):  # no thread to be had: as if this were not called
            threading.Thread(target=self._preload, name="grammars", daemon=True).start()

    def _preload(self) -> None:
        with contextlib.suppress(UsageError, OSError, ValueError):
            self._load()

    @property
    def is_loaded(self) -> bool:
        return self._tokenizer is not None

    def matcher(self, source: str) -> Matcher:
        """At the beginning of an answer.

        Raises:
            UsageError: `request.bad_grammar`: not a grammar, or too large; `model.no_end_token`.
        """
        self._load()
        import llguidance

        kind, _, text = source.partition(":")
        library = llguidance.LLMatcher
        if kind == REGEX:
            grammar = library.grammar_from_regex(text)
        else:
            grammar = library.grammar_from_json_schema(text)
        matcher = library(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            what = str(matcher.get_error())[:ERROR_CHARS_MAX]
            raise UsageError("request.bad_grammar", f"This grammar cannot be used: {what}")
        return Matcher(matcher)

    def _load(self) -> None:
        if not self._end_ids:
            raise UsageError(
                "model.no_end_token",
                "This checkpoint names no eos_token_id, so no answer could end with its grammar.",
            )
        with self._loading:
            if self._tokenizer is None:
                import llguidance

                content = read_file(os.path.join(self._directory, "tokenizer.json")).decode()
                self._tokenizer = llguidance.LLTokenizer(
                    content, n_vocab=self._vocab_size, eos_token=self._end_ids
                )


class Matcher:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """The tokens that may come next, one bit each from the lowest. Behind a whole text they are
        the tokens that end it; also where the library gives up because the grammar is too much
        work."""
        mask: bytes = self._matcher.compute_bitmask()
        return mask

    @property
    def has_failed(self) -> bool:
        """The library has given up, so the answer ends before its grammar does."""
        is_error: bool = self._matcher.is_error()
        return is_error

    def take(self, token: int) -> bool:
        """Go on behind `token`; False if it is not allowed here."""
        is_taken: bool = self._matcher.consume_token(token)
        return is_taken


def _literal(letter: str) -> str:
    return letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}"
