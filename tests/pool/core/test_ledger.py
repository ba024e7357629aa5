"""Goal: the books add up after every entry, and nothing is booked without room. Method: tables, and
random entries beside a plain sum (Hypothesis)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pool.core.events import MemoryIs
from pool.core.ledger import PoolLedger
from pool.core.states import HOST, EntryKey, EntryKind

KV = EntryKey("0", EntryKind.KV, "a")
WEIGHTS = EntryKey("1", EntryKind.WEIGHTS, "a")


def a_ledger(**totals):
    ledger = PoolLedger(margin_bytes=10)
    for name in ("0", "1"):
        ledger.hear_memory(MemoryIs(name, 100, {}), {})
    for name, total in totals.items():
        ledger.hear_memory(MemoryIs(name, total, {}), {})
    return ledger


def test_all_are_booked_or_none():
    ledger = a_ledger()
    assert not ledger.book({KV: 50, WEIGHTS: 91})
    assert ledger.entries == {}
    ledger.book({KV: 50, WEIGHTS: 90})
    assert (ledger.free_bytes("0"), ledger.free_bytes("1")) == (40, 0)


def test_nothing_is_free_where_nobody_has_measured_and_host_memory_has_no_margin():
    ledger = a_ledger(HOST=100)
    assert ledger.free_bytes(HOST) == 100
    assert ledger.free_bytes("9") == 0
    assert not ledger.fits({EntryKey("9", EntryKind.KV, "a"): 1})


KEYS = st.builds(EntryKey, st.sampled_from("01"), st.sampled_from(EntryKind), st.sampled_from("ab"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), KEYS, st.integers(0, 60))))
def test_free_is_what_nobody_has_booked(steps):
    ledger = a_ledger()
    plain = {}
    for is_drop, key, size in steps:
        if is_drop:
            ledger.drop(key)
            plain.pop(key, None)
        elif ledger.fits({key: size}):
            ledger.book({key: size})
            plain[key] = max(size, plain.get(key, 0))  # it keeps what it has
        for name in "01":
            booked = sum(each for key, each in plain.items() if key.device == name)
            assert ledger.free_bytes(name) == 90 - booked >= 0
