from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.backends.reference.checkpoint import identity
from engine.backends.reference.generation import Generator, TokenRequest
from engine.backends.reference.random_model import main, write_random_model
from engine.backends.reference.text import Tokenizer
from plumbing.errors import UsageError
from tests.engine.reference.support import GREEDY, cache_for, decoder_of, run, tokens_of

PROMPTS = [f"Tell me about the number {number}." for number in range(10)]


@pytest.fixture(scope="module", name="model")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("random") / "model")
    write_random_model(directory)
    return directory


def test_write_random_model_same_seed_same_bytes(model: str, tmp_path: Any):
    """Deterministic: a second one is equal file by file, another seed is not."""
    write_random_model(str(tmp_path / "again"))
    for name in os.listdir(model):
        with (
            open(os.path.join(model, name), "rb") as one,
            open(tmp_path / "again" / name, "rb") as two,
        ):
            assert one.read() == two.read(), name
    assert main([str(tmp_path / "other"), "--seed", "1"]) == 0
    assert identity(str(tmp_path / "other"))["shards"] != identity(model)["shards"]


def test_write_random_model_answers_tell_prompts_apart(model: str):
    """A drill must see a wrong answer: greedy text differs by prompt, varies, and is one
    printable character per token."""
    decoder, tokenizer = decoder_of(model), Tokenizer.load(model)
    generator = Generator(decoder, cache_for(decoder))
    made = run(
        generator,
        (
            TokenRequest(
                number, tuple(tokenizer.encode(text)), 64, GREEDY, decoder.config.eos_token_ids
            )
            for number, text in enumerate(PROMPTS)
        ),
    )
    answers = {tokenizer.decode(tokens_of(produced)) for produced in made.values()}
    assert len(answers) == len(PROMPTS)
    for answer in answers:
        assert len(answer) == 64
        assert answer.isascii()
        assert answer.isprintable()
        assert len(set(answer)) > 20
        assert not any(answer[start : start + 16] in answer[:start] for start in range(16, 48))


def test_interrupted_write_is_finished_and_a_model_that_is_there_is_kept(tmp_path: Path):
    """Goal: an init container that a kubelet runs again. Method: leftovers without config.json, a
    whole model, a user's files."""
    (tmp_path / "model.safetensors").write_bytes(b"half")
    assert main(["--if-missing", str(tmp_path)]) == 0
    written = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert len(written["model.safetensors"]) > 100_000
    assert main(["--if-missing", "--seed=1", str(tmp_path)]) == 0
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == written
    (tmp_path / "config.json").rename(tmp_path / "mine.txt")
    assert main(["--if-missing", str(tmp_path)]) == 2
    with pytest.raises(UsageError, match="is not empty"):
        write_random_model(str(tmp_path))
