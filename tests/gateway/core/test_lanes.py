"""Requests for the models of a pool: doors and turns."""

from __future__ import annotations

from unittest import mock

import pytest
from msgspec.structs import replace

from gateway.core import events as ev
from gateway.core.events import DoorSet, GatewayRules, LaneRules
from gateway.core.lanes import TICKETS_MAX, Lane, Lanes, first_of
from plumbing.gateway_protocol import HANDED_OVER, Continuation
from pool.core.events import ModelDemand, OpenDoor, Running, ShutDoor, Ticket, TicketKind
from pool.core.states import PooledRules
from pool.messages import CATALOGUE, FRAME_BYTES_MAX, DemandMsg
from tests.gateway.core.lanes_pod import FINISH, PARK, LanesPod, error, refused, switching

# ------------------------------------------------------------------ turns


def test_streams_are_parked_and_go_on_in_the_next_turn():
    pod = switching()
    streams = [pod.ask(max_tokens=300, model="a") for _ in range(3)]
    pod.at(100.0, lambda: pod.switch("a", "b"))
    pod.run(1_000.0)
    assert [ticket.kind for ticket in pod.demand().tickets] == [TicketKind.PARKED] * 3
    since_ms = pod.demand().tickets[0].since_ms
    assert 140.0 <= since_ms <= 200.0  # the drain's, not the arrival's
    assert not pod.models["a"].is_awake
    later = pod.ask(model="a")
    pod.switch("b", "a")
    pod.run()
    for client in [*streams, later]:
        client.check_whole()
    resumed = [client.asked[1][0] for client in streams]
    assert max(resumed) <= later.asked[0][0]
    causes = {each.cause for each in pod.records if isinstance(each, ev.StreamPaused)}
    assert causes == {ev.BreakCause.YIELDED}


def test_the_pool_is_told_when_the_last_parked_stream_has_its_next_token():
    """Goal: a turn counts from then. Method: what the gateway says from the turn's begin on."""
    pod = switching()
    streams = [pod.ask(max_tokens=200, model="a") for _ in range(3)]
    pod.at(100.0, lambda: pod.switch("a", "b"))
    pod.run(1_000.0)
    told = []

    def listen():
        demand = pod.demand()
        parked = sum(each.kind is TicketKind.PARKED for each in demand.tickets)
        told.append(demand.resuming + parked)

    pod.on_demand = listen
    pod.switch("b", "a")
    pod.run()
    assert told[0] == 3
    assert told[-1] == 0
    assert sorted(told, reverse=True) == told
    for each in streams:
        each.check_whole()


def test_a_parked_stream_waits_for_room_that_a_lease_has_and_a_new_request_does_not():
    pod = switching()
    parked = pod.ask(max_tokens=60, model="a")
    pod.at(50.0, lambda: pod.set_door("a", PARK))
    pod.run(100.0)
    pod.set_door("a", refused("pool.no_room", 60))
    assert error(pod, pod.ask(model="a")) == "pool.no_room"
    assert [each.kind for each in pod.demand("a").tickets] == [TicketKind.PARKED]
    pod.set_door("a", OpenDoor("a-1", 1))
    pod.run()
    parked.check_whole()


def test_a_stream_that_begins_behind_the_door_is_parked_at_once():
    """Its engine was computing the prompt when streams were parked, for the second time."""
    pod = switching()
    client = pod.ask(model="a")
    pod.run(1.5)
    for _ in range(2):
        assert pod.demand().in_flight == 1
        pod.set_door("a", PARK)
        assert pod.demand().in_flight == len(client.asked) - 1
        if len(client.asked) == 1:
            pod.set_door("a", OpenDoor("a-1", 1))
            pod.run(1.5)
    pod.run(10.0)
    assert pod.demand().in_flight == 0
    assert pod.demand().tickets[0].kind is TicketKind.PARKED
    pod.set_door("a", OpenDoor("a-1", 1))
    pod.run()
    client.check_whole()


def test_what_cannot_yield_is_cut_at_last():
    pod = switching()
    pod.continuation = Continuation.NONE
    relayed = pod.ask("/other", model="a", is_stream=False)
    again = pod.ask(max_tokens=200, model="a", is_stream=False)
    pod.at(50.0, lambda: pod.switch("a", "b", park_ms=10.0, cut_ms=30.0))
    pod.run(500.0)
    assert (relayed.outcome, relayed.ending.code) == ("aborted", "pool.cut")
    assert [each.kind for each in pod.demand().tickets] == [TicketKind.AGAIN]
    pod.switch("b", "a")
    pod.at(50.0, lambda: pod.switch("a", "b", park_ms=10.0, cut_ms=30.0))
    pod.run(900.0)
    assert error(pod, again) == "pool.cut"
    assert pod.models["b"].is_awake


def test_a_failover_needs_no_pool():
    """A newer grant replaces the engine of an open door, and streams go on there."""
    pod = switching()
    client = pod.ask(max_tokens=40, model="a")
    pod.at(100.0, lambda: pod.die("a"))
    pod.run()
    client.check_whole()
    assert [each[1] for each in client.asked] == ["a-1", "a-2"]


# ------------------------------------------------------------------ without a pool


def test_without_a_pool_the_door_of_an_engine_that_answers_is_open():
    pod = LanesPod()
    pod.stand("a", is_awake=True)
    pod.stand("b")
    here, there = pod.ask(model="a"), pod.ask(model="b")
    pod.run(500.0)
    here.check_whole()
    assert there.asked == []
    pod.models["b"].is_awake = True  # somebody has woken it
    pod.run(5_000.0)
    there.check_whole()


def test_the_pools_word_is_enough_where_the_lock_server_is_not_heard():
    pod = LanesPod()
    pod.models["a"].token, pod.models["a"].is_awake = 3, True
    pod.set_door("a", OpenDoor("a-3", 3))
    client = pod.ask(model="a")
    pod.run()
    client.check_whole()


# ------------------------------------------------------------------ order, limits, deadlines


def test_in_flight_is_limited_and_the_rest_waits_in_order():
    rules = LaneRules(max_in_flight=2, starve_after_ms=1_000.0, client_priority=-1)
    pod = switching(lane_rules=rules)
    clients = [
        pod.ask(model="a", is_stream=False, priority=priority) for priority in (0, 0, 5, 0, -1)
    ]
    assert pod.demand().in_flight == 0  # not greeted yet
    pod.run(10.0)
    assert pod.demand().in_flight == 2
    pod.run()
    assert len(clients) == 5
    assert [client.number for client, _ in pod.asks] == [5, 1, 2, 4, 3]


def test_settings_that_an_operator_changes_count_for_requests_that_name_none():
    """Method: the same door again, with other settings: nothing else changes."""
    pod = switching(lane_rules=LaneRules(max_in_flight=1, priority=4))
    pod.run(10.0)
    first, second = pod.ask(max_tokens=60, model="a"), pod.ask(max_tokens=60, model="a")
    pod.ask(model="b"), pod.ask(model="b", priority=6)
    assert [ticket.priority for ticket in pod.demand("b").tickets] == [4, 6]
    assert (pod.demand().in_flight, len(pod.demand().tickets)) == (1, 1)
    for name in ("a", "b"):
        model = pod.models[name]
        rules = PooledRules(priority=-2, keep_alive_ms=5.0, starve_after_ms=7.0, max_in_flight=2)
        pod.handle(DoorSet(name, model.number, model.door, rules))
    assert (pod.demand().in_flight, len(pod.demand().tickets)) == (2, 0)
    pod.ask(model="b")
    assert [ticket.priority for ticket in pod.demand("b").tickets] == [4, 6, -2]
    changed = pod.gateway.by_model["b"].lane_rules
    assert (changed.keep_alive_ms, changed.starve_after_ms) == (5.0, 7.0)
    pod.run(5_000.0)
    first.check_whole()
    second.check_whole()


@pytest.mark.parametrize(
    ("rules", "wanted", "found"),
    [
        (LaneRules(priority=4), 0, 4),
        (LaneRules(priority=4), None, 4),
        (LaneRules(priority=4), 9, 9),
        (LaneRules(priority=4, client_priority=-3), -1000, -3),
        (LaneRules(priority=4, client_priority=8), 0, 4),
    ],
)
def test_a_client_makes_its_request_as_urgent_as_the_pool_file_allows(rules, wanted, found):
    pod = switching(lane_rules=rules)
    pod.ask(model="b", priority=wanted)
    assert [ticket.priority for ticket in pod.demand("b").tickets] == [found]


def test_a_request_that_is_much_older_is_sooner_than_one_of_better_priority():
    pod = switching(lane_rules=LaneRules(max_in_flight=1, starve_after_ms=100.0))
    pod.ask(max_tokens=60, model="a", is_stream=False)  # 300 ms
    pod.run(5.0)
    old = pod.ask(max_tokens=2, model="a", is_stream=False, priority=1)
    pod.run(150.0)
    new = pod.ask(max_tokens=2, model="a", is_stream=False)
    pod.run()
    assert old.asked[0][0] < new.asked[0][0]


def test_a_full_queue_refuses_and_parked_streams_do_not_fill_it():
    pod = switching(lane_rules=LaneRules(queue_max=2), queue_max=3)
    for _ in range(4):
        pod.ask(max_tokens=60, model="a")
    pod.at(50.0, lambda: pod.set_door("a", PARK))
    pod.run(100.0)
    of_a = [pod.ask(model="a") for _ in range(3)]
    of_b = [pod.ask(model="b") for _ in range(2)]
    assert [each.outcome for each in (*of_a, *of_b)] == ["", "", "error", "", "error"]
    assert (error(pod, of_a[2]), of_a[2].status) == ("pool.queue_full", 429)
    assert error(pod, of_b[1]) == "pool.queue_full"
    pod.leave(of_a[0])
    assert pod.ask(model="b").outcome == ""


def test_a_request_whose_deadline_has_passed_is_refused():
    pod = switching(lane_rules=LaneRules(wait_ms=60_000.0))
    client = pod.ask(model="b")
    pod.run(60_000.0 - 1.0)
    assert client.outcome == ""
    pod.run(60_000.0 + 50.0)
    assert (error(pod, client), client.status) == ("pool.not_awake", 503)


def test_a_request_that_cannot_be_in_time_is_refused_at_once():
    pod = switching(lane_rules=LaneRules(wait_ms=40_000.0))
    pod.set_door("b", ShutDoor(Running.FINISH, 50_000.0, "it is loaded"))
    assert error(pod, pod.ask(model="b")) == "pool.not_awake"
    pod.set_door("b", ShutDoor(Running.FINISH, 30_000.0, "it is loaded"))
    late = pod.ask(model="b")
    assert late.outcome == ""
    pod.run(5_000.0)
    pod.set_door("b", ShutDoor(Running.FINISH, 60_000.0, "it is loaded again"))
    assert error(pod, late) == "pool.not_awake"


def test_retry_after_is_from_the_expected_time():
    lanes = Lanes(ev.GatewayRules(), {"a": LaneRules(wait_ms=1_000.0)})
    lanes.handle(DoorSet("a", 1, ShutDoor(Running.FINISH, 12_300.0, "it is loaded")), 0.0)
    came = ev.RequestCame(1, "/v1/completions", 5, True, False, "a")
    (found,) = [e.why for e in lanes.handle(came, 300.0) if isinstance(e, ev.RequestEnded)]
    assert found.retry_after_s == 12
    assert "it is loaded" in found.message


def test_all_lanes_share_one_memory():
    rules = ev.GatewayRules(memory_bytes_max=20_000)
    pod = LanesPod(1, rules=rules)
    for name in ("a", "b"):
        pod.awake(name)
    pod.run(2.0)
    first = pod.ask(model="a", body_bytes=12_000)
    second = pod.ask(model="b", body_bytes=12_000)
    pod.run()
    assert (first.head, second.head) == (Continuation.EXACT, Continuation.NONE)
    assert pod.gateway.shared.memory_bytes == 0


# ------------------------------------------------------------------ what the pool is told


def test_keep_alive_is_the_longest_of_those_that_are_here_together():
    lanes = Lanes(ev.GatewayRules(), {"a": LaneRules(keep_alive_ms=5_000.0)})

    def come(number: int, keep_ms: float | None) -> float | None:
        path = "/v1/completions"
        lanes.handle(
            ev.RequestCame(number, path, 5, True, False, "a", keep_alive_ms=keep_ms), number
        )
        return lanes.demand(number)["a"].keep_alive_ms

    assert [come(1, 0.0), come(2, None), come(3, 1_000.0)] == [0.0, None, None]
    assert come(4, float("inf")) == float("inf")
    for number in (1, 2, 3, 4):
        lanes.handle(ev.ClientLeft(number, "a"), 10.0)
    assert come(5, 7.0) == 7.0


def test_the_last_request_is_when_it_ended():
    pod = switching()
    assert pod.demand().last_request_ms is None
    pod.on_demand = lambda: pod.gateway.demand(pod.now_ms)
    pod.ask(max_tokens=20, model="a", is_stream=False)
    pod.run()
    assert pod.demand().last_request_ms == pytest.approx(102.0, abs=2.0)


def test_what_is_about_an_unknown_model_is_ignored():
    lanes = Lanes(ev.GatewayRules(), {"a": LaneRules()})
    assert lanes.handle(ev.EngineGranted("e", 1, "era", "other"), 0.0) == []
    assert lanes.handle(DoorSet("other", 1, FINISH), 0.0) == []


def test_what_one_message_cannot_carry_is_the_last_in_order():
    tickets = [Ticket(number, 1_000.0 - number) for number in range(1, TICKETS_MAX + 10)]
    tickets.append(Ticket(TICKETS_MAX + 10, 2_000.0, priority=-1))
    found = [each.id for each in first_of(tuple(tickets), TICKETS_MAX)]
    assert found == list(range(11, TICKETS_MAX + 11))


def test_all_tickets_together_fit_into_one_message():
    """Goal: thousands of parked streams of many models are no message that cannot be sent."""
    models = {f"a-model-of-a-longer-name{number}": LaneRules() for number in range(100)}
    lanes = Lanes(GatewayRules(), models)
    many = tuple(Ticket(number, 1e9, 5, TicketKind.PARKED) for number in range(1, 400))
    whole = ModelDemand(many, 500, 500, 1e9, 1e9, 2**40)
    with mock.patch.object(Lane, "demand", return_value=whole):
        demand = lanes.demand(0.0)
    assert len(CATALOGUE.encode(DemandMsg("0" * 16, demand))) < FRAME_BYTES_MAX
    assert {len(each.tickets) for each in demand.values()} == {20}


# ------------------------------------------------------------------ requests of a front


def of_front(number: int, continuation_id: str = "") -> ev.RequestCame:
    passing = continuation_id
    return ev.RequestCame(number, "/v1/completions", 10, True, True, "a", passing=passing)


def test_front_stream_of_a_model_that_yields_is_handed_over():
    """Goal: a yield is no break for the front. Method: a stream that passes through the pod."""
    pod = switching()
    pod.run(100.0)
    lanes, engine = pod.gateway, pod.models["a"]
    effects = lanes.handle(of_front(90), 100.0)
    (sent,) = [each for each in effects if isinstance(each, ev.SendRequest)]
    signed = engine.engine, engine.token, Continuation.EXACT, True
    lanes.handle(ev.HeadCame(sent.attempt, 200, *signed), 100.0)
    lanes.attempt(sent.attempt).hold(10)
    assert any(isinstance(each, ev.SendHead) for each in lanes.shared.take())
    effects = lanes.handle(DoorSet("a", 6, PARK), 101.0)
    (aborted,) = [each for each in effects if isinstance(each, ev.RequestEnded)]
    assert aborted.event.endswith(b"\n\n" + HANDED_OVER)


def test_front_resume_waits_for_its_models_turn_as_a_parked_stream():
    lanes = switching(queue_max=0).gateway
    lanes.handle(DoorSet("a", 5, PARK), 0.0)
    effects = lanes.handle(of_front(1, "one"), 0.0)
    assert not any(isinstance(each, ev.RequestEnded) for each in effects)
    (ticket,) = lanes.demand(0.0)["a"].tickets
    assert ticket.kind is TicketKind.PARKED


def test_front_resume_is_under_way_until_it_has_a_new_token():
    """Goal: a turn in which a journal only plays is not over before the stream has a new token.
    Method: a journal of three tokens."""
    pod = switching()
    pod.run(100.0)
    lanes, engine = pod.gateway, pod.models["a"]
    effects = lanes.handle(replace(of_front(90, "c" * 16), journal_tokens=3), 100.0)
    (sent,) = [each for each in effects if isinstance(each, ev.SendRequest)]
    attempt, found = lanes.attempt(sent.attempt), []
    signed = engine.engine, engine.token, Continuation.EXACT, True
    lanes.handle(ev.HeadCame(sent.attempt, 200, *signed), 100.0)
    attempt.hold(10)
    lanes.shared.take()
    for tokens in (0, 3, 1):
        attempt.played(tokens)
        found.append(lanes.demand(100.0)["a"].resuming)
    assert found == [1, 1, 0]
