"""Suballocator, manifest and identity: properties by Hypothesis, rules by example."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gms.client.suballocator import ALIGNMENT_BYTES, NeedSlab, Suballocator
from gms.manifest import (
    DEPTH_MAX,
    TensorRecord,
    WeightsManifest,
    check_identity,
    check_manifest,
    encode,
    first_mismatch,
    layout_hash,
)
from plumbing.errors import ProtocolError

GIB = 1 << 30
PAGE = 4096


def place_all(places: Suballocator, sizes: list[int]) -> list[TensorRecord]:
    records = []
    for index, nbytes in enumerate(sizes):
        while isinstance(offset := places.place(nbytes), NeedSlab):
            places.slab_opened(offset.size_bytes)
        records.append(TensorRecord(f"t{index}", offset, nbytes, (nbytes,), "uint8"))
    return records


def record(**change: Any) -> TensorRecord:
    fields: dict[str, Any] = {
        "name": "t", "offset": 0, "nbytes": 16, "shape": (4,), "dtype": "float32",
    }  # fmt: skip
    return TensorRecord(**{**fields, **change})


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300 << 20), max_size=60),
    is_planned=st.booleans(),
    free=st.integers(0, 4 * GIB),
    cap=st.none() | st.integers(PAGE, 128 << 20),
)
def test_placed_tensors_never_overlap_and_are_aligned(
    sizes: list[int], is_planned: bool, free: int, cap: int | None
):
    """Any sizes, planned or not, on a large or small device, slabs capped or not: a manifest that
    passes its check, and no tensor crosses a slab's edge that would fit into one."""
    cap = cap and max(cap, sum(sizes) // 1000)  # a thousand slabs are enough to look at
    places = Suballocator(PAGE, free, cap)
    if is_planned:
        places.plan(sum(sizes), max(sizes, default=0))
    records = place_all(places, sizes)
    assert check_manifest(encode(records), places.slab_sizes) == len(sizes)
    assert all(r.offset % ALIGNMENT_BYTES == 0 for r in records)
    largest = places.slab_bytes_cap or max(places.slab_sizes, default=0)
    assert all(size % PAGE == 0 and size <= largest for size in places.slab_sizes)
    edges = list(itertools.accumulate(places.slab_sizes))
    for r in records:
        crossed = [edge for edge in edges if r.offset < edge < r.offset + r.nbytes]
        assert not crossed or r.nbytes > largest - ALIGNMENT_BYTES


def test_planned_small_model_takes_what_it_needs():
    """A model of 5 MiB does not take a slab of 64 MiB, planned or on a device of 10 MiB."""
    planned = Suballocator(PAGE, GIB)
    planned.plan(5 << 20, 1 << 20)
    place_all(planned, [1 << 20] * 5)
    assert sum(planned.slab_sizes) < 6 << 20
    small = Suballocator(PAGE, 10 << 20)
    place_all(small, [1 << 20] * 5)
    assert sum(small.slab_sizes) == 10 << 20


BAD_FIELDS: list[dict[str, Any]] = [
    {"offset": 4090}, {"offset": -1}, {"offset": True}, {"nbytes": 16.0}, {"nbytes": 12},
    {"name": b"t"}, {"name": ""}, {"name": "x" * 513},
    {"shape": (4.0,)}, {"shape": None}, {"shape": (-4,)}, {"shape": (1,) * 33},
    {"strides": (1000,)}, {"strides": (-1,)}, {"strides": (1, 1)},
    {"dtype": "packed", "shape": (2**62, 2**62)},
]  # fmt: skip
BAD_BYTES = {
    "empty": b"",
    "garbage": b"\xff" * 9,
    "a second document": b"\x90\x90",
    "a map": b"\x80",
    "too many rows": b"\xdd\xff\xff\xff\xff",
    "empty maps": b"\xdd\x00\x01\x00\x00" + b"\x80" * 65536,
    "nested": b"\x91" * 1000 + b"\xc0",
    "an extension": b"\x91\xc7\x00\x01",
    "a row that is a number": b"\x91\x01",
    "a short row": b"\x91\x91\xa1t",
    "a longer encoding of nothing": b"\xdc\x00\x00",
    "a longer encoding of a number": encode([record()]).replace(b"\x10", b"\xcc\x10"),
    "half an overlap": encode([record(), record(name="u", offset=8)]),
    "one name twice": encode([record(), record(offset=64)]),
}


@pytest.mark.parametrize(
    "manifest", [encode([record(**change)]) for change in BAD_FIELDS] + list(BAD_BYTES.values()),
    ids=[*map(str, BAD_FIELDS), *BAD_BYTES],
)  # fmt: skip
def test_bad_manifest_is_refused(manifest: bytes):
    """One wrong field, overlaps, garbage, and bytes that are not the one encoding of a layout."""
    check_manifest(encode([record(), record(name="tied")]), [4096])
    with pytest.raises(ProtocolError, match=r"gms\.bad_manifest"):
        check_manifest(manifest, [4096])


def test_manifest_reads_back_what_was_encoded_in_order():
    """Names to records, strides and scalars too; the bytes are kept as they came."""
    records = [record(name="z", shape=(), nbytes=4), record(name="a", offset=8, strides=(1,))]
    manifest = WeightsManifest(encode(records))
    assert list(manifest.values()) == records
    assert list(manifest) == ["z", "a"]
    assert len(manifest) == 2
    assert manifest.encoded == encode(records)
    with pytest.raises(KeyError):
        manifest["b"]


def test_layout_hash_covers_every_field_of_structure():
    """Change any one field and the hash changes; the same structure hashes the same."""
    base = layout_hash([4096], encode([record()]))
    assert base == layout_hash((4096,), encode((record(),)))
    changes: list[dict[str, Any]] = [
        {"name": "u"}, {"offset": 256}, {"shape": (2, 2)}, {"dtype": "int32"}, {"strides": (1,)},
    ]  # fmt: skip
    changed = [layout_hash(sizes, encode([record()])) for sizes in ([8192], [2048, 2048])]
    changed += [layout_hash([4096], encode([record(**change)])) for change in changes]
    assert len({base, *changed}) == len(changed) + 1


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=80, deadline=None)
@given(left=plain, right=plain)
def test_first_mismatch_is_none_exactly_for_equal_identities(left: Any, right: Any):
    """Against the equality of their JSON, which tells 1 and true apart; symmetric."""
    assert first_mismatch(left, left) is None
    are_equal = json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    assert (first_mismatch(left, right) is None) == are_equal
    assert (first_mismatch(left, right) is None) == (first_mismatch(right, left) is None)


@pytest.mark.parametrize(
    ("expected", "offered", "field"),
    [
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "a.b[1]"),
        ({"a": 1, "dtype": "float32"}, {"a": 1}, "dtype"),
        ({"tied": True}, {"tied": 1}, "tied"),
        ({"dtype": "absent"}, {}, "dtype"),
    ],
)
def test_mismatch_names_the_first_field_that_differs(expected: Any, offered: Any, field: str):
    found = first_mismatch(expected, offered)
    assert found.field == field


def test_identity_that_is_not_plain_or_too_deep_is_refused():
    """Bytes and bottomless nesting are a peer's fault, found before anything recurses."""
    deep: Any = {}
    for _ in range(DEPTH_MAX + 2):
        deep = {"d": deep}
    for bad in ({"x": b"1"}, {"x": [object()]}, deep):
        with pytest.raises(ProtocolError, match=r"gms\.bad_identity"):
            check_identity(bad)
