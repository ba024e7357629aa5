"""Identities of epochs: what the bytes are, as a nested mapping, and where two of them differ.

Pure. It does not know what a field means: the writer and the readers compute the same mapping from
the same checkpoint, and the error names the first field that differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from plumbing.errors import ProtocolError

IDENTITY_CHARS_MAX = 256 << 10  # as JSON: two hashes and a name for each of 1,300 shards
FIELD_CHARS_MAX = 200  # of a dotted path in an error; the longest of ours have sixty
DEPTH_MAX = 16  # shards are three levels deep; recursion needs a bound that a peer cannot choose

ABSENT = "absent"  # how a missing field reads in the error


class Mismatch(Struct, frozen=True):
    """The first field, in sorted order, in which two identities differ."""

    field: str  # dotted path: `shards.model-00001.header`
    expected: Any
    offered: Any

    def __str__(self) -> str:
        return f"{self.field} is {self.expected!r} there and {self.offered!r} here"


def first_mismatch(expected: Any, offered: Any, field: str = "identity") -> Mismatch | None:
    """Compare two identities field by field; `None` when they are equal.

    Sequences are compared as values: a list and a tuple are equal, because both become arrays on
    the wire.
    """
    if isinstance(expected, dict) and isinstance(offered, dict):
        for key in sorted(expected.keys() | offered.keys()):
            inner = str(key) if field == "identity" else f"{field}.{key}"
            inner = inner[:FIELD_CHARS_MAX]
            if key not in expected or key not in offered:
                return Mismatch(inner, expected.get(key, ABSENT), offered.get(key, ABSENT))
            found = first_mismatch(expected[key], offered[key], inner)
            if found is not None:
                return found
        return None
    if isinstance(expected, list | tuple) and isinstance(offered, list | tuple):
        if len(expected) != len(offered):
            return Mismatch(field, list(expected), list(offered))
        for index, (left, right) in enumerate(zip(expected, offered, strict=True)):
            found = first_mismatch(left, right, f"{field}[{index}]")
            if found is not None:
                return found
        return None
    # True == 1 in Python, but not in a checkpoint's configuration.
    if type(expected) is not type(offered) or expected != offered:
        return Mismatch(field, expected, offered)
    return None


def identity_hash(identity: Mapping[str, Any]) -> str:
    """SHA-256, in hex: equal for equal identities, whatever the order of their keys."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_identity(identity: Any) -> None:
    """Check that an identity is plain data: what JSON can hold, not too deep, not too large.

    Raises:
        ProtocolError: `gms.bad_identity`, naming the field; `gms.identity_too_large`.
    """
    _check(identity, "identity", 0)
    size = len(json.dumps(identity))
    if size > IDENTITY_CHARS_MAX:
        raise ProtocolError(
            "gms.identity_too_large",
            f"the identity has {size} characters as JSON, and the limit is {IDENTITY_CHARS_MAX};"
            " identify shards by their hashes",
            limit=IDENTITY_CHARS_MAX,
        )


def _check(identity: Any, field: str, depth: int) -> None:
    field = field[:FIELD_CHARS_MAX]  # a peer chooses it, and it may be repeated for many fields
    if depth > DEPTH_MAX:
        raise ProtocolError("gms.bad_identity", f"{field} is nested too deep", field=field)
    if isinstance(identity, dict):
        for key, value in identity.items():
            if not isinstance(key, str):
                raise ProtocolError(
                    "gms.bad_identity", f"{field} has a key that is not a string", field=field
                )
            _check(value, f"{field}.{key}", depth + 1)
    elif isinstance(identity, list | tuple):
        for value in identity:
            _check(value, f"{field}[]", depth + 1)
    elif identity is not None and not isinstance(identity, str | int | float | bool):
        raise ProtocolError(
            "gms.bad_identity",
            f"{field} is a {type(identity).__name__}; identities are made of maps, lists, "
            "strings, numbers and booleans",
            field=field,
        )
