"""Checks of single JSON values: each returns the value in its Python form or raises `ApiError`.

`null` means absent everywhere, as OpenAI's own clients send it. Nothing is coerced: `"1"` is no
number and `true` is no integer.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from engine.backends.reference.http.openai.errors import bad_value

Check = Callable[[Any, str], Any]

STOPS_MAX = 4  # OpenAI's limit
STOP_CHARS_MAX = 256  # a stop string holds back as much text as it is long
NAME_CHARS_MAX = 512
SHOWN_CHARS_MAX = 60  # of a wrong value, in the error


def boolean(value: Any, param: str) -> bool:
    if type(value) is not bool:
        raise _wrong(param, "true or false", value)
    return value


def integer(least: int, most: int) -> Check:
    def check(value: Any, param: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(param, f"a whole number from {least} to {most}", value)
        return value

    return check


def number(least: float, most: float, *, excludes_least: bool = False) -> Check:
    wanted = f"a number {'above' if excludes_least else 'from'} {least:g} to {most:g}"

    def check(value: Any, param: str) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise _wrong(param, wanted, value)
        if not least <= value <= most or (excludes_least and value == least):
            raise _wrong(param, wanted, value)
        return float(value)

    return check


def string(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise _wrong(param, "a string", value)
    if not _is_text(value):
        raise bad_value(param, f"{param} holds half a UTF-16 surrogate pair, which is no text.")
    return value


def name(value: Any, param: str) -> str:
    if not 0 < len(string(value, param)) <= NAME_CHARS_MAX:
        raise _wrong(param, f"a string of 1 to {NAME_CHARS_MAX} characters", value)
    return str(value)


def stops(value: Any, param: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > STOPS_MAX:
        raise _wrong(param, f"a string or an array of up to {STOPS_MAX} strings", value)
    for item in items:
        if not 0 < len(string(item, param)) <= STOP_CHARS_MAX:
            raise _wrong(param, f"made of strings of 1 to {STOP_CHARS_MAX} characters", item)
    return tuple(items)


def prompt(value: Any, param: str) -> str | tuple[int, ...]:
    """A string, an array of token ids, or an array that holds exactly one of these."""
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds & {str, list}:
        if len(value) != 1:
            raise bad_value(
                param, f"{param} holds {len(value)} prompts; send one prompt per request."
            )
        value = value[0]
    if isinstance(value, str):
        return string(value, param)
    if value == []:
        raise bad_value(param, f"{param} is empty; send at least one token.")
    if not isinstance(value, list) or set(map(type, value)) != {int} or min(value) < 0:
        raise _wrong(param, "a string or an array of token ids", value)
    return tuple(value)


def stream_options(value: Any, param: str) -> bool:
    """Whether usage is wanted at the end of the stream."""
    if not isinstance(value, Mapping):
        raise _wrong(param, "an object", value)
    for key in value:
        if key != "include_usage":
            raise bad_value(param, f"{param}.{key} is not supported; only include_usage is.")
    include = value.get("include_usage")
    return include is not None and boolean(include, f"{param}.include_usage")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong(param: str, wanted: str, value: Any) -> Exception:
    shown = reprlib.repr(value)  # looks at the beginning only, however long the value is
    if len(shown) > SHOWN_CHARS_MAX:
        shown = shown[:SHOWN_CHARS_MAX] + "…"
    return bad_value(param, f"{param} must be {wanted}, not {shown}.")
