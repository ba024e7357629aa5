"""Goal: memory is booked before it is taken, and leaves the books on proof alone."""

import pytest
from msgspec.structs import replace

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.reconcile import ModelPool
from pool.core.states import HOST, EngineSizes, EntryKey, EntryKind, ModelState
from tests.pool.core.pod import ERA, GPU, MIB, SIZES, Pod, rules

S = ModelState
KV = EntryKey(GPU, EntryKind.KV, "a")
WEIGHTS = EntryKey(GPU, EntryKind.WEIGHTS, "a")


def base(engine):
    return EntryKey(GPU, EntryKind.BASE, engine)


def booked(pod):
    return pod.pool.facts.ledger.entries


def releasing(deaf=()):
    """Model a has just been told to give its KV memory back; nobody has answered yet."""
    pod = Pod(total_bytes=1500 * MIB).start()
    pod.ask("a")
    pod.settle()
    pod.tick(20_000)
    pod.settle()
    pod.handle(ev.Ordered("a", ev.Order.SLEEP))
    for name in deaf:
        pod.supervisors[name].is_deaf = True
    pod.obey_doors()
    assert pod.state("a") is S.RELEASING
    return pod


@pytest.mark.parametrize(
    ("state", "has_heard", "leaves"),
    [
        ("releasing", True, True),  # it gives it back, so what is free stays free
        ("releasing", False, False),  # by an older goal: it may wake by one in between
        ("waking", True, False),  # it takes it first, whatever it was told meanwhile
        ("active", True, False),
    ],
)
def test_kv_memory_leaves_before_its_engine_rests_if_that_gives_it_back(state, has_heard, leaves):
    pod = releasing(deaf=["a0"])
    engine = pod.supervisors["a0"]
    if has_heard:
        engine.seen = pod.pool.facts.engines["a0"].generation
    engine.state = state
    pod.handle(engine.said(tier=Tier.AWAKE))
    number = pod.pool.facts.models["a"].asked or 0
    pod.handle(
        ev.MemoryIs(GPU, pod.total_bytes, {(EntryKind.WEIGHTS, "a"): 100 * MIB}, {"a": number})
    )
    assert (KV not in booked(pod)) is leaves


def test_memory_that_does_not_come_back_is_an_alarm_and_stays_booked():
    pod = releasing(deaf=["a0"])
    pod.handle(ev.Ordered("a", ev.Order.UNLOAD))
    for _ in range(3):
        pod.tick(61_000)
    alarms = [each for each in pod.all if isinstance(each, ev.Alarm)]
    assert "a0 has not answered" in alarms[0].sentence
    assert {base("a0"), WEIGHTS, KV} <= set(booked(pod))
    assert not pod.pool.facts.ledger.leaving  # so no head waits for it


def test_memory_of_an_engine_that_is_awake_against_its_goal_is_booked():
    pod = releasing()
    pod.settle()
    assert pod.state("a") is S.WARM
    pod.handle(pod.supervisors["a0"].said(state="active", tier=Tier.AWAKE))
    assert KV in booked(pod)


COPY = EntryKey(HOST, EntryKind.COPY, "a")


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, S.LOADING),
        ({"rest": Tier.OFFLOADED}, S.PENDING),
        ({"offload_after_ms": 1_000.0}, S.PENDING),
    ],
)
def test_only_a_model_that_is_to_be_offloaded_needs_room_for_a_copy(changed, state):
    """Method: host memory that others have taken."""
    pod = Pod({"a": rules(**changed)})
    pod.pool = ModelPool(replace(pod.setup, devices=(GPU, HOST)), pod.now_ms, ERA)
    pod.handle(ev.MemoryIs(HOST, 400 * MIB, {}, outside_bytes=350 * MIB))
    pod.total_bytes = 2000 * MIB
    pod.start()
    pod.ask("a")
    assert pod.state("a") is state


def test_copy_that_is_made_where_there_is_room_is_booked_until_its_model_is_cold():
    pod = Pod({"a": rules()})
    pod.pool = ModelPool(replace(pod.setup, devices=(GPU, HOST)), pod.now_ms, ERA)
    pod.handle(ev.MemoryIs(HOST, 400 * MIB, {}))
    pod.total_bytes = 2000 * MIB
    pod.start()
    pod.ask("a")
    pod.settle()
    assert COPY not in booked(pod)
    pod.handle(ev.MemoryIs(HOST, 400 * MIB, {(EntryKind.COPY, "a"): 100 * MIB}))
    assert booked(pod)[COPY] == 100 * MIB
    assert COPY not in pod.pool.facts.ledger.leaving
    pod.handle(ev.Ordered("a", ev.Order.UNLOAD))
    pod.settle()
    assert COPY in booked(pod)  # the memory service has not said that it is free
    number = pod.pool.facts.models["a"].asked
    pod.handle(ev.MemoryIs(HOST, 400 * MIB, {}, {"a": number}))
    assert COPY not in booked(pod)
    assert pod.state("a") is S.COLD


def test_weights_and_kv_are_learnt_where_nobody_can_measure_a_base():
    """As on a GPU: the base stays what was estimated for it."""
    pod = Pod(total_bytes=2000 * MIB).start()
    known = pod.pool.facts.models["a"]
    known.sizes = EngineSizes({GPU: 30 * MIB}, {GPU: 1}, {}, is_estimated=True)
    pod.ask("a")
    word = pod.supervisors["a0"].said(
        state="standby",
        incarnation="a0.1",
        weights_bytes={GPU: 100 * MIB},
        kv_bytes={GPU: 500 * MIB},
    )
    pod.handle(word)
    assert known.sizes == EngineSizes(
        {GPU: 30 * MIB}, {GPU: 100 * MIB}, {GPU: 500 * MIB}, is_estimated=True
    )
    assert booked(pod)[KV] == 500 * MIB


def test_weights_are_as_large_as_the_memory_service_says():
    """It counts whole pages, and an engine its tensors. A head that needs the whole device could
    never have it, since the last page of a model at rest would stay booked."""
    pod = Pod(total_bytes=1500 * MIB).start()
    pod.ask("a")
    pod.settle()
    held = SIZES.weights[GPU] + 4096
    both = {(EntryKind.WEIGHTS, "a"): held, (EntryKind.KV, "a"): SIZES.kv[GPU]}
    pod.handle(ev.MemoryIs(GPU, pod.total_bytes, both, dict(pod.asked)))
    pod.handle(pod.supervisors["a0"].said())
    known = pod.pool.facts.models["a"]
    assert known.sizes is not None
    assert known.sizes.weights == {GPU: held}
    assert booked(pod)[WEIGHTS] == held
