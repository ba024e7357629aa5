"""The tokens that were already made, on their way to vLLM's processes in `SamplingParams`.

A client reaches `extra_args` too (`vllm_xargs`), and made-up output would be an injection. So the
value is of bytes, which no JSON holds, and what clients put under our name is dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

KEY = "understudy_made"
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


def with_made(params: Any, tokens: Sequence[int]) -> Any:
    """A copy of `params` with these tokens; none: as a client may send them."""
    extra = {name: value for name, value in (params.extra_args or {}).items() if name != KEY}
    if tokens:
        extra[KEY] = array(ITEM, tokens).tobytes()
    elif len(extra) == len(params.extra_args or {}):
        return params
    copy = params.clone()
    copy.extra_args = extra or None
    return copy


def conceal(params: Any) -> None:
    """Keep the tokens of `params` out of logs."""
    params.extra_args[KEY] = Made(params.extra_args[KEY])
