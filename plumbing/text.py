"""Names that are not UTF-8, made printable: what every way out of a process has in common.

A name of a file is any bytes. Python keeps those that are not UTF-8 as lone surrogates, with which
a path still works, and which no frame, JSON document or terminal accepts. Shown to others they
become `\\xff`; a path that others must open has to be sent as bytes.
"""

from __future__ import annotations

import codecs
import json
from typing import Any

ERRORS = "understudy.printable"  # the name of our error handler, for streams and `str.encode`


def printable(value: Any) -> Any:
    """`value` with all text in it printable; also inside of lists and dicts."""
    if isinstance(value, str):
        return encoded(value).decode()
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable(each) for each in value]
    return value


def one_line(text: str) -> str:
    """`text` with all that no terminal should be sent escaped: line ends, control characters,
    surrogates, marks that turn the direction of writing."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def encoded(text: str) -> bytes:
    """`text` as UTF-8."""
    return text.encode("utf-8", ERRORS)


def to_json(document: Any, *, indent: int | None = None) -> str:
    """`document` as JSON that everybody can read; what JSON does not know becomes text."""
    text = json.dumps(document, default=str, ensure_ascii=False, indent=indent)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(printable(json.loads(text)), ensure_ascii=False, indent=indent)
    return text


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    return "".join(_escaped(ord(char)) for char in found), error.end


def _escaped(code: int) -> str:
    is_byte = 0xDC80 <= code <= 0xDCFF  # PEP 383
    return f"\\x{code - 0xDC00:02x}" if is_byte else f"\\u{code:04x}"


codecs.register_error(ERRORS, _escape)
