"""A whole drill against a pod in one process, honest and not, and the looks at such a pod."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE

import pytest

from engine.messages import EventMsg, StatusReplyMsg
from plumbing.pod.cli import INTERRUPTED
from tests.understudy.drill.fake_pod import FakePod
from understudy.cli.drill import drill_running_pod
from understudy.drill import run as drill_run
from understudy.drill.observer import Observer, OldTree
from understudy.drill.records import Kill, Records
from understudy.drill.run import DrillPlan
from understudy.drill.verdict import DrillReport
from understudy.pod.table import program

BACKENDS = ("backend-model", "core")


async def drill(directory, mood: str = "", kills: int = 4) -> DrillReport:
    async with FakePod(directory, mood):
        plan = DrillPlan(kills=kills, targets=BACKENDS, clients=3)
        result = await drill_running_pod(directory, plan, lambda line: None)
    assert result is not None
    return result


async def test_drill_of_an_honest_pod_passes_with_every_phase_measured(directory):
    """Goal: the whole path from kill to report. Method: four kills of real child processes."""
    report = await drill(directory)
    assert report.problems == []
    assert report.passed
    assert report["killed"] == {"backend-model": 2, "core": 2}
    assert report["requests"] > 8
    assert all(spread["max"] is not None for spread in report["phases_ms"].values())
    assert len(report.evidence.failovers_ms) == 4


@pytest.mark.parametrize(
    ("mood", "fault"),
    [("lie", "wrong_tokens"), ("overlap", "double_active"), ("refuse", "refused")],
)
async def test_drill_of_a_pod_that_breaks_a_promise_fails(directory, mood, fault):
    """Method: the second engine answers something else; a grant before the old child is killed; a
    service that answers 503 during a failover."""
    report = await drill(directory, mood, kills=1)
    assert report[fault] > 0
    assert not report.passed


async def test_interrupted_drill_reports_the_kills_that_it_made(directory):
    """Method: SIGINT to the command, as of Ctrl-C, behind its second kill."""
    flags = ("--attach", "--yes", f"--dir={directory}", "--kills=1000", "--json")
    async with FakePod(directory):
        command = (*program("understudy"), "drill", *flags)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        assert process.stderr is not None
        while not (line := await process.stderr.readline()).startswith(b"kill 2/"):
            assert line, "the drill ended by itself"
        process.send_signal(signal.SIGINT)
        printed, _ = await process.communicate()
    assert process.returncode == INTERRUPTED
    document = json.loads(printed)
    assert 2 <= document["kills"] < 1000
    assert document["failover_ms"]["p50"] is not None
    assert document["problems"][0] == "the drill was interrupted"
    assert not document["passed"]


async def test_drill_without_a_takeover_ends_with_a_reason(directory, monkeypatch):
    """Goal: a drill always ends. Method: nobody is granted; requests are answered by nobody."""
    monkeypatch.setattr(drill_run, "TAKEOVER_DEADLINE_S", 0.3)
    monkeypatch.setattr("understudy.drill.clients.send.__defaults__", (0.5,))
    report = await drill(directory, "stuck", kills=1)
    assert any("no engine took over from engine-0" in problem for problem in report.problems)
    assert not report.passed


def engine_says(state: str, incarnation: str | None, **data) -> StatusReplyMsg:
    return StatusReplyMsg({"engine": {"state": state, "incarnation": incarnation, **data}})


def engine_tells(state: str, incarnation: str, cause: str = "", message: str = "") -> EventMsg:
    data = {"to": state, "incarnation": incarnation, "cause": cause}
    return EventMsg({"type": "engine.state", "data": data, "message": message})


@pytest.mark.parametrize(
    ("messages", "deaths"),
    [
        ([engine_says("active", "e-1"), engine_says("active", "e-1")], []),
        ([engine_says("init", "e-1"), engine_tells("standby", "e-1")], []),
        (
            [engine_says("active", "e-1"), engine_tells("dead", "e-1", "unhealthy", "no answer")],
            [("e-1", "unhealthy", "no answer")],
        ),
        (  # a death is one, however often it is told
            [
                engine_says("active", "e-1"),
                engine_tells("dead", "e-1", "unhealthy", "no answer"),
                engine_says("dead", "e-1"),
                engine_tells("init", "e-2"),
                engine_tells("dead", "e-2", "child_exit", "main ended"),
            ],
            [("e-1", "unhealthy", "no answer"), ("e-2", "child_exit", "main ended")],
        ),
        (  # the supervisor has ended, and the next one has launched meanwhile, or not yet
            [engine_says("active", "e-1"), engine_says("init", "e-2")],
            [("e-1", "", "its supervisor ended")],
        ),
        (
            [engine_says("active", "e-1"), engine_says("dead", None), engine_tells("init", "e-2")],
            [("e-1", "", "its supervisor ended")],
        ),
        ([engine_says("dead", "e-1"), engine_tells("init", "e-2")], []),  # it died before
    ],
)
async def test_observer_records_each_death_of_an_engine_once(directory, messages, deaths):
    """Goal: no death is missed or counted twice. Method: what engines say, in order."""
    records = Records()
    observer = Observer(directory, {}, records)
    for message in messages:
        observer._on_engine("engine-0", message)
    await observer.close()
    found = [(each.incarnation, each.cause, each.message) for each in records.deaths]
    assert found == deaths


def pool_tells(kind: str, **data) -> EventMsg:
    return EventMsg({"type": kind, "mono_ms": 7.0, "data": data})


async def test_observer_notes_each_state_of_a_model_once_and_switches(directory):
    """Method: what a pool says, some of it twice."""
    times = {"wait_ms": 100, "drain_ms": 3, "release_ms": 4, "raise_ms": 5}
    records = Records(models={"a": ("a-0",), "b": ("b-0",)})
    observer = Observer(directory, {}, records)
    models = [{"model": name, "state": "awake", "for_ms": 5} for name in records.models]
    observer._on_pool(StatusReplyMsg({"models": models}))
    for model, state in (("a", "awake"), ("b", "cold"), ("a", "cold"), ("a", "awake")):
        observer._on_pool(pool_tells("pool.model", model=model, to=state, cause="why"))
    observer._on_pool(pool_tells("pool.switch", model="a", victims=["b"], **times))
    await observer.close()
    assert [each.length_ms for each in records.switches] == [12]
    states = [each.state for each in records.moments if each.part == "a"]
    assert states == ["awake", "cold", "awake"]


async def test_grant_to_the_victim_itself_is_no_second_active_engine(directory):
    """Goal: an engine that is killed as it wakes. Method: its own grant is heard after its kill;
    then another engine is granted the lock while a process of it, this one, lives. One that only
    waited for the lock may live on."""

    def granted(engine: str, incarnation: str, token: int) -> EventMsg:
        data = {"lock": "active", "engine": engine, "incarnation": incarnation, "token": token}
        return EventMsg({"type": "lock.granted", "mono_ms": 7.0, "data": data})

    records = Records()
    observer = Observer(directory, {}, records)
    kill = Kill("backend-model", "engine-0", incarnation="e-1", holder="e-0")
    observer.expect(kill, OldTree.of([os.getpid()]))
    observer._on_lockserver(granted("engine-0", "e-1", 2))
    assert (records.overlaps, records.grants_checked, kill.old_token) == ([], 0, 2)
    observer._on_lockserver(granted("engine-1", "f-1", 3))
    assert (len(records.overlaps), records.grants_checked, kill.new_token) == (1, 1, 3)
    waiter = Kill("stop:backend-model", "engine-0", 3, incarnation="e-2", holder="e-0")
    observer.expect(waiter, OldTree.of([os.getppid()]))
    observer._on_lockserver(granted("engine-1", "f-2", 4))
    assert (len(records.overlaps), waiter.new_token) == (1, 4)
    await observer.close()
