"""Goal: who waits is told for about how long, from what each phase took before.

Method: models whose costs are known, in each way of waiting; the door says what is expected.
"""

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.model import Costs
from pool.core.states import ModelState
from tests.pool.core.pod import MIB, Pod, rules

S = ModelState
COSTS = {"load_ms": 20_000.0, "wake_ms": 300.0, "restage_ms": 900.0}
LEAVES = {"drain_ms": 50.0, "release_ms": 20.0}


def pod_of(*names):
    """All have had a turn; the first one is awake, with a request in flight."""
    pod = Pod({name: rules() for name in names}, total_bytes=(1050 + 110 * len(names)) * MIB)
    pod.start()
    for name in (*names[1:], names[0]):
        pod.ask(name)
        pod.settle()
        pod.tick(20_000)
    pod.ask(names[0])
    pod.settle()
    assert [pod.state(name) for name in names] == [S.AWAKE] + [S.WARM] * (len(names) - 1)
    for known in pod.pool.facts.models.values():
        known.costs = Costs(**COSTS, **LEAVES)
        known.awake_since_ms = known.turn_since_ms = None
    first = pod.pool.facts.models[names[0]]
    first.awake_since_ms = first.turn_since_ms = pod.now_ms
    pod.in_flight[names[0]] = pod.supervisors[f"{names[0]}0"].in_flight = 1
    pod.say_demand()
    return pod


def expected(pod, name):
    door = pod.doors[name].door
    assert isinstance(door, ev.ShutDoor)
    return door.expected_ms


def test_model_behind_a_protected_one_is_expected_after_its_protection_drain_and_release():
    pod = pod_of("a", "b")
    pod.tick(1_000)
    pod.ask("b")
    assert pod.state("b") is S.PENDING
    assert expected(pod, "b") == 9_000 + 50 + 20 + 300
    number = pod.doors["b"].number
    pod.tick(500)  # it comes nearer by itself
    assert pod.doors["b"].number == number
    pod.in_flight["a"] = pod.supervisors["a0"].in_flight = 0
    pod.tick(2_000)
    pod.say_demand()  # idle: it is asked at once
    assert pod.state("a") is S.DRAINING
    assert expected(pod, "b") == 50 + 20 + 300


def test_nothing_is_expected_of_a_model_behind_anothers_turn():
    pod = pod_of("a", "b", "c")
    pod.tick(1_000)
    pod.ask("b")
    pod.tick(1_000)
    pod.ask("c")
    assert expected(pod, "b") is not None
    assert expected(pod, "c") is None
    assert pod.doors["c"].door.reason == "model c waits for room: c is behind b"


def test_raise_is_expected_by_where_it_begins_and_nothing_is_where_it_was_never_measured():
    pod = Pod(total_bytes=2000 * MIB).start()
    pod.ask("a")
    assert (pod.state("a"), expected(pod, "a")) == (S.LOADING, None)
    for floor, wanted in ((Tier.COLD, 20_300.0), (Tier.OFFLOADED, 900.0), (Tier.WARM, 300.0)):
        assert Costs(**COSTS).raise_ms(floor) == wanted
        assert Costs().raise_ms(floor) is None
    pod.pool.facts.models["b"].costs = Costs(**COSTS)
    pod.ask("b")
    assert (pod.state("b"), expected(pod, "b")) == (S.LOADING, 20_300.0)
