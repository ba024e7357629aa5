"""Parameters that constrain an answer: each form that a client may send, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine.backends.reference.http.requests import parse_chat, parse_completion
from engine.backends.reference.link import SamplingParams
from engine.backends.reference.random_model import write_random_model
from tests.engine.reference.resume_cases import COMPLETIONS, GREEDY
from tests.engine.reference.resuming import pod

SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}
AS_JSON = "json:" + json.dumps(SCHEMA)
GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"guided_choice": ["a.", "b"]}, "regex:a\\x{2e}|b"),
    ({"guided_regex": "a+"}, "regex:a+"),
    ({"guided_json": SCHEMA}, AS_JSON),
    ({"guided_json": json.dumps(SCHEMA)}, AS_JSON),
    ({"structured_outputs": {"choice": ["x"]}}, "regex:x"),
    ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": False}}, "regex:a+"),
    ({"structured_outputs": {"json": SCHEMA}}, AS_JSON),
    ({"structured_outputs": {"json_object": True}}, 'json:{"type": "object"}'),
    ({"response_format": {"type": "text"}}, ""),
    ({"response_format": {"type": "json_object"}}, 'json:{"type": "object"}'),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        AS_JSON,
    ),
]


@pytest.mark.parametrize(("form", "source"), GRAMMARS)
def test_grammar_may_be_asked_for_in_each_form_of_openai_and_vllm(form: Any, source: str):
    """Goal: clients need not change. Method: every form, on both endpoints."""
    assert parse_completion({"prompt": "x", **form}).grammar == source
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert parse_chat({**chat, **form}).grammar == source


def test_every_parameter_arrives_at_the_model():
    """Goal: none is forgotten on the way. Method: send all of them, compare."""
    body = parse_completion(
        {
            "prompt": "x",
            "temperature": 0.5,
            "top_p": 0.5,
            "seed": 3,
            "min_tokens": 2,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {"5": -100, "7": 1.5},
            "bad_words": ["ab", " c"],
            "guided_regex": "x",
        }
    )
    sampling = body.constrain(body.sampling, lambda text: list(text.encode()), 262)
    assert sampling == SamplingParams(
        temperature=0.5,
        top_p=0.5,
        seed=3,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        min_tokens=2,
        logit_bias=((5, -100.0), (7, 1.5)),
        bad_words=((97, 98), (99,)),  # behind a space these have as many tokens only in a real one
        grammar="regex:x",
    )


def test_bad_word_is_also_one_behind_a_space():
    """As in vLLM: a tokenizer has other tokens for a word within a text than at its beginning."""
    ids = {"hot": [1], " hot": [2], "dog": [3, 4], " dog": [5, 4], "s": [6], " s": [7, 6]}
    body = parse_completion({"prompt": "x", "bad_words": ["hot", " dog", "s"]})
    found = body.constrain(body.sampling, ids.__getitem__, 7).bad_words
    assert found == ((1,), (2,), (3, 4), (5, 4), (6,))
    assert body.constrain(body.sampling, ids.__getitem__, 5).bad_words == ((1,), (2,), (3, 4))


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"logit_bias": {key: 1}}, "logit_bias") for key in ("9" * 5000, "²", "-1", "262", "1.0")),
    ({"stop_token_ids": [262]}, "stop_token_ids"),
    ({"min_tokens": 19}, "min_tokens"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "structured_outputs"),
    ({"guided_regex": "a" * (64 << 10)}, "structured_outputs"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[" * 5000}, "guided_json"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
]


def test_impossible_parameters_are_refused_by_name(tmp_path: Path):
    """Goal: a 400 that says what is wrong, never a 500, and nothing reaches the model. Method: one
    wrong value each."""
    write_random_model(str(tmp_path / "tiny"))

    async def main() -> None:
        async with pod(tmp_path / "tiny") as engine:
            for more, param in REFUSED:
                status, _, body = await engine.ask(COMPLETIONS, {**GREEDY, **more})
                assert status == 400, (more, body)
                assert json.loads(body)["error"]["param"] == param, (more, body)
            for more in ({"guided_regex": "(["}, {"guided_json": '{"type": "objct"}'}):
                status, _, body = await engine.ask(COMPLETIONS, {**GREEDY, **more})
                assert (status, b"request.bad_grammar" in body) == (400, True), (more, body)
            assert engine.link.started == 0

    asyncio.run(main())
