"""Goal: a drain loses nothing and ends; what is behind a shut door stays there; a turn is protected
from when its streams have resumed."""

import pytest

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.model import Costs
from pool.core.states import ModelState
from tests.pool.core.pod import MIB, Pod, rules

S = ModelState


def yielding(state=S.DRAINING, **changed):
    """Model a serves two requests, and model b's ticket has made it yield."""
    pod = Pod({"a": rules(**changed), "b": rules()}, total_bytes=1300 * MIB).start()
    pod.ask("a")
    pod.settle()
    pod.in_flight["a"] = pod.supervisors["a0"].in_flight = 2
    pod.obey_goals()
    pod.say_demand()
    pod.tick(15_000)
    pod.ask("b")
    pod.tick(6_000)
    assert (pod.state("a"), pod.state("b")) == (state, S.PENDING)
    return pod


def end_requests(pod, *, gateway=True, engine=True):
    if engine:
        pod.supervisors["a0"].in_flight = 0
        pod.handle(pod.supervisors["a0"].said())
    if gateway:
        pod.in_flight["a"] = 0
        pod.say_demand()


def told_goals(pod, engine):
    return [
        each.goal for each in pod.all if isinstance(each, ev.TellEngine) and each.engine == engine
    ]


@pytest.mark.parametrize("missing", ["gateway", "engine", "door", "connection"])
def test_memory_is_asked_back_only_when_both_count_nothing_behind_a_door_that_is_obeyed(missing):
    pod = yielding()
    if missing != "door":
        pod.obey_doors()
        assert isinstance(pod.doors["a"].door, ev.ShutDoor)
    if missing == "connection":
        end_requests(pod, engine=False)
        pod.handle(ev.GatewayGone("gateway"))
        end_requests(pod, gateway=False)
    else:
        end_requests(pod, gateway=missing != "gateway", engine=missing != "engine")
    assert pod.state("a") is S.DRAINING
    assert told_goals(pod, "a0")[-1] is Tier.AWAKE
    end_requests(pod)
    pod.obey_doors()
    assert pod.state("a") is S.RELEASING
    assert told_goals(pod, "a0")[-1] is Tier.WARM


def test_dead_gateway_has_no_requests_and_one_that_takes_its_place_is_asked():
    pod = yielding()
    pod.handle(ev.Ordered("b", ev.Order.LOAD))
    end_requests(pod, gateway=False)
    pod.handle(ev.GatewayGone("gateway", is_dead=True))
    assert pod.state("a") is S.DRAINING  # nobody is there to say that nothing is sent
    number = pod.doors["a"].number
    pod.handle(ev.DemandCame("gateway-2", {}))
    assert pod.state("a") is S.DRAINING
    pod.handle(ev.DemandCame("gateway-2", {"a": ev.ModelDemand(door=number)}))
    assert pod.state("a") is S.RELEASING


def test_streams_are_parked_then_the_rest_is_cut_then_the_engine_is_killed():
    pod = yielding()
    seen = []
    for ms in (2_000, 28_000, 10_000):
        seen.append(pod.doors["a"].door.running)
        pod.tick(ms)
    assert seen == [ev.Running.FINISH, ev.Running.PARK, ev.Running.CUT]
    assert pod.state("a") is S.UNLOADING
    goals = [each for each in pod.all if isinstance(each, ev.TellEngine) and each.engine == "a0"]
    assert [bool(each.kill) for each in goals] == [*[False] * (len(goals) - 1), True]
    assert goals[-1].goal is Tier.COLD


def test_model_that_is_unloaded_finishes_its_streams_instead_of_parking_them():
    """They would be parked for a turn that does not come."""
    pod = Pod(total_bytes=1300 * MIB).start()
    pod.ask("a")
    pod.settle()
    pod.in_flight["a"] = pod.supervisors["a0"].in_flight = 1
    pod.obey_goals()
    pod.say_demand()
    pod.handle(ev.Ordered("a", ev.Order.UNLOAD))
    pod.tick(29_999)
    assert pod.doors["a"].door.running is ev.Running.FINISH
    pod.tick(1)
    assert pod.doors["a"].door.running is ev.Running.CUT
    end_requests(pod)
    pod.settle()
    assert pod.state("a") is S.COLD


def test_only_what_a_person_orders_must_survive_a_power_cut():
    """A pin is on file although nobody is told anything; decisions are over after a power cut."""
    pod = Pod(total_bytes=1300 * MIB).start()
    ordered = pod.pool.handle(ev.Ordered("a", ev.Order.PIN), pod.now_ms)
    assert ordered[0] == ev.SaveState(is_order=True)
    pod.all.clear()
    pod.ask("a")
    pod.settle()
    saves = [each for each in pod.all if isinstance(each, ev.SaveState)]
    assert set(saves) == {ev.SaveState(is_order=False)}


def test_a_model_is_expected_once_others_make_room_by_what_each_phase_took_before():
    """Not while a turn is waited for, which ends when it does, nor where nothing is measured."""
    pod = yielding(min_runtime_ms=30_000.0, state=S.AWAKE)
    a, b = (pod.pool.facts.models[name] for name in "ab")

    def expected():
        return pod.doors["b"].door.expected_ms

    assert expected() is None
    b.costs = Costs(load_ms=20_000.0, wake_ms=300.0)
    a.costs = Costs(drain_ms=50.0, release_ms=20.0)
    pod.tick(20_000)
    assert pod.state("a") is S.DRAINING
    assert expected() == 50 + 20 + 20_300
    end_requests(pod)
    pod.obey_doors()
    pod.obey_goals()
    pod.answer_questions()
    assert (pod.state("b"), expected()) == (S.LOADING, 20_300)


def test_switch_is_recorded_with_its_phases():
    pod = yielding()
    pod.tick(1_000)
    end_requests(pod)
    pod.settle()
    switch = [each for each in pod.all if isinstance(each, ev.Switched)][-1]
    assert (switch.model, switch.victims, switch.drain_ms) == ("b", ("a",), 1_000)
    assert switch.wait_ms == 7_000


def test_idle_model_rests_after_its_keep_alive_and_comes_back_at_once_if_it_is_asked_for():
    pod = Pod({"a": rules(keep_alive_ms=30_000.0)}, total_bytes=1300 * MIB).start()
    pod.ask("a")
    pod.settle()
    pod.tick(30_000)
    assert pod.state("a") is S.DRAINING
    pod.ask("a")
    assert pod.state("a") is S.AWAKE
    pod.settle()
    pod.tick(60_000)
    pod.settle()
    assert pod.state("a") is S.WARM


def awake_for_parked_streams():
    pod = Pod(total_bytes=1300 * MIB).start()
    pod.ask("a", kind=ev.TicketKind.PARKED)
    for _ in range(3):
        pod.obey_goals()
    assert pod.state("a") is S.AWAKE
    return pod


def resuming(pod, *, parked=0, count=0):
    """`a` is awake; so many of its streams wait for their next token."""
    tickets = tuple(ev.Ticket(n + 1, pod.now_ms, kind=ev.TicketKind.PARKED) for n in range(parked))
    demand = ev.ModelDemand(tickets, in_flight=3, resuming=count, door=pod.obeyed["a"])
    waits = ev.ModelDemand((ev.Ticket(9, pod.now_ms - 60_000.0),))
    pod.handle(ev.DemandCame("gateway", {"a": demand, "b": waits}))


def test_protection_of_a_turn_counts_from_when_its_streams_have_resumed():
    """Goal: no model only ever replays its streams. Method: a replay that takes longer than the
    protection, while an older ticket waits."""
    pod = awake_for_parked_streams()
    resuming(pod, parked=3)
    pod.tick(12_000)  # above `min_runtime`
    resuming(pod, count=3)
    pod.tick(12_000)
    assert pod.state("a") is S.AWAKE
    resuming(pod)
    known = pod.pool.facts.models["a"]
    assert known.costs.resume_ms == 24_000.0
    pod.tick(23_999)  # the protection is at least what the switch has cost
    assert pod.state("a") is S.AWAKE
    pod.tick(1)
    assert pod.state("a") is S.DRAINING


def test_streams_that_never_resume_do_not_keep_the_device():
    pod = awake_for_parked_streams()
    resuming(pod, count=3)
    due_ms = pod.pool.facts.models["a"].raise_due_ms
    pod.tick(due_ms - pod.now_ms)
    assert pod.state("a") is S.AWAKE
    pod.tick(due_ms + 100_000.0 - pod.now_ms)
    for _ in range(3):
        pod.tick(max(0.0, pod.pool.due_ms - pod.now_ms))
    assert pod.state("a") is S.DRAINING


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
