"""The manifest of an epoch (its tensors and where they lie) and the hash of its layout.

Pure. A manifest comes from a writer process, so everything in it is checked before it is
published: a reader turns these numbers into addresses. The layout hash covers structure only;
two fine-tunes of one model have the same layout, which is why there is an identity beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NewType

from understudy.errors import ProtocolError

LayoutHash = NewType("LayoutHash", str)

TENSORS_MAX = 65_536  # a 120-layer mixture of experts has 12,000; five times that is a mistake
NAME_LENGTH_MAX = 512
DIMENSIONS_MAX = 32  # numpy's old limit, and torch's practical one

# Bytes per element of the types whose size we can check. A type not named here (packed
# quantised formats) is accepted: then only coarse bounds are checked.
ITEM_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor: `shape` and `strides` in elements, `offset` and `nbytes` in bytes of its slab."""

    name: str
    slab: int
    offset: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    strides: tuple[int, ...] | None = None  # None: C-contiguous


def check_manifest(manifest: Sequence[TensorRecord], slab_sizes: Sequence[int]) -> None:
    """Check that every tensor lies inside its slab and that none half-overlaps another.

    Two records of the very same bytes are allowed: that is how tied weights are written down.

    Raises:
        ProtocolError: `gms.bad_manifest`, naming the tensor.
    """
    if len(manifest) > TENSORS_MAX:
        raise _bad(f"it lists {len(manifest)} tensors and the limit is {TENSORS_MAX}")
    names: set[str] = set()
    for record in manifest:
        _check_record(record, slab_sizes)
        if record.name in names:
            raise _bad(f"tensor {record.name!r} is listed twice")
        names.add(record.name)
    _check_overlaps(manifest)


def layout_hash(slab_sizes: Sequence[int], manifest: Sequence[TensorRecord]) -> LayoutHash:
    """SHA-256, in hex, of the ordered description of an epoch's memory."""
    rows = [
        [r.name, r.slab, r.offset, list(r.shape), r.dtype, r.nbytes, r.strides and list(r.strides)]
        for r in manifest
    ]
    text = json.dumps([list(slab_sizes), rows], separators=(",", ":"))
    return LayoutHash(hashlib.sha256(text.encode()).hexdigest())


def _check_record(record: TensorRecord, slab_sizes: Sequence[int]) -> None:
    if not 0 < len(record.name) <= NAME_LENGTH_MAX:
        raise _bad(f"a tensor's name must have 1 to {NAME_LENGTH_MAX} characters")
    if not 0 <= record.slab < len(slab_sizes):
        raise _bad(f"tensor {record.name!r} is in slab {record.slab} of {len(slab_sizes)}")
    size = slab_sizes[record.slab]
    if record.offset < 0 or record.nbytes < 0 or record.offset + record.nbytes > size:
        raise _bad(
            f"tensor {record.name!r} ends at {record.offset + record.nbytes}, "
            f"outside slab {record.slab} of {size} bytes"
        )
    if len(record.shape) > DIMENSIONS_MAX or any(n < 0 for n in record.shape):
        raise _bad(f"tensor {record.name!r} has the impossible shape {record.shape}")
    _check_extent(record)


def _check_extent(record: TensorRecord) -> None:
    """A reader must be able to trust that shape and strides stay inside the tensor's bytes."""
    item = ITEM_BYTES.get(record.dtype)
    if record.strides is not None and (
        len(record.strides) != len(record.shape) or any(step < 0 for step in record.strides)
    ):
        raise _bad(f"tensor {record.name!r} has strides that do not fit its shape")
    if item is None:  # a packed type that we do not know has at least one bit for each element
        fits = prod(record.shape) <= 8 * record.nbytes
    elif record.strides is None:
        fits = prod(record.shape) * item == record.nbytes
    else:
        steps = zip(record.shape, record.strides, strict=True)
        last = sum((n - 1) * step for n, step in steps) if all(record.shape) else -1
        fits = (last + 1) * item <= record.nbytes
    if not fits:
        raise _bad(
            f"tensor {record.name!r} of {record.dtype}, shape {record.shape} and strides"
            f" {record.strides} does not fit {record.nbytes} bytes"
        )


def _check_overlaps(manifest: Sequence[TensorRecord]) -> None:
    ordered = sorted((r for r in manifest if r.nbytes), key=lambda r: (r.slab, r.offset, r.nbytes))
    for left, right in pairwise(ordered):
        same_bytes = (left.offset, left.nbytes) == (right.offset, right.nbytes)
        if left.slab == right.slab and left.offset + left.nbytes > right.offset and not same_bytes:
            raise _bad(f"tensors {left.name!r} and {right.name!r} overlap")


def _bad(why: str) -> ProtocolError:
    return ProtocolError("gms.bad_manifest", f"The manifest was refused: {why}.")
