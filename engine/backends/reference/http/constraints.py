"""The parameters that constrain an answer, from OpenAI's and vLLM's bodies to `SamplingParams`.

Owns their names, limits and translation to token ids. What they do to an answer is in
`model/constraints.py`. A grammar may be asked for in five ways, of which a body may use one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine.backends.reference import grammar
from engine.backends.reference.http.replies import bad_value
from engine.backends.reference.link import SamplingParams

# A request's lists travel to the model process with every request in the queue.
GRAMMAR_CHARS_MAX = 64 << 10  # the schema of a large tool is a few thousand
BIASES_MAX = 1024
BAD_WORDS_MAX = 128
STOP_TOKENS_MAX = 128

DECIMAL = re.compile("[0-9]{1,10}")

Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Word = Annotated[str, Meta(min_length=1, max_length=256)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
Schema = dict[str, Any] | str


class StructuredOutputs(Struct, frozen=True):
    """vLLM's. One of them."""

    choice: Choices | None = None
    regex: str | None = None
    json: Schema | None = None
    json_object: bool | None = None


class JsonSchema(Struct, frozen=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ConstraintFields(Struct, kw_only=True):
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_TOKENS_MAX)] = []
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=BIASES_MAX)
    ] = {}
    bad_words: Annotated[list[Word], Meta(max_length=BAD_WORDS_MAX)] = []
    guided_choice: Choices | None = None
    guided_regex: str | None = None
    guided_json: Schema | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    response_format: ResponseFormat = ResponseFormat("text")

    @property
    def grammar(self) -> str:
        """The source of the grammar, "" for none. Raises ApiError."""
        outputs, form = self.structured_outputs, self.response_format
        if form.type == "json_schema" and form.json_schema is None:
            raise bad_value("response_format", "response_format has no json_schema.")
        schema = form.json_schema.schema if form.json_schema is not None else None
        sources = [
            *(grammar.of_choice(each) for each in (self.guided_choice, outputs.choice) if each),
            *(grammar.of_regex(each) for each in (self.guided_regex, outputs.regex) if each),
            *(_schema(each) for each in (self.guided_json, outputs.json) if each is not None),
            *([_schema({"type": "object"})] if outputs.json_object else []),
            *([_schema({"type": "object"})] if form.type == "json_object" else []),
            *([_schema(schema)] if form.type == "json_schema" and schema is not None else []),
        ]
        if len(sources) > 1:
            what = "This request asks for more than one grammar; send one."
            raise bad_value("structured_outputs", what)
        if sources and len(sources[0]) > GRAMMAR_CHARS_MAX:
            what = f"The grammar exceeds the limit of {GRAMMAR_CHARS_MAX} characters; shorten it."
            raise bad_value("structured_outputs", what)
        return sources[0] if sources else ""

    def constrain(
        self,
        sampling: SamplingParams,
        encode: Callable[[str], Sequence[int]],
        vocab_size: int,
    ) -> SamplingParams:
        """`sampling` with all of this. `encode` gives a word's tokens. Raises ApiError."""
        return msgspec.structs.replace(
            sampling,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            logit_bias=self._biases(vocab_size),
            bad_words=tuple(
                word for word in _forms(self.bad_words, encode) if max(word) < vocab_size
            ),
            grammar=self.grammar,
        )

    def _biases(self, vocab_size: int) -> tuple[tuple[int, float], ...]:
        for token in self.logit_bias:
            if not (DECIMAL.fullmatch(token) and int(token) < vocab_size):
                what = f"logit_bias: {token!r:.20} is not a token id below {vocab_size}."
                raise bad_value("logit_bias", what)
        return tuple((int(token), bias) for token, bias in self.logit_bias.items())


def _schema(schema: Schema) -> str:
    try:
        document = json.loads(schema) if isinstance(schema, str) else schema
        return grammar.of_json_schema(json.dumps(document))
    except (ValueError, RecursionError) as error:
        raise bad_value("guided_json", f"The JSON schema is not JSON: {error}.") from None


def _forms(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """The tokens of each word: as it is, and behind a space where that is another first token."""
    forms: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, behind = (tuple(encode(space + word.lstrip())) for space in ("", " "))
        if plain:
            forms[plain] = None
        if behind and len(behind) == len(plain) and behind[0] != plain[0]:
            forms[behind] = None
    return list(forms)
