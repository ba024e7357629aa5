"""What vLLM's processes are told of a request in its `SamplingParams`: the tokens that were already
made, and what the gateway calls this attempt.

A client reaches `extra_args` too (`vllm_xargs`), and made-up output would be an injection. So the
value is of bytes, which no JSON holds, and what clients put under our name is dropped.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from typing import Any

KEY = "understudy_made"
ATTEMPT = "understudy_attempt"
ITEM = "I"


class Made(bytes):
    """The same, in the engine core and in the workers: vLLM logs the parameters of its requests
    when it fails, and the tokens are a user's text."""

    def __repr__(self) -> str:
        return f"<{len(self) // 4} tokens>"


def made_by(params: Any) -> Sequence[int]:
    """The tokens that a request with these `SamplingParams` has already made."""
    packed = (getattr(params, "extra_args", None) or {}).get(KEY)
    return array(ITEM, packed) if isinstance(packed, bytes) else ()


def attempt_of(params: Any) -> bytes:
    """What the gateway calls the attempt that a request with these `SamplingParams` is, if it is
    the whole of it and nothing is done for it before it is scheduled."""
    if params is None or params.n != 1 or params.structured_outputs is not None:
        return b""
    name = (params.extra_args or {}).get(ATTEMPT)
    return name if isinstance(name, bytes) else b""


def with_made(params: Any, tokens: Sequence[int], attempt: bytes = b"") -> Any:
    """A copy of `params` with these tokens and this name; neither: as a client may send them."""
    given = params.extra_args or {}
    extra = {name: value for name, value in given.items() if name not in (KEY, ATTEMPT)}
    if tokens:
        extra[KEY] = array(ITEM, tokens).tobytes()
    if attempt:
        extra[ATTEMPT] = attempt
    if extra == given:
        return params
    changed = copy.copy(params)  # all else is shared: `clone` copies deeply
    changed.extra_args = extra or None
    return changed


def conceal(params: Any) -> None:
    """Keep the tokens of `params` out of logs."""
    params.extra_args[KEY] = Made(params.extra_args[KEY])
