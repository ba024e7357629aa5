"""The manifest of an epoch (its tensors and where they lie), the hash of its layout, and its
identity.

An identity says what the bytes are, as a nested mapping. This module does not know what a field
means: the writer and the readers compute the same mapping from the same checkpoint, and the error
names the first field that differs. Everything here is pure.

A manifest travels and is kept as bytes: one MessagePack array with a row for each tensor, in
the order of `TensorRecord`'s fields. It comes from a writer process, and a reader turns its numbers
into addresses, so their bounds are checked before it is published. The layout hash covers structure
only: two fine-tunes of one model have the same layout, so there is an identity too.

Checking a large manifest takes 100 ms, too long for a server's loop; hashing takes two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Annotated, Any, NewType

from msgspec import Meta, Raw, Struct, msgpack

from plumbing.errors import ProtocolError
from plumbing.wire.limits import FDS_PER_FRAME_MAX

LayoutHash = NewType("LayoutHash", str)

# A 120-layer mixture of experts has 12,000; a checkpoint of DeepSeek-V3, each expert and each block
# of scales by itself, has 91,991.
TENSORS_MAX = 131_072
# They travel in one frame. 130 are usual; of 2 GiB each they are more than any device has.
SLABS_MAX = FDS_PER_FRAME_MAX
MANIFEST_BYTES_MAX = 15 << 20  # what one frame carries beside an identity and the slabs' sizes
NAME_LENGTH_MAX = 512
DIMENSIONS_MAX = 32  # numpy's old limit, and torch's practical one

# Bytes per element of the types whose size we can check. For any other type (packed quantised
# formats) only coarse bounds are checked.
ITEM_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip


Size = Annotated[int, Meta(ge=0)]
Dimensions = Annotated[tuple[Size, ...], Meta(max_length=DIMENSIONS_MAX)]


class TensorRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor: `offset` from the start of the epoch and `nbytes` in bytes, `shape` and
    `strides` in elements. It may span slabs, which are mapped side by side."""

    name: Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
    offset: Size
    nbytes: Size
    shape: Dimensions
    dtype: str
    strides: Dimensions | None = None  # None: C-contiguous


_RECORD = msgpack.Decoder(TensorRecord)  # coerces nothing: `true` is not an integer
_ROWS = msgpack.Decoder(Annotated[list[Raw], Meta(max_length=TENSORS_MAX)])


def decode(manifest: bytes) -> dict[str, TensorRecord]:
    """Names to records, in the manifest's order, of bytes that a server has checked."""
    return {record.name: record for record in map(_RECORD.decode, _ROWS.decode(manifest))}


def encode(records: Iterable[TensorRecord]) -> bytes:
    """The one encoding of a manifest with these records."""
    # Row by row, and so are they decoded: packing megabytes in one call would block all other
    # threads.
    return msgpack.encode([Raw(msgpack.encode(record)) for record in records])


def check_size(manifest: bytes) -> None:
    """Check that a manifest can be sent on to readers.

    Raises:
        ProtocolError: `gms.manifest_too_large`.
    """
    if len(manifest) > MANIFEST_BYTES_MAX:
        raise ProtocolError(
            "gms.manifest_too_large",
            f"the manifest has {len(manifest)} bytes, and the limit is {MANIFEST_BYTES_MAX}; use "
            "shorter tensor names",
            limit=MANIFEST_BYTES_MAX,
        )


def layout_hash(slab_sizes: Sequence[int], manifest: bytes) -> LayoutHash:
    """SHA-256, in hex, of an epoch's memory: the slabs' sizes, then the manifest's bytes."""
    hashed = hashlib.sha256(msgpack.encode(list(slab_sizes)))
    hashed.update(manifest)
    return LayoutHash(hashed.hexdigest())


def check_manifest(manifest: bytes, slab_sizes: Sequence[int]) -> int:
    """Check that every tensor lies inside the epoch, with its shape and strides; returns their
    number. `Writer.place` puts them side by side.

    Raises:
        ProtocolError: `gms.bad_manifest`, naming the tensor.
    """
    size_bytes = sum(slab_sizes)
    try:
        records = [_RECORD.decode(row) for row in _ROWS.decode(manifest)]
    except (ValueError, RecursionError) as error:
        what = f"it is not a MessagePack array of at most {TENSORS_MAX} tensors ({error})"
        raise _bad(what) from error
    for record in records:
        _check_record(record, size_bytes)
    return len(records)


def _check_record(record: TensorRecord, size_bytes: int) -> None:
    """A reader must be able to trust that shape and strides stay inside the tensor's bytes."""
    end = record.offset + record.nbytes
    if end > size_bytes:
        raise _bad(
            f"tensor {record.name!r} from {record.offset} to {end} is outside the epoch of "
            f"{size_bytes} bytes"
        )
    item, elements = ITEM_BYTES.get(record.dtype), prod(record.shape)
    if record.strides is not None and len(record.strides) != len(record.shape):
        fits = False
    elif item is None:  # an unknown packed type has at least one bit for each element
        fits = elements <= 8 * record.nbytes
    elif record.strides is None:
        fits = elements * item == record.nbytes
    else:
        steps = zip(record.shape, record.strides, strict=True)
        last = sum((n - 1) * step for n, step in steps) if elements else -1
        fits = (last + 1) * item <= record.nbytes
    if not fits:
        raise _bad(
            f"tensor {record.name!r} of {record.dtype}, shape {record.shape} and strides"
            f" {record.strides} does not fit {record.nbytes} bytes"
        )


def _bad(why: str) -> ProtocolError:
    return ProtocolError("gms.bad_manifest", f"the manifest was refused: {why}")


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
            inner = (key if field == "identity" else f"{field}.{key}")[:FIELD_CHARS_MAX]
            if key not in expected or key not in offered:
                return Mismatch(inner, expected.get(key, ABSENT), offered.get(key, ABSENT))
            if found := first_mismatch(expected[key], offered[key], inner):
                return found
        return None
    if isinstance(expected, list | tuple) and isinstance(offered, list | tuple):
        if len(expected) != len(offered):
            return Mismatch(field, list(expected), list(offered))
        pairs = enumerate(zip(expected, offered, strict=True))
        inside = (first_mismatch(a, b, f"{field}[{n}]") for n, (a, b) in pairs)
        return next((each for each in inside if each is not None), None)
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
        ProtocolError: `gms.bad_identity`, `gms.identity_too_large`.
    """
    why = _why_not_plain(identity, 0)
    if why is not None:
        raise ProtocolError("gms.bad_identity", f"an identity {why}")
    size = len(json.dumps(identity))
    if size > IDENTITY_CHARS_MAX:
        raise ProtocolError(
            "gms.identity_too_large",
            f"the identity has {size} characters as JSON, and the limit is {IDENTITY_CHARS_MAX};"
            " identify shards by their hashes",
            limit=IDENTITY_CHARS_MAX,
        )


def _why_not_plain(value: Any, depth: int) -> str | None:
    if depth > DEPTH_MAX:
        return f"is nested deeper than {DEPTH_MAX} levels"
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return "has keys that are not strings"
        value = list(value.values())
    if isinstance(value, list | tuple):
        found = (_why_not_plain(each, depth + 1) for each in value)
        return next((why for why in found if why is not None), None)
    if value is None or isinstance(value, str | int | float | bool):
        return None
    return f"has a {type(value).__name__}: it is made of maps, lists, strings, numbers and booleans"
