"""Suballocator, manifest, identity and restarts: properties by Hypothesis, rules by example."""

from __future__ import annotations

import errno
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gms.client.writer import ALIGNMENT_BYTES, SLAB_BYTES_MIN, NeedSlab, Suballocator
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
from plumbing.errors import GivenUpError, ProtocolError
from plumbing.pod.supervision import (
    DEATHS_MAX,
    LOOK_MS_MAX,
    SHORTAGE_EXIT_CODE,
    SHORTAGES,
    CpuTimes,
    GiveUp,
    Restarts,
    Silence,
    StartAgain,
)

GIB = 1 << 30
GIVEN_UP = GiveUp(GivenUpError.exit_code)
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


def test_tensors_that_span_capped_slabs_waste_no_more_than_others():
    """Three tensors of 5 GiB and small ones between, slabs of at most 2 GiB: all but full."""
    sizes = [5 * GIB, 8192, 40 << 20] * 3
    places = Suballocator(2 << 20, 4096 * GIB, 2 * GIB)
    places.plan(sum(sizes), max(sizes))
    place_all(places, sizes)
    assert max(places.slab_sizes) == 2 * GIB
    assert sum(places.slab_sizes) < sum(sizes) * 1.05


@pytest.mark.parametrize("is_planned", [True, False])
@pytest.mark.parametrize("total_gib", [16, 140, 1000])
def test_slabs_of_a_large_model_fit_one_frame(total_gib: int, is_planned: bool):
    """Tensors of 40 to 470 MB up to a TiB: at most 250 slabs, little of them wasted."""
    sizes = []
    while sum(sizes) < total_gib * GIB:
        sizes += [470 << 20, 117_440_512, 8192, 33 << 20]
    places = Suballocator(2 << 20, 4096 * GIB)
    if is_planned:
        places.plan(sum(sizes), max(sizes))
    place_all(places, sizes)
    assert len(places.slab_sizes) <= 250
    assert sum(places.slab_sizes) < sum(sizes) * 1.15 + SLAB_BYTES_MIN


def test_planned_small_model_takes_what_it_needs():
    """A model of 5 MiB does not take a slab of 64 MiB, planned or on a device of 10 MiB."""
    planned = Suballocator(PAGE, GIB)
    planned.plan(5 << 20, 1 << 20)
    place_all(planned, [1 << 20] * 5)
    assert sum(planned.slab_sizes) < 6 << 20
    small = Suballocator(PAGE, 10 << 20)
    place_all(small, [1 << 20] * 5)
    assert sum(small.slab_sizes) == 10 << 20


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"offset": 4090}, "outside the epoch"),
        ({"offset": -1}, "outside the epoch"),
        ({"offset": True}, "is not a tensor's"),
        ({"nbytes": 16.0}, "is not a tensor's"),
        ({"name": b"t"}, "is not a tensor's"),
        ({"shape": (4.0,)}, "is not a tensor's"),
        ({"shape": None}, "is not a tensor's"),
        ({"nbytes": 12}, "does not fit 12 bytes"),
        ({"shape": (-4,)}, "impossible shape"),
        ({"strides": (1000,)}, "does not fit 16 bytes"),
        ({"strides": (-1,)}, "strides that do not fit"),
        ({"dtype": "packed", "shape": (2**62, 2**62)}, "does not fit 16 bytes"),
        ({"name": ""}, "name"),
        ({"name": "x" * 513}, "name"),
        ({"strides": (1, 1)}, "strides"),
    ],
)
def test_bad_manifest_is_refused_with_its_reason(change: dict[str, Any], word: str):
    """One wrong field each: the error says which and why."""
    with pytest.raises(ProtocolError, match=r"gms\.bad_manifest") as caught:
        check_manifest(encode([record(**change)]), [4096])
    assert word in caught.value.message


@pytest.mark.parametrize(
    ("manifest", "word"),
    [
        (b"", "not a MessagePack array"),
        (b"\xff" * 9, "not a MessagePack array"),
        (b"\x90\x90", "not a MessagePack array"),
        (b"\x80", "not a MessagePack array"),
        (b"\xdd\xff\xff\xff\xff", "at most 131072 tensors"),
        (b"\x91\x01", "is not a tensor's"),
        (b"\x91\x91\xa1t", "is not a tensor's"),
        (b"\xdc\x00\x00", "canonical"),
        (encode([record()]).replace(b"\x10", b"\xcc\x10"), "canonical"),
    ],
)
def test_bytes_that_are_no_canonical_manifest_are_refused(manifest: bytes, word: str):
    """Garbage, a second document, other shapes, a longer encoding of the same: each is named."""
    with pytest.raises(ProtocolError, match=r"gms\.bad_manifest") as caught:
        check_manifest(manifest, [4096])
    assert word in caught.value.message


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


def test_overlapping_tensors_are_refused_but_tied_ones_are_not():
    """Half an overlap is a mistake; the very same bytes twice are tied weights."""
    check_manifest(encode([record(), record(name="tied")]), [4096])
    with pytest.raises(ProtocolError, match="overlap"):
        check_manifest(encode([record(), record(name="u", offset=8)]), [4096])
    with pytest.raises(ProtocolError, match="twice"):
        check_manifest(encode([record(), record(offset=64)]), [4096])


def test_layout_hash_covers_every_field_of_structure():
    """Change any one field and the hash changes; the same structure hashes the same."""
    base = layout_hash([4096], encode([record()]))
    assert base == layout_hash((4096,), encode((record(),)))
    changed = [
        layout_hash([8192], encode([record()])),
        layout_hash([2048, 2048], encode([record()])),
        *(
            layout_hash([4096], encode([record(**change)]))
            for change in (
                {"name": "u"},
                {"offset": 256},
                {"shape": (2, 2)},
                {"dtype": "int32"},
                {"strides": (1,)},
            )
        ),
    ]
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


def test_mismatch_names_nested_absent_and_typed_fields():
    """The dotted path of the first difference in sorted order; a missing field reads `absent`."""
    found = first_mismatch({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}})
    assert found is not None
    assert (found.field, found.expected, found.offered) == ("a.b[1]", 2, 3)
    found = first_mismatch({"a": 1, "dtype": "float32"}, {"a": 1})
    assert found is not None
    assert (found.field, found.offered) == ("dtype", "absent")
    assert first_mismatch({"tied": True}, {"tied": 1}) is not None
    assert first_mismatch({"dtype": "absent"}, {}) is not None


def test_identity_that_is_not_plain_or_too_deep_is_refused():
    """Bytes and bottomless nesting are a peer's fault, found before anything recurses."""
    deep: Any = {}
    for _ in range(DEPTH_MAX + 2):
        deep = {"d": deep}
    for bad in ({"x": b"1"}, {"x": [object()]}, deep):
        with pytest.raises(ProtocolError, match=r"gms\.bad_identity"):
            check_identity(bad)


def test_restarts_back_off_give_up_and_forget():
    """The first at once, then doubling; a long life starts the count anew; five end it."""
    restarts = Restarts()
    delays = [restarts.died(100, -9, had_answered=False) for _ in range(DEATHS_MAX - 1)]
    assert delays == [StartAgain(0), StartAgain(500), StartAgain(1000), StartAgain(2000)]
    assert restarts.died(20_000, -9, had_answered=True) == StartAgain(0)
    for _ in range(DEATHS_MAX - 2):
        restarts.died(100, 1, had_answered=True)
    assert restarts.died(100, -9, had_answered=False) == GIVEN_UP


def test_usage_error_ends_it_at_once_only_before_the_first_answer():
    """Exit code 2: bad flags at the start; after an hour of service, a device that is not back."""
    assert Restarts().died(100, 2, had_answered=False) == GiveUp(2)
    restarts = Restarts()
    assert restarts.died(3_600_000, -9, had_answered=True) == StartAgain(0)
    delays = [restarts.died(100, 2, had_answered=False) for _ in range(DEATHS_MAX - 1)]
    assert delays == [StartAgain(500), StartAgain(1000), StartAgain(2000), GIVEN_UP]


def test_server_that_is_killed_again_and_again_is_started_at_once_for_ever():
    """A hundred SIGKILLs of a server that had answered: no back-off, and no giving up; a crash
    of its own still counts."""
    restarts = Restarts()
    for _ in range(100):
        assert restarts.died(300, -9, had_answered=True) == StartAgain(0)
    assert restarts.deaths_total == 100
    for _ in range(DEATHS_MAX - 2):
        assert isinstance(restarts.died(300, 70, had_answered=True), StartAgain)
    assert restarts.died(300, 70, had_answered=True) == GIVEN_UP


def test_shortage_is_waited_out_for_ever_with_a_short_backoff():
    """A hundred starts that the kernel refuses, or servers that meet the shortage themselves: the
    delay stays short, deaths are not counted, and the shortage after the next life starts anew."""
    restarts = Restarts()
    delays = [restarts.not_started(number).delay_ms for number in SHORTAGES for _ in range(20)]
    assert delays[:4] == [500, 1000, 2000, 4000]
    assert set(delays[4:]) == {5000}
    assert restarts.died(300, SHORTAGE_EXIT_CODE, had_answered=False) == StartAgain(5000)
    assert restarts.deaths == 0
    assert restarts.died(300, 1, had_answered=True) == StartAgain(0)
    assert restarts.not_started(errno.EMFILE) == StartAgain(500)


def test_program_that_cannot_run_ends_the_container_after_several_attempts():
    """ENOENT, EACCES: no back-off helps for ever."""
    restarts = Restarts()
    verdicts = [restarts.not_started(errno.ENOENT) for _ in range(DEATHS_MAX)]
    assert verdicts[:-1] == [StartAgain(0), StartAgain(500), StartAgain(1000), StartAgain(2000)]
    assert verdicts[-1] == GIVEN_UP
    assert restarts.deaths_total == 0, "nothing was started, so nothing was restarted"


def looks(*each: tuple[float, CpuTimes | None]) -> float:
    silence = Silence()
    for elapsed_ms, cpu in each:
        silence.look(elapsed_ms, cpu)
    return silence.ms


SLEEPING = CpuTimes(is_runnable=False, ran_ms=5, waited_ms=7)


def test_silence_counts_only_the_time_in_which_the_server_could_run():
    """Asleep or stopped, or running without an answer: silent. Waiting for a CPU, whether that was
    counted already or still lasts: not."""
    assert looks((1000, SLEEPING), (1000, SLEEPING)) == 2000
    spinning = [CpuTimes(is_runnable=True, ran_ms=990.0 * n, waited_ms=0) for n in range(3)]
    assert looks(*((1000, cpu) for cpu in spinning)) == 3000
    late = CpuTimes(is_runnable=False, ran_ms=6, waited_ms=907)
    assert looks((1000, SLEEPING), (1000, late)) == 1100
    starved = CpuTimes(is_runnable=True, ran_ms=5, waited_ms=7)
    assert looks((1000, SLEEPING), (1000, starved), (1000, starved)) == 1000
    assert looks((1000, SLEEPING), (1000, None), (1000, SLEEPING)) == 3000, "unknown is no excuse"


def test_silence_ignores_the_time_in_which_nobody_could_listen():
    """Ten minutes between two looks, as when the supervisor itself was stopped; then an answer."""
    silence = Silence()
    silence.look(1000, SLEEPING)
    silence.look(600_000, SLEEPING)
    assert silence.ms == 1000 + LOOK_MS_MAX
    silence.answered()
    assert silence.ms == 0
