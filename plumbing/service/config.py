"""Settings: flag > environment > default, each value with where it came from.

A command declares its settings once, as data; `plumbing.pod.cli` turns them into click's flags.
Not by click's `envvar`, which cuts lists at spaces and does not name the variable of a bad value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plumbing.errors import UsageError

TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})
S_UNITS = {"": 1.0, "MS": 0.001, "S": 1.0, "M": 60.0, "H": 3600.0}
DURATION_S_MAX = 365 * 24 * 3600.0  # all clocks and time-outs can count this far
SIZE_BYTES_MAX = 2**62  # sums of a few still fit the 64 bits of a message
SIZE_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True)
class Option:
    """One setting.

    `type` is bool or turns a string into the value (int, float, str, `size_bytes`, `duration_s`,
    …), raising ValueError with a reason. `many` makes it a tuple: a repeatable flag, a
    comma-separated environment variable. A default of None means "not set".
    """

    name: str
    type: Callable[[str], Any]
    default: Any = None
    help: str = ""
    env: str | None = None
    many: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env_name(self) -> str:
        return self.env or "UNDERSTUDY_" + self.name.upper()


class Resolved(dict[str, Any]):
    """The settings of one command by name, each with its origin."""

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        super().__init__(values)
        self._origins = origins

    def origin(self, name: str) -> str:
        """`flag`, `environment` or `default`, or what `changed` was told."""
        return self._origins[name]

    def changed(self, values: Mapping[str, Any], origin: str) -> Resolved:
        """With these values, which come from `origin`."""
        origins = {**self._origins, **dict.fromkeys(values, origin)}
        return Resolved({**self, **values}, origins)


def resolve(
    options: Sequence[Option], flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Resolved:
    """Determine every setting.

    Args:
        flags: by option name; None (or an empty tuple, for `many`) means not given.

    Raises:
        UsageError: `config.bad_value`.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in options:
        raw, origin, place = flags.get(option.name), "flag", option.flag
        if raw in (None, ()) and option.env_name in environ:
            raw, origin, place = environ[option.env_name], "environment", option.env_name
            if option.many:
                raw = tuple(part.strip() for part in raw.split(",") if part.strip())
        elif raw in (None, ()):
            raw, origin = option.default, "default"
        elif option.many:
            raw = tuple(raw)
        if origin != "default":
            many = tuple(_convert(option, each, place) for each in (raw if option.many else (raw,)))
            raw = many if option.many else many[0]
        values[option.name], origins[option.name] = raw, origin
    return Resolved(values, origins)


def _in_units(text: str, units: Mapping[str, float], what: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in units:
        raise ValueError(what)
    return float(match[1]) * units[match[2].upper()]


def size_bytes(text: str) -> int:
    """`4GiB` → 4294967296; the units are powers of two (KiB, MiB, GiB, TiB) or plain bytes."""
    what = "a size is a number and one of the units KiB, MiB, GiB, TiB, such as 4GiB"
    size = _in_units(text, SIZE_UNITS, what)
    if size > SIZE_BYTES_MAX:
        raise ValueError("no memory is as large as that; the maximum is 4194304TiB")
    return int(size)


def size_list(text: str) -> tuple[int, ...]:
    """`4GiB,2GiB` → (4294967296, 2147483648); one size alone is a list, too."""
    sizes = tuple(map(size_bytes, text.split(",")))
    if 0 in sizes:
        raise ValueError("a size must be at least 1 byte")
    return sizes


def duration_s(text: str) -> float:
    """`5m` → 300.0; the units are ms, s, m and h, and a plain number is seconds."""
    what = "a time is a number and one of the units ms, s, m, h, such as 5s"
    seconds = _in_units(text, S_UNITS, what)
    if seconds > DURATION_S_MAX:
        raise ValueError("the maximum is a year (8760h)")
    return seconds


def _convert(option: Option, raw: Any, place: str) -> Any:
    try:
        value = _to_bool(raw) if option.type is bool else option.type(str(raw))
    except ValueError as error:
        reasons: dict[Any, str] = {int: "it must be a whole number", float: "it must be a number"}
        reason = reasons.get(option.type, str(error))  # Python's own message is about Python
        raise _bad(option, raw, place, reason) from error
    if option.choices and value not in option.choices:
        raise _bad(option, raw, place, "it must be one of " + ", ".join(option.choices))
    if option.minimum is not None and not value >= option.minimum:
        raise _bad(option, raw, place, f"the minimum is {option.minimum:g}")
    if option.maximum is not None and not value <= option.maximum:
        raise _bad(option, raw, place, f"the maximum is {option.maximum:g}")
    return value


def _to_bool(raw: Any) -> bool:
    if str(raw).lower() in TRUE | FALSE:
        return str(raw).lower() in TRUE
    raise ValueError("it must be true or false")


def _bad(option: Option, raw: Any, place: str, reason: str) -> UsageError:
    return UsageError(
        "config.bad_value", f"{place} is {raw!r}: {reason}", name=option.name, value=str(raw)
    )
