"""A request that is resumed: its journal is played through the text of the answer.

Owns what a journal may be. It has the tokens that another engine made for the same request, so they
must be tokens that this request could have had: anything else is refused, because an answer glued
from two requests would look whole. The text layer takes them one by one, as when they were made;
what it says is sent as one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.reference.http.asked import Asked
from engine.backends.reference.http.replies import ApiError
from engine.backends.reference.http.text import AnswerText, Piece
from engine.backends.reference.link import TokenMsg, finish_reason


def replay(tokens: Sequence[int], asked: Asked, answer: AnswerText, vocab_size: int) -> Piece:
    """The text of `tokens`, the answer to `asked` so far; `answer` goes on behind them.

    The piece has a finish reason if they had ended the answer: nothing is left to compute.

    Raises:
        ApiError: 400 `resume.bad_journal`.
    """
    if len(tokens) > asked.max_tokens:
        raise _bad(f"it has {len(tokens)} tokens, and the answer ends with {asked.max_tokens}")
    texts: list[str] = []
    piece = Piece("", None)
    for made, token in enumerate(tokens, 1):
        if piece.finish_reason is not None:
            raise _bad(f"the answer ends with token {made - 1}, and the journal has {len(tokens)}")
        if token >= vocab_size:
            raise _bad(f"its token {made} is {token}, and the vocabulary ends at {vocab_size - 1}")
        if asked.matcher is not None and not asked.matcher.take(token):
            raise _bad(f"the grammar does not allow its token {made}")
        reason = finish_reason(token, made, asked.max_tokens, asked.stop_token_ids)
        if reason == "stop" and made <= asked.sampling.min_tokens and asked.matcher is None:
            raise _bad(f"it ends with {made} tokens, and min_tokens asks for more")
        piece = answer.push(TokenMsg(0, token, 0, reason))
        texts.append(piece.text)
    return Piece("".join(texts), piece.finish_reason)


def _bad(what: str) -> ApiError:
    return ApiError(
        400,
        f"The journal is not one of this request: {what}; send the request without a journal.",
        code="resume.bad_journal",
    )
