"""A gateway's door: nothing is sent behind it, whoever waits is told of once, and an engine that
has rested is greeted anew."""

from __future__ import annotations

from gateway.core import events as ev
from gateway.core.machine import NEVER_MS, Gateway
from plumbing.gateway_protocol import Continuation
from pool.core.events import Running, ShutDoor
from tests.gateway.core.test_grants import EVENT, ask, gateway_with, hello, names, stream

SHUT = ev.DoorSet(door=ShutDoor(Running.FINISH, None, "e1 is resting; a request wakes it"))
OPEN = ev.DoorSet()
HOLD_MS, PARK_MS = 1_000.0, 20_000.0


def behind(door: ev.DoorSet) -> Gateway:
    """A request waits behind this door, and the parent was told."""
    gateway = gateway_with(hold_ms=HOLD_MS, park_timeout_ms=PARK_MS)
    assert gateway.handle(door, 0.0) == []
    assert ask(gateway, 1) == [ev.DemandChanged()]
    return gateway


def answer_greeting(gateway: Gateway, effects, now_ms: float, engine: str = "e1", token: int = 5):
    (greeting,) = [each.greeting for each in effects if isinstance(each, ev.GreetEngine)]
    return gateway.handle(ev.HelloCame(greeting, hello(engine, token)), now_ms)


def code_of(effects) -> str:
    (ended,) = [each for each in effects if isinstance(each, ev.RequestEnded)]
    assert ended.ending is ev.Ending.REFUSED
    return ended.code


def test_requests_wait_behind_the_door_and_an_engine_that_has_rested_is_greeted_anew():
    gateway = behind(SHUT)
    assert ask(gateway, 2) == []
    assert gateway.handle(ev.Tick(), HOLD_MS / 2) == []
    effects = gateway.handle(OPEN, HOLD_MS / 2)
    assert names(effects) == ["GreetEngine"]
    assert gateway.waits_for == "waiting for e1 to answer"
    assert names(answer_greeting(gateway, effects, 600.0)) == ["SendRequest", "SendRequest"]


def test_a_greeting_that_was_under_way_when_the_door_was_shut_does_not_count():
    gateway = Gateway(ev.GatewayRules())
    (greet,) = gateway.handle(ev.EngineGranted("e1", 5, "era"), 0.0)
    gateway.handle(SHUT, 1.0)
    assert gateway.handle(ev.HelloCame(greet.greeting, hello("e1", 5)), 2.0) == []
    ask(gateway, 1)
    assert names(gateway.handle(OPEN, 3.0)) == ["GreetEngine"]


def test_streams_that_were_handed_over_go_on_as_soon_as_the_engine_is_awake():
    """Goal: no wait for a newer grant, which does not come. Method: behind the shut door one answer
    begins, one ends, the engine parks a stream, and another connection breaks, as when its socket
    closes."""
    gateway = gateway_with()
    first, second, third = (stream(gateway, number) for number in (1, 2, 3))
    (asked,) = ask(gateway, 4)
    for attempt in (first, second, third):
        assert attempt.group(EVENT, [1], [1], 2.0) == EVENT
    gateway.handle(SHUT, 3.0)
    gateway.handle(ev.HeadCame(asked.attempt, 200, "e1", 5, Continuation.EXACT, True), 3.0)
    assert gateway.attempts[asked.attempt].group(EVENT, [1], [1], 3.0) == EVENT
    assert third.end(b"data: [DONE]\n\n", 4.0)
    assert names(gateway.shared.take()) == ["RequestEnded"]
    handed = gateway.handle(ev.AnswerEnded(first.number, ev.BreakCause.HANDED_OVER), 4.0)
    assert names(handed) == ["DropAttempt", "StreamPaused", "DemandChanged"]
    gateway.handle(ev.AnswerEnded(second.number, ev.BreakCause.CLOSED), 4.0)
    gateway.handle(ev.AnswerEnded(asked.attempt, ev.BreakCause.HANDED_OVER), 4.0)
    resumed = answer_greeting(gateway, gateway.handle(OPEN, 20.0), 21.0)
    assert [each.journal.tokens.tolist() for each in resumed] == [[1], [1], [1]]


def test_the_time_to_hold_a_request_counts_from_the_wake_and_ends():
    gateway = behind(SHUT)
    assert gateway.handle(ev.Tick(), 5 * HOLD_MS) == []
    gateway.handle(OPEN, 5 * HOLD_MS)
    assert "RequestEnded" not in names(gateway.handle(ev.Tick(), 6 * HOLD_MS - 1))
    assert code_of(gateway.handle(ev.Tick(), 6 * HOLD_MS)) == "no_active_engine"
    assert code_of(behind(SHUT).handle(ev.Tick(), PARK_MS + 1)) == "no_active_engine"


def test_where_only_an_operator_wakes_the_engine_a_request_is_refused_in_time():
    why = "e1 is resting; wake it with `understudy wake`"
    gateway = behind(ev.DoorSet(door=ShutDoor(Running.FINISH, NEVER_MS, why)))
    effects = gateway.handle(ev.Tick(), HOLD_MS + 1)
    (ended,) = effects
    assert (ended.why.status, ended.why.retry_after_s) == (503, 1)
    assert code_of(effects) == "gateway.resting"
    assert why in ended.why.message


def test_another_engine_is_greeted_once_the_door_of_the_one_before_is_open():
    gateway = behind(SHUT)
    assert gateway.handle(ev.EngineGranted("e2", 6, "era"), 2.0) == []
    effects = gateway.handle(OPEN, 2.0)
    assert names(answer_greeting(gateway, effects, 3.0, "e2", 6)) == ["SendRequest"]
