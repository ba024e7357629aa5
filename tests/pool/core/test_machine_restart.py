"""Goal: the pool dies at any step and goes on: nothing restarts, nothing is counted free.

Method: a second machine from the first one's snapshot, as its file has it.
"""

import msgspec

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.reconcile import ModelPool
from pool.core.saved import PoolSnapshot
from pool.core.states import GoalGeneration, ModelState
from tests.pool.core.pod import MIB, Pod

S = ModelState


def restart(pod):
    """The same neighbours, and a pool that starts from the file."""
    raw = msgspec.json.encode(pod.pool.snapshot())
    snapshot = msgspec.json.decode(raw, type=PoolSnapshot)
    pod.pool = ModelPool(pod.setup, pod.now_ms, "another era", snapshot)
    pod.all.clear()
    return pod


def hear_all(pod):
    pod.say_memory()
    for engine in pod.supervisors.values():
        pod.handle(engine.said())
    pod.say_demand()


def served():
    pod = Pod(engines=2, total_bytes=1500 * MIB).start()
    pod.ask("a")
    pod.settle()
    pod.tick(20_000)
    pod.settle()
    return pod


def test_nothing_changes_for_engines_and_clients_when_all_have_been_heard():
    pod = restart(served())
    hear_all(pod)
    assert pod.state("a") is S.AWAKE
    assert not pod.pool.facts.models["a"].is_recovering
    told = [each for each in pod.all if isinstance(each, ev.TellEngine)]
    assert [each.generation.start for each in told] == [1] * 4
    assert {each.name: each.state for each in pod.supervisors.values()}["a0"] == "active"


def test_turn_of_a_model_that_wakes_in_a_recovery_begins_with_its_open_door():
    """Else the time in which its requests still waited would be taken from its protection."""
    pod = Pod(engines=2, total_bytes=1500 * MIB).start()
    pod.ask("a")
    restart(pod)
    pod.say_memory()
    pod.obey_goal(pod.supervisors["a0"])
    model = pod.pool.facts.models["a"]
    assert (model.state, model.is_recovering, model.turn_since_ms) == (S.AWAKE, True, None)
    pod.now_ms += 5_000
    for engine in pod.supervisors.values():
        pod.handle(engine.said())
    assert (model.is_recovering, model.turn_since_ms) == (False, pod.now_ms)


def test_turn_ends_however_often_the_pool_is_restarted_in_it():
    """And parked streams count from the drain, as they did: else their model had a second turn."""
    pod = Pod(total_bytes=1300 * MIB).start()
    pod.ask("a")
    pod.settle()
    pod.in_flight["a"] = pod.supervisors["a0"].in_flight = 1
    pod.ask("b")
    for _ in range(5):
        assert pod.state("a") is S.AWAKE
        pod.tick(2_000)  # a fifth of `min_runtime`
        hear_all(restart(pod))
    assert pod.state("a") is S.DRAINING
    known = pod.pool.facts.models["a"]
    began_ms, park_ms = known.drained_ms, known.rules.park_ms
    assert known.running is ev.Running.FINISH
    for _ in range(2):
        pod.tick(park_ms / 2)
        hear_all(restart(pod))
    known = pod.pool.facts.models["a"]
    assert (known.drained_ms, known.running) == (began_ms, ev.Running.PARK)


def test_lost_file_adopts_what_lives_and_restarts_nothing():
    pod = served()
    pod.in_flight["a"] = 1
    pod.pool = ModelPool(pod.setup, pod.now_ms, "a new era")
    pod.all.clear()
    pod.say_memory()
    pod.ask("b")
    pod.handle(pod.supervisors["a0"].said())
    pod.handle(pod.supervisors["b0"].said())
    pod.handle(pod.supervisors["b1"].said())
    assert not any(isinstance(each, ev.TellEngine) and each.engine[0] == "a" for each in pod.all)
    assert pod.state("b") is S.PENDING  # an engine of a is not heard: nobody knows what it holds
    pod.handle(pod.supervisors["a1"].said())
    assert pod.state("a") is S.AWAKE
    told = {each.engine: each.goal for each in pod.all if isinstance(each, ev.TellEngine)}
    assert told["a0"] is told["a1"] is Tier.AWAKE
    held = pod.pool.facts.ledger.booked(pod.pool.facts.models["a"])
    assert sum(held.values()) == 620 * MIB


def test_memory_is_not_free_while_an_engine_may_obey_a_goal_of_a_lost_file():
    """It stands by, and the pool whose file is lost has told it to be awake."""
    pod = Pod(total_bytes=1300 * MIB).start()
    pod.ask("a")
    pod.settle()
    engine = pod.supervisors["a0"]
    engine.state = "standby"
    pod.kv.clear()
    pod.weights.discard("b")
    pod.pool = ModelPool(pod.setup, pod.now_ms, "a new era")
    pod.say_memory()
    pod.ask("b")
    pod.handle(pod.supervisors["b0"].said())
    pod.obey_goal(pod.supervisors["b0"])
    pod.answer_questions()
    pod.handle(engine.said())
    assert (pod.state("a"), pod.state("b")) == (S.WARM, S.PENDING)
    pod.settle()
    assert (pod.state("a"), pod.state("b")) == (S.WARM, S.AWAKE)


def test_shadow_that_is_dead_when_the_file_is_lost_starts_again():
    """Else the model had no standby until it was cold once."""
    pod = served()
    pod.kill(pod.supervisors["a1"])
    pod.pool = ModelPool(pod.setup, pod.now_ms, "a new era")
    hear_all(pod)
    pod.settle()
    assert [pod.supervisors[name].state for name in ("a0", "a1")] == ["active", "standby"]
    held = pod.pool.facts.ledger.booked(pod.pool.facts.models["a"])
    assert sum(held.values()) == 620 * MIB


def test_pins_costs_and_faults_are_on_file():
    pod = served()
    pod.handle(ev.Ordered("a", ev.Order.PIN))
    before = pod.pool.facts.models["a"]
    before.faults_ms, before.costs.wake_ms = (pod.now_ms,), 123.0
    known = restart(pod).pool.facts.models["a"]
    assert (known.is_pinned, known.faults_ms, known.costs.wake_ms) == (
        True,
        (pod.now_ms,),
        123.0,
    )


def test_goal_that_is_newer_than_the_file_is_followed_by_a_newer_one():
    """The file was put back to an older state, by a disk or by hand."""
    pod = served()
    seen = GoalGeneration("e0", 7, 40)
    pod.supervisors["a0"].seen = seen
    restart(pod)
    hear_all(pod)
    told = [each for each in pod.all if isinstance(each, ev.TellEngine) and each.engine == "a0"]
    assert told[-1].goal is Tier.AWAKE
    assert seen.is_older(told[-1].generation)
