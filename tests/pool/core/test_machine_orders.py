"""Goal: what operators and neighbours ask for, and what they are refused."""

import pytest

from pool.core import events as ev
from pool.core.facts import OrderRefused
from pool.core.states import ModelState
from tests.pool.core.pod import GPU, MIB, Pod, rules

S = ModelState


def pod_of(**changed):
    return Pod({"a": rules(**changed), "b": rules()}, total_bytes=1300 * MIB).start()


def order(pod, what, *, is_forced=False):
    return pod.handle(ev.Ordered("a", ev.Order(what), is_forced))


def test_load_raises_a_model_and_sleep_sends_it_to_rest_once_nobody_needs_it():
    pod = pod_of()
    order(pod, "load")
    pod.settle()
    assert pod.state("a") is S.AWAKE
    pod.in_flight["a"] = 1
    pod.say_demand()
    order(pod, "sleep")
    assert pod.state("a") is S.AWAKE
    pod.in_flight["a"] = 0
    pod.say_demand()
    assert pod.state("a") is S.DRAINING
    pod.settle()
    assert pod.state("a") is S.WARM


def test_unload_refuses_those_who_wait_and_ends_cold():
    pod = pod_of()
    pod.ask("a")
    pod.settle()
    order(pod, "sleep")
    pod.settle()
    order(pod, "unload")
    assert pod.state("a") is S.UNLOADING
    assert pod.doors["a"].door.code == "pool.not_loaded"
    pod.ask("a")
    pod.settle()
    assert pod.state("a") is S.COLD
    pod.ask("a")  # after that a request loads it again
    pod.settle()
    assert pod.state("a") is S.AWAKE


def test_model_that_is_not_loaded_on_demand_refuses_until_it_is_ordered():
    pod = pod_of(is_on_demand=False)
    pod.ask("a")
    assert pod.state("a") is S.COLD
    assert pod.doors["a"].door.code == "pool.not_loaded"
    order(pod, "load")
    pod.settle()
    assert pod.state("a") is S.AWAKE


def test_pinned_model_neither_sleeps_nor_is_unloaded_unless_forced():
    pod = pod_of()
    order(pod, "load")
    pod.settle()
    order(pod, "pin")
    for what in ("sleep", "unload"):
        with pytest.raises(OrderRefused) as caught:
            order(pod, what)
        assert caught.value.code == "pool.pinned"
    pod.tick(3_600_000)
    assert pod.state("a") is S.AWAKE
    order(pod, "unload", is_forced=True)
    pod.settle()
    assert pod.state("a") is S.COLD


def test_lease_waits_like_a_ticket_and_is_booked_until_it_is_over():
    pod = pod_of()
    pod.ask("a")
    pod.settle()
    pod.tick(20_000)
    asked = ev.LeaseAsked("l1", GPU, 400 * MIB, pod.now_ms)
    pod.handle(asked)
    assert not any(isinstance(each, ev.GrantLease) for each in pod.all)
    pod.settle()
    assert any(isinstance(each, ev.GrantLease) for each in pod.all)
    assert pod.state("a") is S.WARM
    pod.ask("a")
    assert pod.doors["a"].door.code == "pool.no_room"  # nobody makes a neighbour go
    pod.settle()
    assert pod.state("a") is S.WARM
    pod.handle(ev.LeaseOver("l1"))
    pod.ask("a")
    pod.settle()
    assert pod.state("a") is S.AWAKE


def test_lease_waits_for_work_as_a_request_does():
    pod = pod_of()
    pod.ask("a")
    pod.settle()
    pod.in_flight["a"] = pod.supervisors["a0"].in_flight = 1
    pod.settle()
    pod.handle(ev.LeaseAsked("l1", GPU, 400 * MIB, pod.now_ms))
    lease = pod.pool.facts.leases["l1"]
    assert lease.wait.startswith("lease l1 needs")
    assert "a has work" in lease.wait
    pod.tick(20_000)
    assert (lease.wait, lease.victims) == ("a must release memory first", ("a",))


def test_lease_that_cannot_fit_is_refused_and_one_that_is_granted_is_told_again():
    pod = pod_of()
    told = pod.handle(ev.LeaseAsked("big", GPU, 9000 * MIB, 0.0))
    assert [each.lease for each in told if isinstance(each, ev.RefuseLease)] == ["big"]
    asked = ev.LeaseAsked("small", GPU, MIB, 0.0)
    assert ev.GrantLease("small") in pod.handle(asked)
    assert ev.GrantLease("small") in pod.handle(asked)
