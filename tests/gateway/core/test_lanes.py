"""Requests for the models of a pool: doors and turns."""

from __future__ import annotations

import pytest

from gateway.core import events as ev
from plumbing.gateway_protocol import Continuation
from pool.core.events import OpenDoor, TicketKind
from tests.gateway.core.lanes_pod import CUT, FINISH, PARK, LanesPod, error, refused, switching

# ------------------------------------------------------------------ turns


def test_a_request_waits_for_its_model_and_no_other():
    pod = switching()
    here, there = pod.ask(model="a"), pod.ask(model="b")
    pod.run(400.0)
    here.check_whole()
    assert there.asked == []
    (ticket,) = pod.demand("b").tickets
    assert (ticket.id, ticket.kind, ticket.since_ms) == (2, TicketKind.NEW, 0.0)
    pod.switch("a", "b")
    pod.run()
    there.check_whole()
    assert pod.demand("b").tickets == ()


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


def test_a_parked_stream_goes_on_after_any_number_of_turns():
    """Goal: yielding is neither a death nor a break. Method: ten turns of one stream, more than
    breaks are borne, and its engine dies at rest three times."""
    pod = switching(step_ms=1.0)
    client = pod.ask(max_tokens=1500, model="a")
    for turn in range(10):
        pod.at(50.0 + 400.0 * turn, lambda: pod.switch("a", "b", park_ms=1.0))
        if turn % 3 == 0:
            pod.at(150.0 + 400.0 * turn, lambda: pod.die("a"))
        pod.at(250.0 + 400.0 * turn, lambda: pod.switch("b", "a", park_ms=1.0))
    pod.run()
    client.check_whole()
    assert client.ending.pauses >= 4
    assert pod.gateway.totals.suspects == 0


def test_an_unanswered_request_waits_again_once_and_then_for_its_answer():
    pod = switching()
    client = pod.ask(max_tokens=100, model="a", is_stream=False)  # 500 ms
    pod.at(100.0, lambda: pod.switch("a", "b"))
    pod.run(300.0)
    (ticket,) = pod.demand().tickets
    assert (ticket.kind, ticket.id) == (TicketKind.AGAIN, 1)
    assert ticket.since_ms == pytest.approx(140.0)
    pod.switch("b", "a")
    pod.run(500.0)
    assert pod.demand().cannot_park == 1
    pod.switch("a", "b")
    pod.run()
    assert (client.outcome, len(client.asked)) == ("whole", 2)


def test_a_short_answer_finishes_behind_the_shut_door():
    pod = switching()
    client = pod.ask(max_tokens=10, model="a", is_stream=False)
    pod.at(20.0, lambda: pod.switch("a", "b", park_ms=200.0))
    pod.run()
    assert (client.outcome, len(client.asked)) == ("whole", 1)


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
            pod.run(2.6)
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


def test_an_answer_that_is_passed_on_is_cut_with_a_marked_error():
    pod = switching()
    pod.continuation = Continuation.NONE
    client = pod.ask(max_tokens=200, model="a")
    pod.run(20.0)
    pod.set_door("a", CUT)
    assert (client.outcome, client.ending.code) == ("aborted", "pool.cut")
    assert [each["error"]["code"] for each in client.answer.errors] == ["pool.cut"]


def test_a_failover_needs_no_pool():
    """A newer grant replaces the engine of an open door, and streams go on there."""
    pod = switching()
    client = pod.ask(max_tokens=40, model="a")
    pod.at(100.0, lambda: pod.die("a"))
    pod.run()
    client.check_whole()
    assert [each[1] for each in client.asked] == ["a-1", "a-2"]


def test_a_grant_opens_no_shut_door():
    pod = switching()
    client = pod.ask(model="b")
    pod.stand("b")
    pod.run(1_000.0)
    assert client.asked == []


def test_a_turn_that_ends_before_it_began_parks_nobody():
    pod = switching()
    client = pod.ask(max_tokens=60, model="a")
    pod.at(50.0, lambda: pod.set_door("a", FINISH))
    pod.at(60.0, lambda: pod.set_door("a", OpenDoor("a-1", 1)))
    pod.at(70.0, lambda: pod.ask(model="a"))
    pod.run()
    for each in pod.clients.values():
        each.check_whole()
    assert client.ending.pauses == 0


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
