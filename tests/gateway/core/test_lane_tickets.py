"""Requests that wait for a model of a pool: their order, limits and deadlines, and what the pool is
told of them."""

from __future__ import annotations

import json

import pytest

from gateway.core import events as ev
from gateway.core.events import LaneDoorSet, LaneRules
from gateway.core.lanes import Lanes
from plumbing.gateway_protocol import Continuation
from pool.core.events import Running, ShutDoor
from pool.core.states import PooledRules
from tests.gateway.core.lanes_pod import FINISH, PARK, LanesPod, error, refused, switching

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
        pod.handle(LaneDoorSet(name, model.number, model.door, rules))
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
        (LaneRules(priority=4), -1000, 4),
        (LaneRules(priority=4), 0, 4),
        (LaneRules(priority=4), None, 4),
        (LaneRules(priority=4), 9, 9),
        (LaneRules(priority=4, client_priority=-3), -1000, -3),
        (LaneRules(priority=4, client_priority=-3), -2, -2),
        (LaneRules(priority=4, client_priority=-3), None, 4),
        (LaneRules(priority=4, client_priority=8), 0, 4),
    ],
)
def test_a_client_makes_its_request_as_urgent_as_the_pool_file_allows(rules, wanted, found):
    pod = switching(lane_rules=rules)
    pod.ask(model="b", priority=wanted)
    assert [ticket.priority for ticket in pod.demand("b").tickets] == [found]


def test_an_operator_changes_what_clients_may_name_while_the_gateway_runs():
    pod = switching(lane_rules=LaneRules())
    rules = PooledRules(
        priority=0, keep_alive_ms=5.0, starve_after_ms=7.0, max_in_flight=2, client_priority=-9
    )
    model = pod.models["b"]
    pod.ask(model="b", priority=-20)
    pod.handle(LaneDoorSet("b", model.number, model.door, rules))
    pod.ask(model="b", priority=-20)
    assert [ticket.priority for ticket in pod.demand("b").tickets] == [0, -9]


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


@pytest.mark.parametrize("wait_ms", [20_000.0, float("inf")])
def test_a_request_whose_deadline_has_passed_is_refused(wait_ms):
    pod = switching(lane_rules=LaneRules(wait_ms=60_000.0))
    client = pod.ask(model="b", wait_ms=wait_ms)
    limit_ms = min(wait_ms, 60_000.0)
    (ticket,) = pod.demand("b").tickets
    assert ticket.deadline_ms == limit_ms
    pod.run(limit_ms - 1.0)
    assert client.outcome == ""
    pod.run(limit_ms + 50.0)
    assert (error(pod, client), client.status) == ("pool.not_awake", 503)


def test_a_request_that_cannot_be_in_time_is_refused_at_once():
    pod = switching()
    pod.set_door("b", ShutDoor(Running.FINISH, 30_000.0, "it is loaded"))
    assert error(pod, pod.ask(model="b", wait_ms=20_000.0)) == "pool.not_awake"
    late = pod.ask(model="b", wait_ms=40_000.0)
    assert late.outcome == ""
    pod.run(5_000.0)
    pod.set_door("b", ShutDoor(Running.FINISH, 60_000.0, "it is loaded again"))
    assert error(pod, late) == "pool.not_awake"


def test_retry_after_is_from_the_expected_time():
    lanes = Lanes(ev.GatewayRules(), {"a": LaneRules()})
    lanes.handle(LaneDoorSet("a", 1, ShutDoor(Running.FINISH, 12_300.0, "it is loaded")), 0.0)
    came = ev.RequestCame(1, "/v1/completions", 5, True, False, "a", wait_ms=1_000.0)
    (found,) = [e for e in lanes.handle(came, 300.0) if isinstance(e, ev.AnswerError)]
    assert found.retry_after_s == 12
    assert "it is loaded" in json.loads(found.body)["error"]["message"]


@pytest.mark.parametrize(
    ("code", "retry", "status"),
    [("pool.failed", None, 503), ("pool.no_room", 5, 503), ("model_not_found", None, 404)],
)
def test_a_refused_door_refuses_those_that_wait_too(code, retry, status):
    pod = switching()
    waiting = pod.ask(model="b")
    pod.set_door("b", refused(code, retry))
    for client in (waiting, pod.ask(model="b")):
        assert (error(pod, client), client.status) == (code, status)


def test_a_client_that_leaves_takes_its_ticket_along():
    pod = switching()
    client = pod.ask(model="b")
    pod.leave(client)
    assert pod.demand("b").tickets == ()
    pod.switch("a", "b")
    pod.run()
    assert client.asked == []


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
    assert pod.gateway.census(pod.now_ms).memory_bytes == 0


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


def test_the_parent_is_told_of_each_change_that_matters_and_of_no_other():
    pod = switching()
    pod.run()
    told = []
    pod.on_demand = lambda: told.append(pod.demand())
    for _ in range(3):
        pod.ask(max_tokens=10, model="a")
    pod.run()
    assert [bool(each.in_flight) for each in told] == [True, False]
    told.clear()
    pod.set_door("a", FINISH)
    pod.run()
    assert [each.door for each in told] == [pod.models["a"].number]
    told.clear()
    pod.ask(model="a")
    pod.run(pod.now_ms + 10.0)
    pod.ask(model="a")
    pod.run(pod.now_ms + 10.0)
    assert [len(each.tickets) for each in told] == [1, 2]


def test_what_is_about_an_unknown_model_is_ignored():
    lanes = Lanes(ev.GatewayRules(), {"a": LaneRules()})
    assert lanes.handle(ev.EngineGranted("e", 1, "era", "other"), 0.0) == []
    assert lanes.handle(LaneDoorSet("other", 1, FINISH), 0.0) == []
