"""A child's door: nothing is asked behind it, whoever waits is told of once, and an engine that has
rested is greeted anew."""

from __future__ import annotations

import json

import pytest

from gateway.core import events as ev
from gateway.core.machine import Gateway
from plumbing.gateway_protocol import Continuation, Hello
from tests.gateway.core.test_grants import EVENT, ask, gateway_with, hello, names, stream

SHUT = ev.DoorSet(5, is_open=False, is_shut=True, reason="e1 is resting; a request wakes it")
CLOSING = ev.DoorSet(5, is_open=False)
OPEN = ev.DoorSet(5)
HOLD_MS, PARK_MS = 1_000.0, 20_000.0


def resting(door: ev.DoorSet = SHUT) -> Gateway:
    gateway = gateway_with(hold_ms=HOLD_MS, park_timeout_ms=PARK_MS)
    assert gateway.handle(door, 0.0) == []
    return gateway


def answer_greeting(gateway: Gateway, effects, now_ms: float):
    (greeting,) = [each.greeting for each in effects if isinstance(each, ev.GreetEngine)]
    return gateway.handle(ev.HelloCame(greeting, hello("e1", 5)), now_ms)


@pytest.mark.parametrize("door", [SHUT, CLOSING])
def test_nothing_is_asked_and_the_parent_is_told_of_the_first_one_that_waits(door: ev.DoorSet):
    gateway = resting(door)
    assert ask(gateway, 1) == [ev.WantEngine()]
    assert ask(gateway, 2) == []
    assert gateway.handle(ev.Tick(), HOLD_MS / 2) == []


def test_a_door_that_closed_for_a_moment_opens_without_a_greeting():
    gateway = resting(CLOSING)
    ask(gateway, 1)
    assert names(gateway.handle(OPEN, 2.0)) == ["AskEngine"]


def test_an_engine_that_has_rested_is_greeted_before_it_is_asked():
    gateway = resting()
    ask(gateway, 1)
    effects = gateway.handle(OPEN, 5.0)
    assert names(effects) == ["GreetEngine"]
    assert gateway.census(5.0).waits_for == "waiting for e1 to answer"
    assert names(answer_greeting(gateway, effects, 6.0)) == ["AskEngine"]


def test_what_was_said_before_the_rest_does_not_count_after_it():
    """A greeting that was under way when the door was shut."""
    gateway = Gateway(ev.GatewayRules())
    (greet,) = gateway.handle(ev.EngineGranted("e1", 5, "era"), 0.0)
    gateway.handle(SHUT, 1.0)
    assert gateway.handle(ev.HelloCame(greet.greeting, hello("e1", 5)), 2.0) == []
    ask(gateway, 1)
    assert names(gateway.handle(OPEN, 3.0)) == ["GreetEngine"]


def test_an_answer_that_begins_behind_the_shut_door_can_be_continued():
    """Goal: an engine that is told to rest by somebody else answers and hands over what it was
    asked before. Method: the head of a stream comes once the door is shut."""
    gateway = gateway_with()
    (asked,) = ask(gateway, 1)
    gateway.handle(SHUT, 2.0)
    gateway.handle(ev.HeadCame(asked.attempt, 200, "e1", 5, Continuation.EXACT, True), 3.0)
    assert gateway.attempts[asked.attempt].group(EVENT, [1], [1], 3.0) == EVENT
    handed = gateway.handle(ev.AnswerBroke(asked.attempt, ev.BreakCause.HANDED_OVER), 4.0)
    assert names(handed) == ["DropAttempt", "StreamPaused", "WantEngine"]


def test_a_stream_that_was_handed_over_goes_on_as_soon_as_the_engine_is_awake():
    """Goal: no wait for a newer grant, which does not come. Method: the engine parks a stream, and
    another connection breaks, as when its socket closes."""
    gateway = gateway_with()
    first, second = stream(gateway, 1), stream(gateway, 2)
    for attempt in (first, second):
        assert attempt.group(EVENT, [1], [1], 2.0) == EVENT
    gateway.handle(SHUT, 3.0)
    handed = gateway.handle(ev.AnswerBroke(first.number, ev.BreakCause.HANDED_OVER), 4.0)
    assert names(handed) == ["DropAttempt", "StreamPaused", "WantEngine"]
    gateway.handle(ev.AnswerBroke(second.number, ev.BreakCause.CLOSED), 4.0)
    effects = gateway.handle(OPEN, 20.0)
    asked = answer_greeting(gateway, effects, 21.0)
    assert [each.journal.tokens.tolist() for each in asked] == [[1], [1]]


def test_running_answers_end_behind_a_shut_door():
    gateway = gateway_with()
    attempt = stream(gateway, 1)
    gateway.handle(SHUT, 2.0)
    assert attempt.group(EVENT, [1], [1], 3.0) == EVENT
    assert attempt.end(b"data: [DONE]\n\n", 4.0)
    assert "EndAnswer" in names(gateway.take())


def test_the_time_to_hold_a_request_counts_from_the_wake():
    gateway = resting()
    ask(gateway, 1)
    assert gateway.handle(ev.Tick(), 5 * HOLD_MS) == []
    gateway.handle(OPEN, 5 * HOLD_MS)
    assert "AnswerError" not in names(gateway.handle(ev.Tick(), 6 * HOLD_MS - 1))
    effects = gateway.handle(ev.Tick(), 6 * HOLD_MS)
    (error,) = [each for each in effects if isinstance(each, ev.AnswerError)]
    assert json.loads(error.body)["error"]["code"] == "no_active_engine"


def test_no_request_waits_behind_a_door_for_ever():
    gateway = resting()
    ask(gateway, 1)
    assert "AnswerError" in names(gateway.handle(ev.Tick(), PARK_MS + 1))


def test_where_only_an_operator_wakes_the_engine_a_request_is_refused_in_time():
    door = ev.DoorSet(5, False, True, False, "e1 is resting; wake it with `understudy wake`")
    gateway = resting(door)
    assert ask(gateway, 1) == [ev.WantEngine()]
    error = gateway.handle(ev.Tick(), HOLD_MS + 1)[0]
    assert isinstance(error, ev.AnswerError)
    assert (error.status, error.retry_after_s) == (503, 1)
    said = json.loads(error.body)["error"]
    assert said["code"] == "gateway.resting"
    assert "wake it with `understudy wake`" in said["message"]


def test_a_door_of_another_grant_changes_nothing():
    gateway = gateway_with()
    assert gateway.handle(ev.DoorSet(4, is_open=False, is_shut=True), 1.0) == []
    assert names(ask(gateway, 1)) == ["AskEngine"]


def test_the_next_engine_has_an_open_door():
    gateway = resting()
    ask(gateway, 1)
    (greet,) = gateway.handle(ev.EngineGranted("e2", 6, "era"), 2.0)
    assert isinstance(greet, ev.GreetEngine)
    asked = gateway.handle(
        ev.HelloCame(greet.greeting, Hello("e2", 6, "c", Continuation.EXACT, 1000)), 3.0
    )
    assert names(asked) == ["AskEngine"]
