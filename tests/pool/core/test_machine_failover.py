"""Goal: deaths. Failover asks nobody; what fails again and again is given up, and says so."""

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.model import FAULTS_MAX
from pool.core.states import ModelState
from tests.pool.core.pod import MIB, Pod, rules

S = ModelState


def awake(engines=2, **changed):
    pod = Pod({"a": rules(**changed), "b": rules()}, engines=engines, total_bytes=1500 * MIB)
    pod.start().ask("a")
    pod.settle()
    pod.tick(20_000)
    pod.settle()
    assert pod.state("a") is S.AWAKE
    pod.all.clear()
    return pod


def faults(pod):
    return pod.pool.facts.models["a"].faults_ms


def test_living_shadow_that_is_never_granted_is_not_waited_for_for_ever():
    pod = awake()
    pod.kill(pod.supervisors["a0"])
    assert pod.state("a") is S.AWAKE  # the lock server will name the shadow
    assert pod.pool.due_ms <= pod.now_ms + 60_000
    pod.tick(60_000)
    assert pod.state("a") is S.LOADING


def crash(pod, fault="out of memory", *, is_permanent=False):
    """The engine is launched and dies."""
    engine = pod.supervisors["a0"]
    engine.count += 1
    engine.state, engine.incarnation = "init", f"a0.{engine.count}"
    pod.handle(engine.said())
    gone = engine.incarnation
    engine.state, engine.incarnation = "dead", ""
    pod.handle(engine.said(fault=fault, is_permanent=is_permanent))
    pod.handle(ev.EngineDead("a0", gone))


def test_three_faults_in_ten_minutes_are_a_failure_until_somebody_resets_it():
    pod = Pod({"a": rules()}, total_bytes=1500 * MIB).start()
    pod.ask("a")
    for _ in range(3):
        assert pod.state("a") is S.LOADING
        crash(pod)
        pod.tick(1000)
    assert pod.state("a") is S.UNLOADING
    pod.settle()
    assert pod.state("a") is S.FAILED
    door = pod.doors["a"].door
    assert (door.code, door.retry_after_s) == ("pool.failed", 60)
    assert "out of memory" in door.sentence
    pod.ask("a")
    assert pod.state("a") is S.FAILED
    pod.handle(ev.Ordered("a", ev.Order.RESET))
    assert pod.state("a") is S.LOADING
    pod.settle()
    assert pod.state("a") is S.AWAKE


def test_engine_that_was_told_to_stop_is_no_fault_of_its_model():
    """Stopped and started again more often than a model may fail; both orders in which the pool may
    hear of the end and of the next supervisor."""
    pod = awake(engines=1)
    engine = pod.supervisors["a0"]
    for is_heard_first in (False, True) * FAULTS_MAX:
        pod.handle(engine.said(is_leaving=True))
        gone = engine.incarnation
        if is_heard_first:
            engine.state, engine.incarnation, engine.token = "dead", "", 0
            pod.handle(engine.said())
        pod.kill(engine)
        pod.handle(ev.EngineDead("a0", gone))
        assert pod.state("a") is S.LOADING
        assert not faults(pod)
        pod.settle()
        pod.ask("a")
        pod.settle()
        assert pod.state("a") is S.AWAKE
    pod.kill(engine)
    assert len(faults(pod)) == 1


def test_permanent_fault_is_not_tried_again():
    pod = Pod({"a": rules()}, total_bytes=1500 * MIB).start()
    pod.ask("a")
    crash(pod, "no such directory", is_permanent=True)
    pod.settle()
    assert pod.state("a") is S.FAILED
    assert pod.doors["a"].door.retry_after_s is None


def test_budget_of_a_wake_is_twice_what_was_measured_and_at_least_a_minute():
    pod = awake(engines=1)
    pod.handle(ev.Ordered("a", ev.Order.SLEEP))
    pod.settle()
    pod.ask("a")
    pod.supervisors["a0"].state = "waking"
    pod.handle(pod.supervisors["a0"].said(tier=Tier.WARM))
    pod.tick(59_000)
    assert pod.state("a") is S.WAKING
    pod.tick(1_000)
    assert pod.state("a") is S.UNLOADING
