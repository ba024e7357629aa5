"""What a peer may send, as data: a script is one byte that counts descriptors, then the bytes of a
stream, with the descriptors attached to its first byte.

Strategies make them out of the catalogue itself, so that a new message is fuzzed from the day it
is there: frames of every message with fields that are right, wrong, missing, surplus or huge, cut,
merged and flipped anywhere.
"""

from __future__ import annotations

import functools
import os
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgpack
import msgspec
import pytest
from hypothesis import strategies as st

from plumbing.wire.frames import HEADER, MAGIC, VERSION
from plumbing.wire.limits import FDS_PER_FRAME_MAX
from plumbing.wire.messages import Catalogue, Message, type_of

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))  # 0: a short run, with every test run


def classes(catalogue: Catalogue) -> list[type[Message]]:
    return list(catalogue.classes.values())


# Fields whose plainest value says nothing.
WORDS = {"mode": "rw_or_ro", "epoch": "0" * 32}


def value_of(hint: Any) -> Any:
    """The plainest value of a type hint, as MessagePack has it."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        base, *bounds = typing.get_args(hint)
        for bound in bounds:
            if base is int:
                return bound.ge
            if base is str:
                return "x" * (bound.min_length or 0)
        return value_of(base)
    if origin is tuple:
        return []
    if origin is dict:
        return {}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return body_of(hint)
    plain = {str: "ro", int: 1, float: 0.5, bool: True, bytes: b"", Any: None}
    return plain.get(hint)  # None for X | None


@functools.cache  # reading type hints takes longer than all else
def body_of(cls: type[Any]) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    body = {name: value_of(hints[name]) for name in cls.__struct_fields__}
    return {name: WORDS.get(name, value) for name, value in body.items()}


def frame(payload: bytes, fds: int = 0, length: int | None = None) -> bytes:
    """A frame, with no regard for limits."""
    header = HEADER.pack(MAGIC, VERSION, fds, 0, len(payload) if length is None else length)
    return header + payload


def valid(cls: type[Message], request_id: int = 1) -> bytes:
    """The payload of a plain message of `cls`."""
    packed: bytes = msgpack.packb([request_id, {"type": type_of(cls), **body_of(cls)}])
    return packed


def replayed(catalogue: Catalogue) -> list[Any]:
    """The seeds, as a test's parameters."""
    return [pytest.param(script, id=name) for name, script in seeds(catalogue)]


def seeds(catalogue: Catalogue) -> Iterator[tuple[str, bytes]]:
    """One script for every message, so that one that is added is fuzzed from its first day, and one
    for every way that was once found to break a server."""
    for cls in classes(catalogue):
        least = cls.FDS[0]
        yield f"valid-{type_of(cls)}", bytes([least]) + frame(valid(cls), least)
    request = frame(msgpack.packb([1, {"type": "status"}]))
    yield "many-requests", b"\0" + request * 200
    yield "fds-nobody-announced", b"\5" + request
    yield "fds-that-never-came", b"\0" + frame(b"", 7)
    yield "half-a-header", b"\0" + request[:7]
    yield "half-a-frame-with-fds", b"\2" + frame(b"\x80", 2, 100)
    yield "length-of-four-gib", b"\0" + frame(b"", 0, 2**32 - 1)
    nested = b"\x91" * 1015 + b"\xc0"
    words = ("type", "attach", "mode", "ro", "incarnation", "i", "engine")
    fields = b"".join(msgpack.packb(word) for word in words)
    yield "nested-value", b"\0" + frame(b"\x92\x01\x84" + fields + nested)
    yield "array-of-four-billion", b"\0" + frame(b"\xdd\xff\xff\xff\xff")
    yield "extension-type", b"\0" + frame(b"\xc7\x08\xff" + bytes(8))
    yield "bytes-as-keys", b"\0" + frame(msgpack.packb([1, {b"type": "status"}]))
    yield "no-map", b"\0" + frame(msgpack.packb([1, [1]]))
    yield "two-messages", b"\0" + frame(msgpack.packb([1, {}]) * 2)
    huge = "x" * 5000
    yield "huge-type", b"\0" + frame(msgpack.packb([1, {"type": huge}]))
    yield "huge-field", b"\0" + frame(msgpack.packb([1, {"type": "status", huge: 1}]))
    identity = {huge: b"no plain data"}
    body = {"engine": "e", "incarnation": "i", "mode": "ro", "identity": identity}
    yield "huge-identity-key", b"\0" + frame(msgpack.packb([1, {"type": "attach", **body}]))


anything: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.sampled_from(["", "rw", "ro", "rw_or_ro", "x" * 129, "0" * 32, 2**62, -1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@st.composite
def payloads(draw: st.DrawFn, catalogue: Catalogue) -> bytes:
    """A message of the catalogue, with up to three of its fields replaced, removed or added."""
    cls = draw(st.sampled_from(classes(catalogue)))
    body = {"type": type_of(cls), **body_of(cls)}
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from([*body, "surplus"]) if body else st.just("surplus"))
        if draw(st.booleans()):
            body[name] = draw(anything)
        else:
            body.pop(name, None)
    packed: bytes = msgpack.packb([draw(st.integers(0, 3) | anything), body])
    return packed


@st.composite
def scripts(draw: st.DrawFn, catalogue: Catalogue) -> bytes:
    """Frames, or garbage, or frames that were cut and flipped; and any number of descriptors."""
    stream = b""
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["frame", "frame", "frame", "garbage", "lie"]))
        if kind == "garbage":
            stream += draw(st.binary(max_size=64))
            continue
        payload = draw(payloads(catalogue) | st.binary(max_size=64))
        announced = draw(st.sampled_from([0, 0, 0, 1, 2, FDS_PER_FRAME_MAX, 251, 255]))
        lie = draw(st.sampled_from([0, len(payload) + 1, 2**24, 2**32 - 1]))
        stream += frame(payload, announced, lie if kind == "lie" else None)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(0, len(stream) - 1)))
        stream = stream[:at] + draw(st.binary(max_size=2)) + stream[at + draw(st.integers(0, 2)) :]
    end = draw(st.sampled_from([None, None, -1, -5]))
    return bytes([draw(st.sampled_from([0, 0, 0, 1, 2, 3]))]) + stream[:end]
