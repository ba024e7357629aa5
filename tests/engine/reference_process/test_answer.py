"""Tokens become pieces of text: stop tokens, stop strings, characters over several tokens."""

from __future__ import annotations

from typing import Any

from engine.backends.reference.http.answer import Answer, Piece
from engine.backends.reference.link import Alternative, Token


class Letters:
    """A tokenizer of single bytes: what `Answer` uses of the real one."""

    def stream(self) -> Stream:
        return Stream()

    def token_text(self, token: int) -> str:
        return bytes([token]).decode(errors="replace")


class Stream:
    def __init__(self) -> None:
        self.held = b""

    def push(self, token: int) -> str:
        self.held += bytes([token])
        try:
            text = self.held.decode()
        except UnicodeDecodeError:
            return ""
        self.held = b""
        return text

    def finish(self) -> str:
        return self.held.decode(errors="replace")


def pieces(text: bytes, *, stop: Any = (), finish: str = "length", logprobs: bool = False):
    answer = Answer(Letters(), stop, wants_logprobs=logprobs)  # type: ignore[arg-type]  # a stub
    made: list[Piece] = []
    for index, byte in enumerate(text):
        reason = finish if index == len(text) - 1 else None
        logprob = -1.0 if logprobs else None
        top = (Alternative(byte, -1.0),) if logprobs else ()
        made.append(answer.push(Token(1, byte, 0, reason, logprob, top)))
        if made[-1].finish_reason:
            break
    return answer, made


def text_of(made: list[Piece]) -> str:
    return "".join(piece.text for piece in made)


def test_length_ends_with_the_last_token_shown():
    """Goal: at the length limit the last token's text is sent. Method: three letters."""
    answer, made = pieces(b"abc")
    assert text_of(made) == "abc"
    assert [piece.finish_reason for piece in made] == [None, None, "length"]
    assert answer.token_count == 3


def test_stop_token_is_counted_but_not_shown():
    """Goal: as OpenAI counts. Method: finish with "stop"."""
    answer, made = pieces(b"abX", finish="stop")
    assert text_of(made) == "ab"
    assert made[-1].finish_reason == "stop"
    assert answer.token_count == 3


def test_stop_string_over_two_tokens_is_cut_and_ends_the_answer():
    """Goal: nothing of a stop string is shown. Method: a stop of two letters among five."""
    answer, made = pieces(b"abcde", stop=("cd",))
    assert text_of(made) == "ab"
    assert made[-1].finish_reason == "stop"
    assert answer.token_count == 4


def test_text_held_back_for_a_stop_string_is_sent_at_the_end():
    """Goal: the beginning of a stop string that never comes is not lost. Method: end on it."""
    _, made = pieces(b"abc", stop=("cd",))
    assert text_of(made) == "abc"
    assert made[-1].finish_reason == "length"


def test_character_of_two_tokens_comes_in_one_piece_with_both_logprobs():
    """Goal: no half character, no lost logprob. Method: a two-byte letter with logprobs."""
    _, made = pieces("é!".encode(), logprobs=True)
    assert [piece.text for piece in made] == ["", "é", "!"]
    assert [len(piece.tokens) for piece in made] == [0, 2, 1]
    assert made[1].tokens[0].raw is None
    assert made[2].tokens[0].raw == b"!"
