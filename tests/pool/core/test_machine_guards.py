"""Goal: what the machine refuses even if the policy asks for it, and the order of what it says.

Method: a policy that raises everything; and deaths in which several things are said at once.
"""

import pytest

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.reconcile import ModelPool
from pool.core.states import EngineSizes, ModelState
from pool.core.who_wakes import Plan, Raise
from tests.pool.core.pod import ERA, GPU, MIB, Pod

S = ModelState


def raise_all(_now_ms, models, _devices, _rules):
    return Plan({view.name: Raise() for view in models if view.state is S.PENDING})


def reckless(total_bytes):
    pod = Pod(total_bytes=total_bytes)
    pod.pool = ModelPool(pod.setup, pod.now_ms, ERA, planner=raise_all)
    return pod


def test_on_a_device_that_nobody_has_described_nothing_is_raised_whatever_the_policy_says():
    pod = reckless(1300 * MIB)
    pod.handle(ev.DeviceIs(GPU, pod.total_bytes, 0))
    for engine in pod.supervisors.values():
        pod.handle(engine.said())
    pod.ask("a")
    assert pod.state("a") is S.PENDING
    pod.say_memory()
    pod.ask("a")
    assert pod.state("a") is S.LOADING


def test_model_that_turns_out_larger_than_its_estimate_rests_until_there_is_room():
    pod = Pod(total_bytes=1300 * MIB).start()
    small = EngineSizes({GPU: MIB}, {GPU: MIB}, {GPU: MIB}, is_estimated=True)
    pod.pool.facts.models["b"].sizes = small
    pod.ask("a")
    pod.settle()
    pod.in_flight["a"] = pod.supervisors["a0"].in_flight = 1
    pod.ask("b")
    assert (pod.state("a"), pod.state("b")) == (S.AWAKE, S.LOADING)
    engine = pod.supervisors["b0"]
    engine.state, engine.incarnation, engine.token, engine.count = "resting", "b0.1", 9, 1
    pod.weights.add("b")
    pod.holders["b"] = engine
    pod.handle(engine.said())  # measured: 610 MiB awake, and 178 are free
    assert engine.goal is Tier.WARM
    pod.handle(engine.said())
    assert (pod.state("a"), pod.state("b")) == (S.AWAKE, S.PENDING)
    pod.in_flight["a"] = pod.supervisors["a0"].in_flight = 0
    pod.tick(20_000)
    pod.settle()
    assert (pod.state("a"), pod.state("b")) == (S.WARM, S.AWAKE)


@pytest.mark.parametrize("is_waking", [False, True])
def test_order_to_unload_a_model_that_comes_back_from_a_death_shuts_its_open_door_first(is_waking):
    """As when it yields: its next engine may serve behind the open door before we hear of it."""
    pod = Pod(total_bytes=1300 * MIB).start()
    pod.ask("a")
    pod.settle()
    pod.in_flight["a"] = 1
    engine = pod.supervisors["a0"]
    pod.kill(engine)
    if is_waking:
        engine.state, engine.incarnation = "standby", "a0.2"
        pod.grant("a")
        engine.state = "waking"
        pod.handle(engine.said())
    assert pod.state("a") is (S.WAKING if is_waking else S.LOADING)
    assert isinstance(pod.pool.facts.models["a"].door, ev.OpenDoor)
    pod.all.clear()
    pod.handle(ev.Ordered("a", ev.Order.UNLOAD))
    assert isinstance(pod.doors["a"].door, ev.ShutDoor)
    pod.obey_doors()  # and the gateway still counts a request
    assert not any(isinstance(each, ev.TellEngine) for each in pod.all)
    pod.in_flight["a"] = 0
    pod.obey_doors()
    assert pod.state("a") is S.UNLOADING
    pod.settle()
    assert pod.state("a") is S.COLD


def test_tickets_of_a_model_that_is_being_unloaded_do_not_bring_it_back():
    """Even if the gateway has not obeyed the door yet that refuses them."""
    pod = Pod(total_bytes=1300 * MIB).start()
    pod.ask("a")
    assert pod.state("a") is S.LOADING
    pod.handle(ev.Ordered("a", ev.Order.UNLOAD))
    assert not pod.pool.facts.models["a"].is_wanted
