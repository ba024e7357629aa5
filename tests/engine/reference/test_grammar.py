"""Grammars over a real tokenizer: what they allow, refuse, and cost."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from engine.backends.reference.grammar import Grammars, of_choice, of_json_schema, of_regex
from engine.backends.reference.link import SamplingParams
from engine.backends.reference.model.batch import Request
from engine.backends.reference.model.generation import Generator
from engine.backends.reference.random_model import write_random_model
from plumbing.errors import UsageError
from tests.engine.reference.support import cache_for, decoder_of, run, tokens_of
from tests.helpers import until

ENDS = (257, 261)
VOCABULARY = 262
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module", name="model")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(str(directory))
    return directory


def allowed(grammars: Grammars, source: str, text: str) -> set[int]:
    matcher = grammars.matcher(source)
    for byte in text.encode():
        assert matcher.take(byte), (text, byte)
    bits = int.from_bytes(matcher.allowed(), "little")
    return {token for token in range(VOCABULARY) if bits >> token & 1}


def test_tables_are_loaded_before_the_first_grammar_and_what_cannot_be_is_its_error(model: Path):
    """Goal: preloading changes when, and nothing else. Method: of a checkpoint that has what is
    needed, and of two that have not."""
    grammars = Grammars(str(model), VOCABULARY, ENDS)
    grammars.preload()
    until(lambda: grammars.is_loaded, "the tables")
    assert grammars.matcher(of_choice(["a"])).take(ord("a"))
    for directory, ends in ((str(model), ()), (str(model / "nowhere"), ENDS)):
        broken = Grammars(directory, VOCABULARY, ends)
        broken.preload()
        with pytest.raises((UsageError, OSError)):
            broken.matcher(of_choice(["a"]))


def test_choice_allows_exactly_what_goes_on_to_one_of_them(model: Path):
    """Goal: texts are taken literally, byte by byte. Method: choices full of signs that mean
    something in a regular expression, compared with the definition at every prefix."""
    choices = ["a.b", "a.c*", "(a|é)", "a", "[☕]\n/\\", 'x"y z']
    grammars, source = Grammars(str(model), VOCABULARY, ENDS), of_choice(choices)
    for text in {choice[:end] for choice in choices for end in range(len(choice) + 1)}:
        going_on = {
            choice.encode()[len(text.encode())]
            for choice in choices
            if choice.startswith(text) and choice != text
        }
        ends = set(ENDS) if text in choices else set()
        assert allowed(grammars, source, text) == going_on | ends


@pytest.mark.parametrize("source", [of_regex("a/b+"), of_json_schema(json.dumps(SCHEMA))])
def test_answer_matches_its_grammar(model: Path, source: str):
    """Goal: the model's own choice among what is allowed. Method: seeded answers, each whole."""
    grammars = Grammars(str(model), VOCABULARY, ENDS)
    decoder = decoder_of(str(model))
    for seed in range(5):
        asked = SamplingParams(temperature=0.5, seed=seed, grammar=source)
        request = Request(1, (256, 65 + seed), 100, asked, ENDS)
        made = run(Generator(decoder, cache_for(decoder), grammars), [request])[1]
        matcher = grammars.matcher(source)
        assert all(matcher.take(token) for token in tokens_of(made))
        if made[-1].finish_reason == "stop":
            text = bytes(tokens_of(made)[:-1]).decode()
            assert text.startswith("a/b") or isinstance(json.loads(text)["a"], int)


@pytest.mark.parametrize(
    "source",
    [
        *(of_regex("(["), of_regex("(?=a)a"), of_json_schema('{"type": "objct"}')),
        *(of_json_schema("{"), of_json_schema('{"$ref": "http://localhost/x"}')),
    ],
)
def test_grammar_that_is_none_is_refused(model: Path, source: str):
    """Goal: 400 before the model hears of it. Method: one of each kind."""
    with pytest.raises(UsageError) as caught:
        Grammars(str(model), VOCABULARY, ENDS).matcher(source)
    assert caught.value.code == "request.bad_grammar"


def test_model_without_an_end_token_takes_no_grammar(model: Path):
    """Goal: an answer that could not end is refused. Method: no end tokens."""
    with pytest.raises(UsageError) as caught:
        Grammars(str(model), VOCABULARY, ()).matcher(of_regex("a"))
    assert caught.value.code == "model.no_end_token"


def test_grammar_that_becomes_too_much_work_cuts_the_answer(model: Path):
    """Goal: no request ends the engine, and none ends as if whole. Method: a regular expression
    with more states than the library makes; the answer ends with `length`."""
    decoder = decoder_of(str(model))
    generator = Generator(decoder, cache_for(decoder), Grammars(str(model), VOCABULARY, ENDS))
    asked = SamplingParams(0, grammar=of_regex("((a{1,200}){1,200}){100,200}b"))
    made = run(generator, [Request(1, (256, 65), 100, asked, ENDS)])[1]
    assert len(made) < 100
    assert made[-1].finish_reason == "length"


def test_constraints_that_leave_nothing_yield_to_the_grammar(model: Path):
    """Goal: there is always a next token. Method: every letter a bad word, and an end that
    min_tokens forbids, under a grammar that allows nothing else."""
    decoder = decoder_of(str(model))
    generator = Generator(decoder, cache_for(decoder), Grammars(str(model), VOCABULARY, ENDS))
    words = tuple((token,) for token in range(VOCABULARY))
    asked = SamplingParams(0, bad_words=words, min_tokens=9, grammar=of_choice(["ab"]))
    made = run(generator, [Request(1, (256, 65), 20, asked, ENDS)])[1]
    assert bytes(tokens_of(made)[:-1]) == b"ab"
    plain = SamplingParams(0, bad_words=words)
    source = random.Random(1)
    prompt = tuple(source.randrange(256) for _ in range(9))
    banned = run(generator, [Request(2, prompt, 5, plain)])[2]
    free = run(generator, [Request(3, prompt, 5, SamplingParams(0))])[3]
    assert tokens_of(banned) == tokens_of(free)
