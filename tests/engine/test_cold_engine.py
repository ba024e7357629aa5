"""The goal `cold`, and a pool's words to an engine of a model: real processes, a stub lock."""

from __future__ import annotations

import signal

import pytest

from engine.supervisor import state_file
from plumbing.errors import RemoteError
from plumbing.pod.messages import EngineReportMsg, GoalGeneration, PoolGoal, SetGoalMsg, Tier
from plumbing.wire.blocking import BlockingClient
from tests.engine.pod import QUICK, Engine
from tests.engine.stub_lock import StubLock
from tests.engine.test_in_place import RESTS, heard_until, shall
from tests.helpers import until

MODEL = ("--model-name", "chat")


@pytest.fixture(autouse=True)
def locks_of_a_model(lock: StubLock) -> None:
    lock.auto = ("active:chat",)


def told(
    client: BlockingClient, goal: Tier, number: int, *, era: str = "e", is_kill: bool = False
) -> EngineReportMsg:
    """A pool's goal, and the answer."""
    pool = PoolGoal("chat", GoalGeneration(era, 1, number), is_kill)
    reply = client.request(SetGoalMsg(goal, "the pool", pool), timeout_s=30).message
    assert isinstance(reply, EngineReportMsg)
    return reply


def is_cold(engine: Engine) -> bool:
    return engine.reason.startswith("made cold")


def test_engine_of_a_model_uses_the_models_locks_and_tells_a_pool_what_it_must_know(pod, lock):
    """Goal: `am` has what the pool's books need. Method: an engine that is awake, and a look."""
    engine = pod.engine("chat-0", *RESTS, flags=(*QUICK, *MODEL))
    document = engine.until("active")
    assert document["engine"]["model"] == "chat"
    until(lambda: lock.want and lock.want.token, "its claim")
    assert lock.want.lock == "active:chat"
    with engine.client() as client:
        word = shall(client, None)
        assert (word.model, word.generation, word.is_permanent) == ("chat", None, False)
        assert told(client, Tier.WARM, 3).generation == GoalGeneration("e", 1, 3)
        assert told(client, Tier.AWAKE, 2).goal is Tier.WARM  # older
        with pytest.raises(RemoteError, match=r"engine\.other_model"):
            client.request(SetGoalMsg(Tier.COLD, "x", PoolGoal("coder", GoalGeneration("e", 1, 9))))


def test_engine_that_is_told_to_stop_says_so_before_its_end(pod, lock):
    """Goal: a pool can tell a stop from a death. Method: SIGTERM while a pool listens."""
    engine = pod.active("chat-0", *RESTS, flags=(*QUICK, *MODEL))
    with engine.client() as client:
        before = shall(client, None)
        assert not before.is_leaving
        engine.process.send_signal(signal.SIGTERM)
        said = client.receive(timeout_s=30).message
        assert isinstance(said, EngineReportMsg)
        assert (said.incarnation, said.is_leaving) == (before.incarnation, True)


def test_engine_is_cold_until_it_is_asked_for_more_and_again_when_asked(pod, lock):
    """Goal: a cold engine is a supervisor alone, which says why, whose probes restart nothing, and
    which a restarted supervisor leaves so. Method: start cold; warm; cold again; restart; awake."""
    engine = pod.engine("chat-0", *RESTS, flags=(*QUICK, *MODEL, "--goal", "cold"))
    until(lambda: is_cold(engine), "a supervisor without a backend")
    assert engine.get("/startup")[0] == engine.get("/live")[0] == 200
    assert engine.get("/ready")[0] == 503
    until(lambda: lock.want and lock.want.incarnation is None, "its want")
    with engine.client() as client:
        told(client, Tier.WARM, 1)
        heard_until(client, "resting")  # the stub grants at once
        assert engine.pids()
        told(client, Tier.COLD, 2)
        assert heard_until(client, "dead")[-1].fault == ""
        until(lambda: is_cold(engine), "the end of all processes")
        assert engine.reason == "made cold by the pool: no backend runs"
        until(lambda: lock.want and lock.want.incarnation is None, "the lock to be given up")
        assert engine.pids() == {}
        assert told(client, Tier.WARM, 2).goal is Tier.COLD  # not acted on twice
    engine.stop()
    engine = pod.engine("chat-0", *RESTS, flags=(*QUICK, *MODEL))
    until(lambda: is_cold(engine), "the next supervisor, still cold")
    with engine.client() as client:
        assert told(client, Tier.WARM, 1).goal is Tier.COLD  # older than what is on file
        told(client, Tier.AWAKE, 3)
    engine.until("active")


def test_first_load_of_an_engine_that_was_cold_is_not_taken_for_a_hang(pod, lock):
    """Goal: a kubelet whose startup probe has passed does not kill it while it loads. Method: a
    backend that hangs before it is prepared; the probes, also of the next supervisor."""
    hangs = ("--hang-at", "prepare")
    engine = pod.engine("chat-0", *hangs, flags=(*QUICK, *MODEL, "--goal", "cold"))
    until(lambda: is_cold(engine), "a supervisor without a backend")
    with engine.client() as client:
        told(client, Tier.WARM, 1)
    engine.until("init")
    assert engine.get("/startup")[0] == engine.get("/live")[0] == 200
    on_file = str(pod.directory / "engine_chat-0.json")
    until(lambda: state_file.load(on_file)[0].was_cold, "the state on file")
    engine.stop()
    engine = pod.engine("chat-0", *hangs, flags=(*QUICK, *MODEL))
    engine.until("init")
    assert engine.get("/startup")[0] == engine.get("/live")[0] == 200
