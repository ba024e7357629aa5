"""Stock OpenAI clients, which never retry, while everything under them is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hack.stock_clients.client import WholeAnswer
from hack.stock_clients.kinds import BY_BACKEND, REFERENCE, Api, both
from hack.stock_clients.seen import Attempt, Clients, Fate, fate_of
from tests.e2e.pods import AS_USERS_RUN_IT
from understudy.drill.records import PARTS, TARGETS, EngineKill, PartKill, Records

# The gateway dies between the engines: a request that is in three of them as they die, without
# much progress between, is ended as the cause of it, and a busy machine makes little progress.
ORDER = (
    *("backend-http", "lockserver", "gms", "backend-model"),
    *("gms-supervisor", "gateway", "gateway-child", "supervisor"),
)

STREAM, WHOLE = both("chat", Api.CHAT)
CHOICES, _ = both("two choices", Api.TEXT, is_continued=False, n=2)
CUT = Attempt(STREAM, 900.0, 1100.0, "APIConnectionError: Connection error.")


def chat(text: str, reason: str | None = None, identity: str = "a", **delta: object) -> dict:
    choice = {"index": 0, "delta": {"content": text, **delta}, "finish_reason": reason}
    return {"id": identity, "choices": [choice], "usage": None}


def usage(tokens: int, identity: str = "a") -> dict:
    return {"id": identity, "choices": [], "usage": {"completion_tokens": tokens}}


def joined(*events: dict) -> WholeAnswer:
    answer = WholeAnswer()
    for event in events:
        answer.add(event)
    return answer


def test_answer_is_the_same_however_its_events_were_cut():
    """Goal: timing is no difference, everything else is. Method: one answer in other pieces, and
    with one thing changed at a time."""
    first = joined(chat("one "), chat("two", "stop"), usage(4))
    assert joined(chat("o"), chat("ne two"), chat("", "stop"), usage(4)).is_like(first)
    for other in (
        [chat("one "), chat("tw", "stop"), usage(4)],  # a token lost
        [chat("one "), chat("one "), chat("two", "stop"), usage(4)],  # doubled
        [chat("one "), chat("two", "length"), usage(4)],
        [chat("one "), chat("two", "stop"), usage(5)],  # counted twice
        [chat("one "), chat("two", "stop")],  # ended early, as if it were whole
        [chat("one "), chat("two", "stop", "b"), usage(4)],  # the next engine's own id
    ):
        assert not joined(*other).is_like(first), other


def test_call_of_a_tool_is_joined_from_its_events():
    """Goal: name, arguments and an id that stays. Method: pieces of a call; whole; a second id."""

    def piece(arguments: str, **more: str) -> dict:
        function = {"arguments": arguments, "name": more.get("name")}
        return chat("", tool_calls=[{"index": 0, "id": more.get("id"), "function": function}])

    first = joined(piece("", name="look", id="c1"), piece('{"a"'), piece(": 1}"), usage(3))
    call = {"id": "c9", "function": {"name": "look", "arguments": '{"a": 1}'}}
    message = {"index": 0, "message": {"content": None, "tool_calls": [call]}}
    whole = {"id": "b", "choices": [message], "usage": {"completion_tokens": 3}}
    assert joined(whole).is_like(first)
    again = joined(piece("", name="look", id="c1"), piece('{"a": 1}', id="c2"), usage(3))
    assert not again.is_like(first)


def test_logprobs_may_differ_by_rounding_only():
    """Goal: two batches round differently. Method: a completion's numbers, near and far."""

    def scored(*values: float | None) -> WholeAnswer:
        logprobs = {"tokens": ["x"] * len(values), "token_logprobs": [*values]}
        choice = {"index": 0, "text": "xx", "finish_reason": "stop", "logprobs": logprobs}
        return joined({"id": "a", "choices": [choice], "usage": None})

    first = scored(None, -0.5)
    assert scored(None, -0.5001).is_like(first)
    assert not scored(None, -0.6).is_like(first)
    assert not scored(-0.5, -0.5).is_like(first)


def test_response_is_joined_from_its_events():
    """Goal: streamed and whole are the same. Method: the Responses API's events, and one that
    ended before it was completed."""
    done = {
        "id": "r",
        "object": "response",
        "status": "completed",
        "usage": {"output_tokens": 2},
        "output": [{"content": [{"text": "one two"}]}],
    }
    begun = {**done, "status": "in_progress", "usage": None, "output": []}
    whole, streamed, cut = WholeAnswer(), WholeAnswer(), WholeAnswer()
    whole.add_response(done)
    events: list[dict] = [{"type": "response.created", "response": begun}]
    events += [{"type": "response.output_text.delta", "delta": each} for each in ("one ", "two")]
    for event in (*events, {"type": "response.completed", "response": done}):
        streamed.add_response(event)
    for event in events:
        cut.add_response(event)
    assert streamed.is_like(whole)
    assert not cut.is_like(whole)


def test_only_a_kill_of_the_gateway_excuses_an_error():
    """Goal: who is blamed. Method: one error, with each kind of kill at the same time."""
    records = Records()
    assert fate_of(CUT, records) is Fate.ERROR
    records.kills = [EngineKill("supervisor", "engine-0", 1, killed_ms=1000.0)]
    assert fate_of(CUT, records) is Fate.ERROR
    assert fate_of(replace(CUT, kind=CHOICES), records) is Fate.NOT_CONTINUED
    records.part_kills = [PartKill("lockserver", 1000.0, gone_ms=1001.0)]
    assert fate_of(CUT, records) is Fate.ERROR
    records.part_kills = [PartKill("gateway-child", 1000.0, gone_ms=1001.0)]
    assert fate_of(CUT, records) is Fate.LOST_IN_GATEWAY
    assert fate_of(replace(CUT, began_ms=1002.0), records) is Fate.ERROR
    assert fate_of(replace(CUT, is_refused=True), records) is Fate.ERROR
    assert fate_of(replace(CUT, error=""), records) is Fate.WRONG


def test_report_counts_every_kind_by_itself():
    """Goal: a reader sees what failed. Method: an error, a wrong answer, and a good one."""
    fine = Attempt(WHOLE, 0.0, 10.0, is_like_before=True, longest_wait_ms=7.0)
    clients = Clients((STREAM, WHOLE), [CUT, fine, replace(fine, is_like_before=False, detail="x")])
    found = clients.to_dict(Records())
    assert (found["requests"], found["error"], found["wrong"]) == (3, 1, 1)
    assert found["kinds"]["chat, streamed"]["error"] == 1
    assert found["kinds"]["chat"]["wrong"] == 1
    assert found["kinds"]["chat"]["longest_wait_ms"] == 7.0
    assert found["first_wrong"] == ["chat: x"]


def test_kinds_have_names_of_their_own_and_are_asked_for_streamed_and_not():
    """Goal: every kind is counted once. Method: the lists."""
    for kinds in BY_BACKEND.values():
        assert len({kind.name for kind in kinds}) == len(kinds)
        assert sum(kind.is_streamed for kind in kinds) * 2 == len(kinds)


@pytest.mark.slow
def test_stock_clients_see_no_error_and_no_other_answer_whatever_is_killed():
    """Goal: a failover is a pause for a client that nobody has written for us. Method: the command
    itself, which kills every process of the pod once; all kinds of requests, streamed and not. Only
    what is in the gateway itself may be lost, with its own process."""
    flags = [f"--kills={len(ORDER)}", "--apart-s=0", *(f"--target={each}" for each in ORDER)]
    done = subprocess.run(
        [sys.executable, "-m", "hack.stock_clients", *flags, "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **AS_USERS_RUN_IT},
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert (found["first_error"], found["first_wrong"]) == ([], [])
    assert found["drill"]["problems"] == []
    assert found["passed"]
    assert done.returncode == 0
    assert found["drill"]["killed"] == dict.fromkeys((*TARGETS, *PARTS), 1)
    assert all(found["kinds"][kind.name]["requests"] for kind in REFERENCE)
