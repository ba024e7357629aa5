"""Who is active: grants, eras, hellos; memory and its cap; the small refusals."""

from __future__ import annotations

import json

import pytest

from gateway.core import events as ev
from gateway.core.answers import error_body
from gateway.core.client_request import REQUEST_BYTES, RequestState
from gateway.core.machine import Gateway
from gateway.core.replay import BLOCK_BYTES
from plumbing.gateway_protocol import VERSION, Continuation, Hello
from tests.gateway.core.model import KINDS, PATHS, by_state
from tests.gateway.core.pod import Pod

CHAT = "/v1/chat/completions"
COMMENT = b'data: {"choices":[],"prompt_token_ids":[1]}\n\n'
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


def gateway_with(**rules) -> Gateway:
    """A gateway whose engine e1 is granted under token 5 and has said hello."""
    gateway = Gateway(ev.GatewayRules(**rules))
    (greet,) = gateway.handle(ev.EngineGranted("e1", 5, "era"), 0.0)
    assert greet == ev.GreetEngine(1, "e1", 5)
    gateway.handle(ev.HelloCame(1, hello("e1", 5)), 0.0)
    return gateway


def hello(engine: str, token: int, **changes) -> Hello:
    said = {"continuation_id": "c", "continuation": Continuation.EXACT, "body_bytes_max": 1000}
    return Hello(engine, token, **{**said, **changes})


def ask(gateway: Gateway, number: int, *, is_stream=True, body_bytes=10, path=CHAT):
    came = ev.RequestCame(number, path, body_bytes, path == CHAT, is_stream)
    return gateway.handle(came, 1.0)


def stream(gateway: Gateway, number: int, engine: str = "e1", token: int = 5):
    """A stream that has begun: its attempt."""
    (asked,) = ask(gateway, number)
    head = ev.HeadCame(asked.attempt, 200, engine, token, Continuation.EXACT, True)
    assert gateway.handle(head, 1.0) == [ev.SendHead(number, asked.attempt, Continuation.EXACT)]
    return gateway.attempts[asked.attempt]


def names(effects) -> list[str]:
    return [type(each).__name__ for each in effects]


def test_older_and_repeated_grants_change_nothing():
    """Goal: only a newer token supersedes, within an era. Method: each kind of grant."""
    gateway = gateway_with()
    attempt = stream(gateway, 1)
    assert gateway.handle(ev.EngineGranted("e0", 4, "era"), 2.0) == []
    assert gateway.handle(ev.EngineGranted("e1", 5, "era"), 2.0) == []
    # A lock server that lost its file was told of the grant by its holder: the same engine serves.
    assert gateway.handle(ev.EngineGranted("e1", 5, "new era"), 2.0) == []
    assert attempt.group(EVENT, [1], [1], 3.0) == EVENT
    effects = gateway.handle(ev.EngineGranted("e2", 1, "newer era"), 4.0)
    assert names(effects) == ["DropAttempt", "StreamPaused", "GreetEngine"]
    assert attempt.group(EVENT, [1], [1], 5.0) == b""
    assert gateway.handle(ev.EngineGranted("e1", 9, "era"), 6.0)[-1] == ev.GreetEngine(4, "e1", 9)


def test_nobody_is_asked_without_a_grant_and_its_hello():
    """Goal: a request waits with a reason. Method: each step on the way to an engine."""
    gateway = Gateway(ev.GatewayRules())
    assert ask(gateway, 1) == []
    assert "which engine is active" in gateway.waits_for
    gateway.handle(ev.NobodyGranted("all engines are loading"), 2.0)
    assert gateway.waits_for == "all engines are loading"
    (greet,) = gateway.handle(ev.EngineGranted("e1", 5, "era"), 3.0)
    assert gateway.handle(ev.HelloCame(greet.greeting, None, "refused"), 4.0) == []
    assert gateway.waits_for == "waiting for e1 to answer (refused)"
    assert gateway.handle(ev.Tick(), 30.0) == []
    (greet,) = gateway.handle(ev.Tick(), 60.0)
    assert gateway.handle(ev.HelloCame(greet.greeting, hello("e1", 4)), 61.0) == []
    assert "under token 4" in gateway.waits_for
    (late,) = gateway.handle(ev.Tick(), 120.0)
    assert gateway.handle(ev.HelloCame(greet.greeting, hello("e1", 5)), 121.0) == []  # too old
    (asked,) = gateway.handle(ev.HelloCame(late.greeting, hello("e1", 5)), 122.0)
    assert (asked.request, asked.engine, asked.token) == (1, "e1", 5)
    assert gateway.handle(ev.NobodyGranted("e1 is handing over"), 123.0) == []
    assert ask(gateway, 2) == []
    (asked,) = gateway.handle(ev.EngineGranted("e1", 5, "era"), 124.0)
    assert asked.request == 2


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"continuation_id": "other"}, "gateway.other_continuation"),
        ({"continuation": Continuation.NONE}, "gateway.cannot_continue"),
        ({"version": VERSION + 1}, "gateway.cannot_continue"),
    ],
)
def test_stream_does_not_resume_at_an_engine_that_cannot(change, code):
    """Goal: never a resume across continuation ids. Method: a hello that differs."""
    gateway = gateway_with()
    attempt = stream(gateway, 1)
    attempt.group(EVENT, [1], [1], 2.0)
    greet = gateway.handle(ev.EngineGranted("e2", 6, "era"), 3.0)[-1]
    came = ev.HelloCame(greet.greeting, hello("e2", 6, **change))
    (ended,) = gateway.handle(came, 4.0)
    assert code in ended.event.decode()
    assert (ended.code, ended.ending, ended.tokens) == (code, ev.Ending.BROKEN, 1)


def resume(gateway: Gateway, token: int, now_ms: float):
    """The attempt at an engine that is granted now, whose head has come."""
    greet = gateway.handle(ev.EngineGranted(f"e{token}", token, "era"), now_ms)[-1]
    (asked,) = gateway.handle(ev.HelloCame(greet.greeting, hello(f"e{token}", token)), now_ms)
    head = ev.HeadCame(asked.attempt, 200, asked.engine, token, Continuation.EXACT, True)
    assert gateway.handle(head, now_ms) == []
    return gateway.attempts[asked.attempt]


@pytest.mark.parametrize("is_end", [False, True], ids=["token", "end"])
def test_pause_lasts_until_the_first_new_token_or_the_end(is_end):
    """Goal: the pause is the client's. Method: an engine repeats the journal at once and computes
    later; one that dies in between makes no second pause; and what no token caused ends none."""
    gateway = gateway_with()
    stream(gateway, 1).group(EVENT, [1], [1], 2.0)
    for token in (6, 7):
        attempt = resume(gateway, token, 10.0 * token)
        assert attempt.group(EVENT, [1], [1], 10.0 * token) == b""
    assert gateway.requests[1].state is RequestState.STREAMING
    attempt.group(COMMENT, [], [], 80.0)
    assert gateway.take() == []
    if is_end:
        attempt.end(b"data: [DONE]\n\n", 100.0)
    else:
        assert attempt.group(EVENT, [2], [1], 100.0) == EVENT
        assert attempt.group(EVENT, [3], [1], 200.0) == EVENT
    records = [each for each in gateway.take() if isinstance(each, ev.GatewayRecord)]
    assert records == [ev.StreamResumed(1, "e7", 7, 1, 40.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_error_event_of_the_engine_is_a_break_and_its_end_is_not_sent(kind):
    """Goal: a dead engine's last words are not content. Method: vLLM's, with `[DONE]`; and text
    of a model that only looks like it."""
    said = {
        "responses": b'event: error\ndata: {"type":"error","message":"dead"}\n\n',
        "messages": b'event: error\ndata: {"type":"error","error":{"message":"dead"}}\n\n',
    }.get(kind, b'data: {"error": {"message": "EngineDeadError"}}\n\ndata: [DONE]\n\n')
    gateway = gateway_with()
    for number, is_last in ((1, False), (2, True)):
        attempt = stream(gateway, number)
        innocent = b"data: %b\n\n" % json.dumps({"a": 'data: {"error"\nevent: error\n'}).encode()
        assert attempt.group(innocent, [1], [1], 2.0) == innocent
        sent = attempt.end(said, 3.0) if is_last else attempt.group(said, [], [], 3.0)
        assert sent == b""
        assert names(gateway.shared.take()) == ["DropAttempt", "StreamPaused"]
    assert by_state(gateway) == {"parked": 2}
    lean = gateway_with(memory_bytes_max=1)
    (asked,) = ask(lean, 1)
    lean.handle(ev.HeadCame(asked.attempt, 200, "e1", 5, Continuation.EXACT, True), 1.0)
    assert lean.attempts[asked.attempt].group(said, [], [], 2.0) == b""
    (_, abort) = lean.shared.take()
    assert (b"dead" in abort.event.lower(), b"[DONE]" in abort.event) == (True, False)


def test_engine_that_says_each_time_why_is_believed():
    """Goal: a request that an engine can never answer ends soon, with the engine's own words and no
    `[DONE]`. Method: the same error event three times."""
    pod = Pod(1)
    pod.grant()
    client = pod.ask("chat", 30)
    error = b'data: {"error": {"message": "the grammar rejects it", "type": "x"}}\n\n'
    pod.on_group = lambda upstream: upstream.core.group(error + b"data: [DONE]\n\n", [], [], 0.0)
    pod.run()
    assert len(client.asked) == 3
    assert client.outcome == "aborted"
    assert client.sent.endswith(error)
    assert client.ended_ms < 1000  # of virtual time: it was not held until a deadline


def test_memory_cap_makes_new_requests_class_none_from_their_start():
    """Goal: the total is capped, and a client is told. Method: two requests into room for one."""
    gateway = gateway_with(memory_bytes_max=REQUEST_BYTES + 500)
    for number, promise in ((1, Continuation.EXACT), (2, Continuation.NONE)):
        (asked,) = ask(gateway, number, is_stream=False, body_bytes=400)
        head = ev.HeadCame(asked.attempt, 200, "e1", 5, Continuation.RETRY, False)
        effects = gateway.handle(head, 1.0)
        if promise is Continuation.NONE:
            assert effects == [ev.SendHead(number, asked.attempt, promise)]
    # Passed on, so it is not asked again.
    assert names(gateway.handle(ev.AnswerEnded(asked.attempt, ev.BreakCause.CLOSED), 2.0)) == [
        "DropAttempt",
        "RequestEnded",
    ]
    gateway.handle(ev.NobodyGranted("none"), 3.0)
    (refused,) = ask(gateway, 3, body_bytes=400)
    assert (refused.why.status, refused.code) == (503, "gateway.memory")


def test_memory_cap_takes_the_journal_of_the_largest_stream_and_says_so():
    """Goal: a growing stream never makes others fail; what it loses is on record. Method: two grow,
    one faster; then the engine dies."""
    room = 2 * (REQUEST_BYTES + BLOCK_BYTES) + 100_000
    gateway = gateway_with(memory_bytes_max=room)
    small, large = stream(gateway, 1), stream(gateway, 2)
    lost = []
    for number in range(30_000):
        small.group(b"", [number % 7], [1], 2.0)
        assert large.group(EVENT, [number] * 2, [2], 2.0) == EVENT
        lost += gateway.shared.take()
        assert gateway.shared.memory_bytes <= room
        if lost:
            break
    (record,) = lost
    assert (record.request, record.reason) == (2, "memory")
    assert large.group(EVENT, [1], [1], 3.0) == EVENT
    effects = gateway.handle(ev.EngineGranted("e2", 6, "era"), 4.0)
    ended = {each.request: each for each in effects if isinstance(each, ev.RequestEnded)}
    assert list(ended) == [2]
    assert ended[2].code == "gateway.broken"
    assert by_state(gateway) == {"parked": 1}


def test_held_answer_over_its_limit_is_passed_on():
    """Goal: 64 MiB are held, not more, and all memory is counted. Method: tell of the bytes."""
    for rules, pieces in (({}, 64), ({"memory_bytes_max": 10 << 20}, 9)):
        gateway = gateway_with(**rules)
        (asked,) = ask(gateway, 1, is_stream=False)
        head = ev.HeadCame(asked.attempt, 200, "e1", 5, Continuation.RETRY, False)
        assert gateway.handle(head, 1.0) == []
        attempt = gateway.attempts[asked.attempt]
        for _ in range(pieces):
            attempt.hold(1 << 20)
            assert gateway.shared.take() == []
        attempt.hold(1 << 20)
        assert gateway.shared.take() == [ev.SendHead(1, asked.attempt, Continuation.NONE)]
        assert attempt.raw(b"more") == b"more"
        (ended,) = gateway.handle(ev.AnswerEnded(asked.attempt), 2.0)
        assert (ended.ending, ended.attempt) == (ev.Ending.WHOLE, 0)
        assert gateway.shared.memory_bytes == 0


def test_refusals_before_anything_is_asked():
    """Goal: each with its status and code. Method: a body that is too large, and no engine for too
    long."""
    gateway = gateway_with()
    (refused,) = ask(gateway, 2, body_bytes=1001)
    assert (refused.why.status, refused.code) == (413, "gateway.body_too_large")
    for path in set(PATHS.values()):
        waiting = Gateway(ev.GatewayRules())
        waiting.handle(ev.RequestCame(1, path, 1, True, True), 0.0)
        (refused,) = waiting.handle(ev.Tick(), 10_000.0)
        assert (refused.why.status, refused.why.retry_after_s) == (503, 1)
        said = json.loads(error_body(refused.why, path))["error"]
        assert said["type"] == "service_unavailable"


def test_groups_that_are_not_the_hops_are_a_break():
    """Goal: garbage costs its stream's connection. Method: an id that is none, a group before its
    head, an end before it, an answer without its end, events about attempts that are over."""
    gateway = gateway_with()
    attempt = stream(gateway, 1)
    assert attempt.group(EVENT, [1, 1 << 40], [2], 2.0) == b""
    assert names(gateway.shared.take()) == ["DropAttempt", "StreamPaused"]
    assert attempt.owner.tokens.tolist() == []
    for number, method in ((2, "group"), (3, "end")):
        (asked,) = ask(gateway, number)
        fresh = gateway.attempts[asked.attempt]
        args = (EVENT, [1], [1], 2.0) if method == "group" else (EVENT, 2.0)
        assert getattr(fresh, method)(*args) == b""
        assert names(gateway.shared.take()) == ["DropAttempt"]
    last = stream(gateway, 4)
    assert names(gateway.handle(ev.AnswerEnded(last.number), 3.0)) == [
        "DropAttempt",
        "StreamPaused",
    ]
    for event in (
        ev.AnswerEnded(last.number),
        ev.AnswerEnded(last.number, ev.BreakCause.UNREACHED),
        ev.ClientLeft(99),
    ):
        assert gateway.handle(event, 4.0) == []
    assert (last.raw(b"x"), last.end(b"x", 5.0)) == (b"", b"")


@pytest.mark.parametrize(("engine", "token"), [("", 0), ("e0", 4), ("e1", 4)])
def test_an_answer_that_does_not_name_the_grant_is_a_break(engine, token):
    """Goal: nothing of a zombie passes the fence."""
    gateway = gateway_with()
    (asked,) = ask(gateway, 1)
    head = ev.HeadCame(asked.attempt, 200, engine, token, Continuation.NONE, False)
    assert names(gateway.handle(head, 2.0)) == ["DropAttempt"]
