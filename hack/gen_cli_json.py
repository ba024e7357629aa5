"""Write docs/cli_json.md from the structs of the `--json` documents; `--check` fails if it is
stale.

A section is a struct's docstring and a table of its fields (`plumbing.service.schema` says how a
field is described). A struct that has a section of its own is a link where another one contains it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from hack.gen_states import write
from plumbing.service.schema import Schema, Unit
from understudy.schema import DOCUMENTS

PAGE = Path(__file__).resolve().parent.parent / "docs/cli_json.md"
HEADINGS = {struct: title for title, struct in DOCUMENTS.items()}
WORDS = {str: "string", bool: "bool", int: "int", float: "number", type(None): "null", Any: "any"}
UNITS = (  # by the name of a number, the first that fits
    ("mono", r"(^|_)mono_ms$"),
    ("ms", r"(^|_)ms($|_)"),
    ("s", r"(^|_)s$"),
    ("bytes", r"(^|_)bytes($|_)"),
    ("pid", r"(^|_)pids?$"),
)
Row = tuple[str, str, str]  # key, type, meaning

HEAD = Path(__file__).with_name("cli_json_head.md")


def rows_of(struct: type[Schema], prefix: str = "") -> Iterator[Row]:
    """A row for each key of `struct`, in the order of its fields."""
    for field in msgspec.structs.fields(struct):
        yield from _rows(field.type, f"{prefix}{field.encode_name}")


def _rows(hint: Any, key: str, meaning: str = "") -> Iterator[Row]:
    words, below = _words(hint, key.split(".")[-1].rstrip("[]*"))
    about = _notes(hint, str)
    meaning = about[0] if about else meaning
    if words and (meaning or not below):
        yield key, words, meaning
    for container in below:
        origin, arguments = get_origin(container), get_args(container)
        if origin is list:
            yield from _rows(arguments[0], f"{key}[]", "" if words else meaning)
        elif origin is dict:
            yield from _rows(arguments[1], f"{key}.*", "" if words else meaning)
        else:
            yield from rows_of(container, f"{key}.")


def _words(hint: Any, name: str) -> tuple[str, list[Any]]:
    """The types of a key as the page names them, and what has keys or elements of its own."""
    words, below, is_optional = [], [], False
    for member in _members(hint):
        unit = _notes(member, Unit)
        kind = _bare(member)
        if kind is msgspec.UnsetType:
            is_optional = True
        elif kind in HEADINGS:
            words.append(f"[{_anchor_text(HEADINGS[kind])}](#{anchor(HEADINGS[kind])})")
        elif get_origin(kind) in (list, dict) or _is_struct(kind):
            below.append(kind)
            if _is_struct(kind):
                words.append("object")
        elif unit:
            words.append(unit[0].name)
        else:
            words.append(_word(kind, name))
    if words == ["null"]:
        words = (
            ["object or null" if get_origin(below[0]) is dict else "list or null"]
            if below
            else words
        )
    text = " or ".join(dict.fromkeys(words))
    return (f"{text}?" if is_optional and text else text), below


def _word(kind: Any, name: str) -> str:
    if get_origin(kind) is Literal:
        kind = type(get_args(kind)[0])
    if kind in (int, float):
        for unit, pattern in UNITS:
            if re.search(pattern, name):
                return unit
    return WORDS[kind]


def _members(hint: Any) -> list[Any]:
    bare = _bare(hint)
    return list(get_args(bare)) if get_origin(bare) in (Union, UnionType) else [hint]


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _notes(hint: Any, kind: type) -> list[Any]:
    found = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return [each for each in found if isinstance(each, kind)]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Schema)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def _anchor_text(heading: str) -> str:
    return heading.partition(",")[0].removeprefix("A ").removeprefix("The ")


def section(title: str, struct: type[Schema]) -> str:
    """The text of one section, with its heading."""
    table = [f"| `{key}` | {kind} | {text} |" for key, kind, text in rows_of(struct)]
    head = [f"## {title}", "", cleandoc(struct.__doc__ or ""), "", "| key | type | meaning |"]
    return "\n".join([*head, "|---|---|---|", *table]) + "\n"


def page() -> str:
    return "\n".join([HEAD.read_text(), *(section(*each) for each in DOCUMENTS.items())])


if __name__ == "__main__":
    sys.exit(write(PAGE, page()))
