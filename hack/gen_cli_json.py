"""Write the sections of docs/cli_json.md whose documents are structs; `--check` fails if they are
stale.

A section is the struct's docstring and a table of its fields: `Annotated[..., msgspec.Meta(
description=…)]` is a field's meaning. The other sections of the page are still written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

from msgspec import inspect

from understudy.doctor.checks import DoctorDocument

PAGE = Path(__file__).resolve().parent.parent / "docs/cli_json.md"
SECTIONS = {"understudy doctor": DoctorDocument}
WORDS = {
    inspect.IntType: "int",
    inspect.FloatType: "number",
    inspect.StrType: "string",
    inspect.LiteralType: "string",
    inspect.BoolType: "bool",
    inspect.NoneType: "null",
    inspect.AnyType: "any",
}

Row = tuple[str, str, str]  # key, type, meaning


def rows(found: inspect.Type, key: str = "", meaning: str = "") -> Iterator[Row]:
    """A row for each key below `key`, in the order of the fields."""
    if isinstance(found, inspect.Metadata):
        about = (found.extra_json_schema or {}).get("description", meaning)
        yield from rows(found.type, key, about)
    elif isinstance(found, inspect.StructType):
        for field in found.fields:
            below = f"{key}.{field.encode_name}" if key else field.encode_name
            yield from rows(field.type, below)
    elif isinstance(found, inspect.ListType):
        yield from rows(found.item_type, f"{key}[]", meaning)
    elif isinstance(found, inspect.DictType):
        yield from rows(found.value_type, f"{key}.*", meaning)
    else:
        types = found.types if isinstance(found, inspect.UnionType) else (found,)
        yield key, " or ".join(WORDS[type(each)] for each in types), meaning


def section(title: str, struct: Any) -> str:
    """The text of one section, with its heading."""
    table = [
        f"| `{key}` | {kind} | {text} |" for key, kind, text in rows(inspect.type_info(struct))
    ]
    head = [
        f"## {title}",
        "",
        cleandoc(struct.__doc__),
        "",
        "| key | type | meaning |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *table]) + "\n"


def page(text: str) -> str:
    """The page `text` with its generated sections anew."""
    for title, struct in SECTIONS.items():
        before, heading, after = text.partition(f"## {title}\n")
        rest = after.partition("\n## ")
        text = before + section(title, struct) + (f"\n## {rest[2]}" if rest[1] else "")
        assert heading, f"{PAGE} has no section {title}"
    return text


def main() -> int:
    found = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        if page(found) != found:
            print("docs/cli_json.md is stale; run `make docs`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
