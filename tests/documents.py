"""Compares a `--json` document with the struct that describes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from plumbing.service.schema import Schema, Time


def mismatches(document: Any, hint: Any) -> list[str]:
    """The keys that are missing, not described, or of another type."""
    return list(_mismatches(document, hint, "$"))


def _mismatches(value: Any, hint: Any, key: str) -> Iterator[str]:
    is_time = get_origin(hint) is Annotated and get_args(Time)[1] in get_args(hint)
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        found = [list(_mismatches(value, each, key)) for each in arguments]
        if all(found):
            yield from min(found, key=lambda each: (each[0].startswith(f"{key}: "), len(each)))
    elif isinstance(hint, type) and issubclass(hint, Schema) and isinstance(value, dict):
        fields = {field.encode_name: field for field in msgspec.structs.fields(hint)}
        yield from (f"{key}.{name}: not described" for name in value.keys() - fields.keys())
        for name, field in fields.items():
            if name in value:
                yield from _mismatches(value[name], field.type, f"{key}.{name}")
            elif field.required:
                yield f"{key}.{name}: missing"
    elif origin is list and isinstance(value, list):
        for each in value:
            yield from _mismatches(each, arguments[0], f"{key}[]")
    elif origin is dict and isinstance(value, dict):
        for name, each in value.items():
            yield from _mismatches(each, arguments[1], f"{key}.{name}")
    elif not _is_a(value, hint, is_time=is_time):
        yield f"{key}: {json.dumps(value)[:60]} is no {hint}"


def _is_a(value: Any, hint: Any, *, is_time: bool) -> bool:
    if is_time:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is Any or hint is None or hint is NoneType:
        return hint is Any or value is None
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else get_origin(hint) or hint)
