"""Engines that hand over and rest in place: real processes, a real lock server, kills and stops."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from msgspec.structs import replace

from engine import messages as m
from engine.supervisor import state_file
from engine.supervisor.control import NO_NEWS
from lockserver.messages import CATALOGUE, HandOverMsg, SwitchedOverMsg, SwitchOverMsg
from plumbing.errors import UnderstudyError
from plumbing.pod.cli import events_of
from plumbing.pod.messages import EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.paths import engine_socket, engine_state
from plumbing.wire.blocking import BlockingClient
from tests.engine.pod import QUICK, Engine, Pod
from tests.engine.stub_lock import StubLock
from tests.helpers import until

RESTS = ("--rest", "--grandchild", "joined")
PATIENT = ("--hang-ms", "600000")
FOR_EVER = ("--deaths-max", "100")


def switch_over(pod: Pod, to: str) -> SwitchedOverMsg:
    """Once the engine is in line: it calls itself a standby before the lock server has heard so."""
    until(
        lambda: any(each["engine"] == to for each in pod.lock()["waiters"]),
        f"{to} to wait for the lock",
    )
    with BlockingClient(str(pod.directory / "lockserver.sock"), CATALOGUE) as client:
        asked = SwitchOverMsg("active", to=to, timeout_ms=60_000)
        reply = client.request(asked, timeout_s=60).message
    assert isinstance(reply, SwitchedOverMsg)
    return reply


@contextmanager
def switching(pod: Pod, to: str) -> Iterator[None]:
    """A switchover in the background, whatever comes of it."""

    def ask() -> None:
        with suppress(UnderstudyError):
            switch_over(pod, to)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()


def pair(pod: Pod, *switches: str, flags: tuple[str, ...] = ()) -> tuple[Engine, Engine]:
    """The first is active, the second stands by."""
    pod.start_lock()
    one = pod.active("e-0", *RESTS, *switches, flags=(*QUICK, *FOR_EVER, *flags))
    two = pod.engine("e-1", *RESTS, *switches, flags=(*QUICK, *FOR_EVER, *flags))
    two.until("standby")
    return one, two


def token_of(pod: Pod) -> int:
    token: int = pod.lock()["holder"]["token"]
    return token


def test_switchover_in_place_keeps_every_process_of_both_engines(pod):
    """Goal: a switchover without a relaunch. Method: there and back; the tokens grow, and the file
    of the first engine is sealed at the token that it handed over."""
    one, two = pair(pod)
    before, first = (one.pids(), two.pids()), token_of(pod)
    assert switch_over(pod, "e-1").token == first + 1
    document = one.until("standby")
    assert pod.ask() == ("e-1", first + 1)
    assert document["lock"]["token"] == 0
    assert switch_over(pod, "e-0").token == first + 2
    assert pod.ask() == ("e-0", first + 2)
    two.until("standby")
    assert (one.pids(), two.pids()) == before
    lengths = {each.name[:11]: each.stat().st_size for each in pod.directory.glob("serving_*")}
    assert lengths == {"serving_e-0": first, "serving_e-1": first + 1}
    assert "understudy_engine_rests_total" in one.get("/metrics")[1]
    document = one.status()
    assert document["deaths"] == []
    goal = {"tier": "awake", "goal": "awake", "by": None, "can_rest": True, "generation": None}
    assert document["goal"] == goal


def test_process_that_does_not_hold_the_serving_file_never_serves(pod):
    """Goal: H15. Method: a child that joins nothing; the tree ends before it serves."""
    pod.start_lock()
    engine = pod.engine("e-0", *RESTS, "--child-skips", "join", flags=QUICK)
    engine.until_death("model (pid ", "serving_file_missing")
    assert "active" not in states(engine)


@pytest.mark.parametrize("bad", [("--child-skips", "leave"), ("--leaves-resident",)])
def test_rest_that_is_not_proven_ends_the_tree_and_then_the_other_is_granted(pod, bad):
    """Goal: H18. Method: a child that keeps the file, or memory that is still mapped: the tree is
    killed, so the switchover is done all the same."""
    flags = ("--release-ms", "300") if "--child-skips" in bad else ()
    one, _ = pair(pod, *bad, flags=flags)
    with switching(pod, "e-1"):
        document = one.until("standby", number=2)
    cause = {"--child-skips": "budget_exceeded", "--leaves-resident": "kv_resident"}[bad[0]]
    assert document["deaths"][0]["cause"] == cause
    assert pod.ask()[0] == "e-1"
    until(lambda: len([*pod.directory.glob("serving_e-0_*")]) == 1, "the dead one's file to go")


def test_hand_over_that_the_lock_server_refuses_ends_the_tree(pod, directory, lock):
    """Goal: H18. Method: a server that refuses what the engine says is over: as long as its
    processes live, no engine could be granted the lock."""
    lock.auto = ()
    engine = pod.engine("e-0", *RESTS, flags=QUICK)
    until(lambda: lock.want is not None and lock.want.is_wanted, "the want of active")
    assert lock.want is not None
    lock.call(lock.grant, "active", "e-0", str(lock.want.incarnation))
    engine.until("active")
    lock.call(hand_over, lock)
    until(lambda: lock.want is not None and lock.want.over == 1, "the word")

    def refuse() -> None:
        for conn in lock.server.connections:
            conn.fault(UnderstudyError("lock.bad_want", "no engine holds it"), close=False)

    lock.call(refuse)
    document = engine.until("standby", number=2)
    assert document["deaths"][0]["cause"] == "hand_over_refused"
    until(lambda: lock.want is not None and not lock.want.over, "the next want")


# ---------------------------------------------------------------- at rest


def shall(client: BlockingClient, goal: Tier | None) -> EngineReportMsg:
    reply = client.request(SetGoalMsg(goal, "a test"), timeout_s=30).message
    assert isinstance(reply, EngineReportMsg)
    return reply


def heard_until(client: BlockingClient, state: str) -> list[EngineReportMsg]:
    """What is said until the engine is in `state`."""
    said: list[EngineReportMsg] = []
    while not said or said[-1].state != state:
        message = client.receive(timeout_s=30).message
        assert isinstance(message, EngineReportMsg)
        said.append(message)
    return said


def assert_no_repeats(words: list[EngineReportMsg]) -> None:
    """A pool judges each word."""
    counting = [replace(word, **NO_NEWS) for word in words]
    for earlier, later in itertools.pairwise(counting):
        assert later != earlier


def test_engine_rests_and_wakes_under_its_token_and_says_so(pod, lock):
    """Goal: rest in place. Method: to rest and back twice; the same connection hears of each
    change, the probes are a standby's, the lock is held all the time by the same processes."""
    engine = pod.active("e-0", *RESTS, flags=QUICK)
    pids = engine.pids()
    with engine.client() as client:
        for _ in range(2):
            words = [shall(client, Tier.WARM), *heard_until(client, "resting")]
            assert_no_repeats(words)
            rested = words[-1]
            assert (rested.tier, rested.goal, rested.goal_by) == (Tier.WARM, Tier.WARM, "a test")
            assert (rested.token, rested.fault) == (1, "")
            assert engine.get("/ready")[0] == 200
            assert engine.get("/serving")[0] == 503
            assert engine.get("/live")[0] == 200
            document = engine.status()
            assert document["goal"]["tier"] == "warm"
            assert document["backend"]["kv"] is None
            assert "asleep" in document["engine"]["reason"]
            words = [shall(client, Tier.AWAKE), *heard_until(client, "active")]
            assert_no_repeats(words)
            awake = words[-1]
            assert (awake.token, awake.tier) == (1, Tier.AWAKE)
    assert engine.pids() == pids
    assert {want.token for want in lock.wants} <= {0, 1}
    assert all(not want.over for want in lock.wants)
    metrics = engine.get("/metrics")[1]
    assert 'understudy_engine_rests_total{reason="goal"} 2.0' in metrics
    assert "understudy_engine_wake_duration_seconds_count 2.0" in metrics


def test_engine_says_so_when_its_last_request_has_ended(pod, lock):
    """Goal: a pool that was told of a request in flight hears of its end. Method: a backend that
    counts one while a file exists; nothing else about the engine changes."""
    busy = pod.directory / "busy"
    engine = pod.active("e-0", *RESTS, "--hang-generation-if", str(busy), flags=(*QUICK, *PATIENT))
    busy.touch()
    with engine.client() as client:
        until(lambda: shall(client, None).in_flight == 1, "the request to be counted")
    with engine.client() as client:
        assert shall(client, None).in_flight == 1
        busy.unlink()
        said = client.receive(timeout_s=30).message
        assert isinstance(said, EngineReportMsg)
        assert (said.state, said.in_flight) == ("active", 0)


def test_goal_outlives_the_supervisor_and_a_hand_over_ends_a_rest(pod, directory, lock):
    """Goal: who stood asleep stands asleep. Method: kill the supervisor of a resting engine; the
    next one is granted into rest, without a wake, and hands over from there."""
    first = pod.active("e-0", *RESTS, flags=QUICK)
    with first.client() as client:
        shall(client, Tier.WARM)
        first.until("resting")
    path = engine_state(str(directory), "e-0")  # written on a thread
    until(lambda: state_file.load(path)[0].goal == "warm", "the goal on file")
    first.stop()
    engine = pod.engine("e-0", *RESTS, flags=QUICK)
    engine.until("resting")
    assert "waking" not in states(engine)
    lock.call(hand_over, lock)
    until(lambda: lock.want is not None and lock.want.over == 2, "the word")


def test_goal_that_cannot_be_is_refused(pod, lock):
    """Goal: a refusal names the reason, and changes nothing. Method: a backend that cannot."""
    engine = pod.active("e-0", flags=QUICK)
    with engine.client() as client, pytest.raises(UnderstudyError, match=r"engine\.cannot_rest"):
        client.request(m.SetGoalMsg(Tier.WARM, "a test"))
    with engine.client() as client:
        assert shall(client, None).goal is Tier.AWAKE
    assert engine.state == "active"


def hand_over(stub: StubLock) -> None:
    assert stub.want is not None
    incarnation = stub.want.incarnation
    assert incarnation is not None
    for conn in stub.server.connections:
        conn.send(HandOverMsg("active", incarnation, "e-1"))


def states(engine: Engine) -> list[str]:
    """Every state so far, in order."""
    records = events_of(engine_socket(str(engine.directory), engine.name), m.CONTROL)
    return [each["data"]["to"] for each in records if each["type"] == "engine.state"]
