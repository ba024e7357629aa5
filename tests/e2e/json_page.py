"""Reads docs/cli_json.md, and compares documents with it.

A section is a heading, which names its subject, and a table of keys. A type that is a link stands
for the keys of the linked section.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs/cli_json.md").read_text()
EACH, ANY = "[]", "*"

KeyPath = tuple[str, ...]


def _is_time(value: Any) -> bool:
    is_utc = isinstance(value, str) and value.endswith("Z")
    return is_utc and datetime.fromisoformat(value).tzinfo is not None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


TYPES = {
    "string": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    **dict.fromkeys(("int", "pid", "bytes"), _is_int),
    **dict.fromkeys(("number", "ms", "s", "mono"), _is_number),
    "time": _is_time,
    "object": lambda value: isinstance(value, dict),
    "any": lambda value: True,
    "null": lambda value: value is None,
}


@dataclass(frozen=True, slots=True)
class Row:
    """A documented key. An optional one says "only when", or is below one that does."""

    path: KeyPath
    types: tuple[str, ...]
    is_conditional: bool

    def below(self, parent: Row) -> Row:
        is_conditional = self.is_conditional or parent.is_conditional
        return Row(parent.path + self.path, self.types, is_conditional)

    def describes(self, path: KeyPath) -> bool:
        return len(path) == len(self.path) and self.leads_to(path)

    def leads_to(self, path: KeyPath) -> bool:
        """Whether the key at `path` is this one, or one of its parents."""
        return all(
            mine == other or (mine == ANY and other != EACH)
            for mine, other in zip(self.path, path, strict=False)
        ) and len(path) <= len(self.path)

    def swallows(self, path: KeyPath) -> bool:
        """Whether `path` is below a key whose content the page does not describe."""
        return "any" in self.types and self.describes(path[: len(self.path)])

    def accepts(self, value: Any) -> bool:
        return any(TYPES[each](value) for each in self.types)


def key_path(key: str) -> KeyPath:
    """`locks.*.waiters[].engine` → ("locks", "*", "waiters", "[]", "engine")"""
    return tuple(key.replace(EACH, f".{EACH}").split("."))


def dotted(path: KeyPath) -> str:
    return ".".join(path).replace(f".{EACH}", EACH)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def tables() -> dict[str, list[tuple[str, str, str]]]:
    """Key, type and meaning of every row, by heading, of the sections that describe documents."""
    found = {}
    for section in PAGE.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        _, is_there, table = body.partition("| key | type | meaning |\n|---|---|---|\n")
        if is_there:
            rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]*)\|$", table, re.MULTILINE)
            assert len(rows) == len(re.findall(r"^\|", table, re.MULTILINE)), heading
            found[heading] = rows
    return found


TABLES = tables()
HEADINGS = {anchor(heading): heading for heading in TABLES}
LINK = re.compile(r"\[[^]]+\]\(#([\w-]+)\)")


def rows_of(heading: str) -> list[Row]:
    """The section's rows, links followed."""
    rows: list[Row] = []
    for key, kind, meaning in TABLES[heading]:
        path = key_path(key)
        is_below = any(each.is_conditional and each.path == path[: len(each.path)] for each in rows)
        link = LINK.fullmatch(kind)
        types = () if link else tuple(kind.split(" or "))
        assert set(types) <= set(TYPES), f"{heading}: {key} is of no type that there is: {kind}"
        row = Row(path, types, is_below or "only when" in meaning)
        rows += [each.below(row) for each in rows_of(HEADINGS[link[1]])] if link else [row]
    return rows


def linked_to() -> set[str]:
    """The sections that others link to."""
    kinds = [kind for rows in TABLES.values() for _, kind, _ in rows]
    return {HEADINGS[link[1]] for kind in kinds if (link := LINK.fullmatch(kind))}


def nodes(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every key of a document with its value, containers included."""
    yield path, value
    if isinstance(value, dict):
        for name, child in value.items():
            yield from nodes(child, (*path, name))
    elif isinstance(value, list):
        for child in value:
            yield from nodes(child, (*path, EACH))


def undocumented(document: Any, rows: Sequence[Row]) -> list[str]:
    """The keys of `document` that no row describes, or that a row gives another type."""
    bad = []
    for path, value in nodes(document):
        exact = [row for row in rows if row.describes(path)]
        is_described = any(row.accepts(value) for row in exact)
        if not exact and isinstance(value, dict | list):
            is_described = any(row.leads_to(path) for row in rows)
        if not is_described and not any(row.swallows(path) for row in rows):
            bad.append(f"{dotted(path)} = {json.dumps(value)[:60]}")
    return bad


def never_printed(documents: Sequence[Any], rows: Sequence[Row]) -> list[str]:
    """The keys that are documented without "only when", and in none of `documents`."""
    paths = set()
    for document in documents:
        for path, value in nodes(document):
            paths.add((*path, EACH) if value == [] else path)
    required = [row for row in rows if not row.is_conditional]
    return [dotted(row.path) for row in required if not any(map(row.describes, paths))]
