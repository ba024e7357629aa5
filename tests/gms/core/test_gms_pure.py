"""Where tensors are placed, manifest and identity: properties by Hypothesis, rules by example."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gms import messages as msg
from gms.client.attach import Attachment
from gms.client.weights import ALIGNMENT_BYTES, Writer
from gms.manifest import (
    DEPTH_MAX,
    TensorRecord,
    check_identity,
    check_manifest,
    decode,
    encode,
    first_mismatch,
    layout_hash,
)
from gms.vmm.host import HostMemory
from plumbing.errors import ProtocolError
from plumbing.wire.blocking import Reply

GIB = 1 << 30
PAGE = 4096


class Slabs:
    """In place of a server: it has all that a writer asks for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def request(self, message: msg.AllocateMsg, timeout_s: float) -> Reply:
        self.sizes.append(message.size_bytes)
        slab = HostMemory().create(message.size_bytes, "t")
        allocated = msg.AllocatedMsg(len(self.sizes) - 1, message.size_bytes)
        fds = [slab.export(writable=True)]
        slab.release()
        return Reply(allocated, fds)

    def close(self) -> None:
        pass


def placed(sizes: list[int], planned: int | None, free: int, cap: int | None) -> list[int]:
    """Place tensors of these sizes, and check where; the slabs' sizes."""
    slabs: Any = Slabs()
    attachment = Attachment("/none", "HOST-0", HostMemory(cap))
    attachment._reserve(sum(sizes) + 2 * GIB)
    grant = msg.WritingMsg("e", 8 * GIB, free, PAGE)
    with Writer(attachment, slabs, msg.AttachMsg("e", "i", "rw_or_ro"), grant) as writer:
        if planned is not None:
            writer.plan(planned)
        for index, nbytes in enumerate(sizes):
            writer.place(f"t{index}", nbytes, (nbytes,), "uint8")
        records = list(writer.tensors.values())
        assert check_manifest(encode(records), slabs.sizes) == len(sizes)
        assert all(each.offset % ALIGNMENT_BYTES == 0 for each in records)
        assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(records))
    return list(slabs.sizes)


def record(**change: Any) -> TensorRecord:
    fields: dict[str, Any] = {
        "name": "t", "offset": 0, "nbytes": 16, "shape": (4,), "dtype": "float32",
    }  # fmt: skip
    return TensorRecord(**{**fields, **change})


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300 << 20), max_size=20),
    is_planned=st.booleans(),
    free=st.integers(0, 4 * GIB),
    cap=st.none() | st.integers(PAGE, 128 << 20),
)
def test_placed_tensors_never_overlap_and_are_aligned(
    sizes: list[int], is_planned: bool, free: int, cap: int | None
):
    """Any sizes, planned or not, on a large or small device, slabs capped or not: a manifest that
    passes its check, and slabs of whole pages that are not larger than the driver's limit."""
    cap = cap and max(cap, sum(sizes) // 100)
    slabs = placed(sizes, sum(sizes) if is_planned else None, free, cap)
    assert all(size % PAGE == 0 and size <= (cap or size) for size in slabs)


def test_planned_model_takes_what_it_needs():
    """A model of 5 MiB does not take a slab of 64 MiB, planned or on a device of 10 MiB; one of
    many small tensors has few slabs, and loses less than half a percent."""
    assert sum(placed([1 << 20] * 5, 5 << 20, GIB, None)) < 6 << 20
    assert sum(placed([1 << 20] * 5, None, 10 << 20, None)) == 10 << 20
    sizes = [1_000_000, 12_345] * 1000
    slabs = placed(sizes, sum(sizes), 8 * GIB, None)
    assert len(slabs) <= 128
    assert sum(slabs) < sum(sizes) * 1.005 + sum(sizes) // 128


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
}


@pytest.mark.parametrize(
    "manifest", [encode([record(**change)]) for change in BAD_FIELDS] + list(BAD_BYTES.values()),
    ids=[*map(str, BAD_FIELDS), *BAD_BYTES],
)  # fmt: skip
def test_bad_manifest_is_refused(manifest: bytes):
    """One wrong field, and garbage."""
    check_manifest(encode([record(), record(name="tied")]), [4096])
    with pytest.raises(ProtocolError, match=r"gms\.bad_manifest"):
        check_manifest(manifest, [4096])


def test_manifest_reads_back_what_was_encoded_in_order():
    """Names to records, strides and scalars too."""
    records = [record(name="z", shape=(), nbytes=4), record(name="a", offset=8, strides=(1,))]
    assert list(decode(encode(records)).items()) == [(each.name, each) for each in records]


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
