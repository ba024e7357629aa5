from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from engine.backends.reference.completions import ChatMessage
from engine.backends.reference.random_model import SPECIALS, byte_tokenizer
from engine.backends.reference.text import AnswerText, Piece, StopStrings, TextStream, Tokenizer
from plumbing.errors import UsageError

BYTES = Tokenizer(byte_tokenizer())
# Without "<": a special token written out in a text becomes that token, as everywhere.
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=30)


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: "▁" is a space, the first of which is stripped; bytes as <0xNN>."""
    pieces = ["<unk>", "▁a", "b", "▁", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw = RawTokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
        )
    )
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(raw)


SENTENCEPIECE = sentencepiece()


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@given(PLAIN)
def test_stream_valid_text_never_shows_half_a_character(text: str):
    """One byte per token: every piece is whole characters, and a character is never late."""
    tokens = BYTES.encode(text, special=False)
    pieces = streamed(BYTES, tokens)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    expected = [part for letter in text for part in [""] * (len(letter.encode()) - 1) + [letter]]
    if "\ufffd" not in text:  # in the text itself, it looks like an unfinished one
        assert pieces[:-1] == expected


@given(st.lists(st.integers(0, 255 + len(SPECIALS)), max_size=60))
@settings(max_examples=300)
def test_stream_any_bytes_equal_decoding_at_once(tokens: list[int]):
    """Also what is no UTF-8: the pieces together are what decoding everything gives."""
    assert "".join(streamed(BYTES, tokens)) == BYTES.decode(tokens)


@given(st.lists(st.integers(1, 4) | PLAIN.map(str.encode), max_size=30))
def test_stream_sentencepiece_keeps_inner_spaces_and_joins_bytes(parts: list[int | bytes]):
    """A decoder that strips the first space must not strip one per piece. Characters without a
    token come as bytes between ordinary tokens."""
    bytes_of = ([each] if isinstance(each, int) else [5 + byte for byte in each] for each in parts)
    tokens = [token for each in bytes_of for token in each]
    assert "".join(streamed(SENTENCEPIECE, tokens)) == SENTENCEPIECE.decode(tokens)


def cut_at_once(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition, letter by letter: the first end of a stop string; of two, the longer one."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=400)
def test_stop_strings_any_pieces_cut_like_the_whole_text(pieces: list[str], stops: list[str]):
    """How text was cut into pieces does not matter: compare with the definition."""
    cutter = StopStrings(stops)
    sent, stopped = "", False
    for piece in pieces:
        text, stopped = cutter.push(piece)
        sent += text
        if stopped:
            break
    else:
        sent += cutter.finish()
    assert (sent, stopped) == cut_at_once("".join(pieces), stops)


def answer(text: bytes, *, stop: tuple[str, ...] = (), finish: str = "length") -> list[Piece]:
    """The pieces of an answer of one token per byte, up to its end."""
    answering = AnswerText(BYTES, stop)
    pieces: list[Piece] = []
    for index, byte in enumerate(text):
        reason = finish if index == len(text) - 1 else None
        pieces.append(answering.push(byte, reason))
        if pieces[-1].finish_reason:
            break
    assert answering.usage["completion_tokens"] == len(pieces)
    return pieces


@pytest.mark.parametrize(
    ("pieces", "texts", "reason"),
    [
        (answer(b"abc"), ["a", "b", "c"], "length"),
        (answer(b"abX", finish="stop"), ["a", "b", ""], "stop"),  # counted, not shown
        (answer(b"abcde", stop=("cd",)), ["a", "b", "", ""], "stop"),
        (answer(b"abc", stop=("cd",)), ["a", "b", "c"], "length"),  # it began like a stop string
        (answer("é!".encode()), ["", "é", "!"], "length"),
    ],
)
def test_answer_shows_no_stop_and_no_half_character(
    pieces: list[Piece], texts: list[str], reason: str
):
    """Stop tokens, stop strings over two tokens, a character of two tokens."""
    assert [piece.text for piece in pieces] == texts
    assert [piece.finish_reason for piece in pieces] == [None] * (len(texts) - 1) + [reason]


def test_render_chat_gives_a_prompt_that_encodes_with_its_special_tokens(model: Path):
    """Roles become special tokens."""
    tokenizer = Tokenizer.load(str(model))
    text = tokenizer.render_chat([ChatMessage("user", "hé")])
    assert text == "<s><|user|>hé<|end|><|assistant|>"
    assert tokenizer.encode(text, special=False) == [256, 259, 104, 195, 169, 261, 260]
    assert tokenizer.encode("h") == [256, 104]


def test_checkpoint_without_the_templates_tokens_has_no_chat():
    """Goal: no prompt in another model's format. Method: a tokenizer without its tokens."""
    with pytest.raises(UsageError, match=r"model\.no_chat_template"):
        SENTENCEPIECE.render_chat([ChatMessage("user", "x")])


def test_load_tokenizer_damaged_is_one_sentence(model: Path, tmp_path: Any):
    """Missing, cut, foreign: each is refused by the file's name."""
    for content, code in ((None, "model.missing"), ("{", "model.broken"), ("{}", "model.broken")):
        path = tmp_path / "tokenizer.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(UsageError, match=r"tokenizer\.json") as caught:
            Tokenizer.load(str(tmp_path))
        assert caught.value.code == code
        assert "\n" not in caught.value.message
