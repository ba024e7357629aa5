"""Values as text: durations, sizes and tables in one style, and names that are not UTF-8.

A file name is any bytes. Python keeps the bytes that are not UTF-8 as lone surrogates: a path with
them still works, but no frame, JSON document or terminal accepts them. Text for others shows them
as Python escapes them, `\\udcff`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import DecodeError, Struct, to_builtins


def duration(ms: float) -> str:
    """`350 ms`, `2.5s`, `12s`, `4m05s`, `3h12m`, `2d5h`."""
    if ms < 1000:
        return f"{max(0, ms):.0f} ms"
    if ms < 10_000:
        return f"{int(ms / 100) / 10:g}s"
    seconds = int(ms / 1000)
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def since(value: str | None, now: datetime) -> str:
    """`3h12m`, in whole seconds, from an RFC 3339 time; `-` if there is none."""
    try:
        moment = datetime.fromisoformat(value or "")
    except ValueError:
        return "-"
    seconds = max(0, int((now - moment.astimezone(UTC)).total_seconds()))
    return duration(seconds * 1000) if seconds else "0s"


def size(value: Any) -> str:
    """`1.2 GiB`; `-` if it is not a number of bytes."""
    if not isinstance(value, int):
        return "-"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} B"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """One line per row, with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def one_line(text: str) -> str:
    """`text` with all that no terminal should be sent escaped: line ends, control characters,
    surrogates, marks that turn the direction of writing."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def to_json(document: Any, *, indent: int | None = None) -> str:
    """`document` as JSON: structs as objects, what JSON does not know as text, and what is not
    UTF-8 escaped."""
    text = json.dumps(document, default=_plain, ensure_ascii=False)
    text = text.encode("utf-8", "backslashreplace").decode()
    if indent is not None:  # by json.dumps it would take six times as long, on our loops
        with contextlib.suppress(DecodeError):  # of what only Python takes for JSON
            text = msgspec.json.format(text, indent=indent)
    return text


def _plain(value: Any) -> Any:
    return to_builtins(value) if isinstance(value, Struct) else str(value)


def counted(count: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets: the opposite of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, port_min: int = 1) -> tuple[str, int]:
    """The host, without brackets, and the port of HOST:PORT. A ValueError says what is wrong."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not port_min <= int(port) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)
