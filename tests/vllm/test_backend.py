"""Goal: what vLLM's answers mean for an incarnation: ranks that fail or fall silent, invalid
tokens, a loop that hangs; and an engine that rests has given everything back, or ends.

Method: the backend around a fake engine and front that write down what is asked of them, and the
real serving file. What a real vLLM does is in `test_pod_resume.py`.
"""

from __future__ import annotations

import asyncio
import math
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.kv_range import Backing
from engine.backends.vllm import contracts, membership
from engine.backends.vllm.api import backend as backend_module
from engine.backends.vllm.api.backend import VllmBackend, generate_one
from engine.backends.vllm.api.features import Features
from engine.backends.vllm.api.kept_memory import KeptMemory
from engine.backends.vllm.resume.answer import Continuing
from engine.backends.vllm.worker import weights
from engine.backends.vllm.worker.worker import ParkingWorker, StockGPUWorker
from engine.messages import WeightsPlacedMsg, WokenMsg
from lockserver import serving
from plumbing.errors import UnderstudyError
from plumbing.gateway_protocol import Continuation
from plumbing.wire.fds import OwnedFd
from tests.vllm.fake_engine import FINE, POOL, STATUS, FakeEngine, FakeFront

INCARNATION = f"e-{1:016x}"
BUDGET_S = 60.0


class World:
    """An engine with the memory service's KV memory, and its serving file."""

    def __init__(self, directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = str(directory)
        self.path, self.file = serving.create(self.directory, INCARNATION)
        self.engine = FakeEngine()
        self.asked = self.engine.asked
        self.kept = KeptMemory(is_shared=True)
        self.backend = self.made(kv=self.kept, seat=serving.ServingSeat(self.path, self.file))

    def made(self, *more: Any, **named: Any) -> VllmBackend:
        front: Any = FakeFront(self.engine)
        engine: Any = self.engine
        self.backend = VllmBackend(engine, front, *more, **named)
        return self.backend

    async def wake(self, token: int) -> WokenMsg:
        with OwnedFd(socket.socket().detach()) as listening:
            return await self.backend.wake(token, "e" * 16, listening)

    async def awake(self) -> None:
        """For token 3, and drained."""
        self.backend.is_parked = True
        await self.wake(3)
        self.asked.clear()
        await self.backend.drain(BUDGET_S)

    async def woken(self) -> WokenMsg:
        """The answer to a wake of a prepared engine."""
        await self.backend.prepare()
        self.asked.clear()
        self.engine.arguments.clear()
        try:
            return await self.wake(3)
        finally:
            await self.backend.drain(0.0)  # closes the copy that it has kept

    def is_held(self) -> bool:
        return serving.probe(self.path, self.file, 0).value == "held"


@pytest.fixture
def world(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


@pytest.fixture
def alone(world: World) -> World:
    """Of two ranks, with private memory and no serving file."""
    world.engine.answers["understudy_status"] = [STATUS, {**STATUS, "rank": 1}]
    world.engine.answers["understudy_take_kv"] = [FINE] * 2
    world.made()
    return world


def test_an_engine_is_parked_before_it_reports_prepared(alone: World):
    """Goal: an engine holds no KV memory when it reports `prepared`; a wake asks every rank before
    it waits for memory, so that a rank that hangs costs seconds. Method: the order of calls."""
    prepared = asyncio.run(alone.backend.prepare())
    assert alone.asked == [("sleep", 1, "abort"), "understudy_status"]
    of_both = (prepared.weights_bytes, prepared.kv_bytes, prepared.epoch)
    assert of_both == (20, 40, "e")
    alone.made()
    assert asyncio.run(alone.woken()) == WokenMsg()
    assert alone.asked == ["understudy_join", "understudy_take_kv", "wake_up"]


@pytest.mark.parametrize(
    ("problem", "failures", "why"),
    [
        ("", 2, ""),
        ("the seed is lost", 0, "the seed is lost"),
        ("", 3, "the last 3 launches ended"),
    ],
)
def test_without_a_proof_nothing_is_continued_published_or_put_to_sleep(
    alone: World, monkeypatch, problem: str, failures: int, why: str
):
    """The engine serves all the same, also one whose last launches have ended in the test."""
    found = Continuing(Continuation.STATE, "an id")

    async def run(test: Any) -> str:
        return problem

    monkeypatch.setattr(backend_module.SelfTest, "__init__", lambda *asked: None)
    monkeypatch.setattr(backend_module.SelfTest, "run", run)
    monkeypatch.setenv("UNDERSTUDY_FAILURES", str(failures))
    seat = SimpleNamespace()
    features = Features()
    features.is_tested = True
    backend = alone.made(features, alone.kept, seat, lambda identity: found)
    prepared = asyncio.run(backend.prepare())
    assert prepared.continuation == ("" if why else "an id")
    assert prepared.can_rest == (not why)
    assert [why in each for each in prepared.warnings] == ([True, True] if why else [])
    assert why in alone.kept.problem
    assert alone.engine.continuing == (Continuing() if why else found)  # type: ignore[attr-defined]


async def test_a_parked_engine_that_falls_silent_is_reported_dead(alone: World, monkeypatch):
    """Goal: a standby that could not take over is found before it is needed; method: a call to the
    ranks that never ends, after the engine has been prepared."""
    monkeypatch.setattr(backend_module, "PARKED_WAIT_S", 0.01)
    monkeypatch.setattr(backend_module, "PARKED_CHECK_S_PER_RANK", 0.0)
    said = []

    def dead(error: UnderstudyError) -> None:
        said.append(error.code)
        alone.engine.errored = True  # what ends the watch; the process would be gone

    await alone.backend.prepare()
    alone.engine.hangs.add("understudy_status")
    await alone.backend.watch(dead)
    assert said[0] == "vllm.silent"


@pytest.mark.parametrize(
    ("token", "logprob", "what"),
    [(5, float("nan"), "nan"), (5, float("inf"), "inf"), (5, 0.5, "0.5"), (100, -1.0, "100")],
)
async def test_an_invalid_token_fails_the_canary_and_is_reported(alone, token, logprob, what):
    """Goal: damaged weights do not serve, and their epoch is distrusted; nor does an engine that
    fails its trial become a standby. Method: numbers that no sound model gives. A positive number
    is none of a log-probability, but may be a logit."""
    engine, backend = alone.engine, alone.backend
    await backend.prepare()
    assert (await backend.run_canary()).ok
    engine.token, engine.logprob = token, logprob
    canary = await backend.run_canary()
    assert not canary.ok
    assert what in canary.detail
    assert engine.asked[-1] == ("understudy_distrust", canary.detail)
    with pytest.raises(UnderstudyError, match=r"vllm\.trial_failed"):
        await alone.made().prepare()
    engine.model_config.logprobs_mode = "raw_logits"
    is_number = math.isfinite(logprob) and token < 100
    assert (await generate_one(engine, "r") is None) == is_number


# ---------------------------------------------------------------------- KV memory that is lent


def woken(world: World, core: Any = None, problem: str = "") -> WokenMsg:
    """With `core` for vLLM's."""
    if core is not None:
        world.engine.engine_core = SimpleNamespace(call_utility_async=core)
    world.made(kv=KeptMemory(problem, is_shared=True))
    return asyncio.run(world.woken())


def test_a_wake_on_borrowed_memory_says_what_was_adopted(world: World):
    """Every rank is told by which grant it borrows, and the core which pools there are."""

    async def core(method, asked):
        assert (method, asked["ranks"], asked["may_adopt"]) == ("understudy_begin_kv", [POOL], True)
        return {"problem": "", "adopted": 5, "why_empty": ""}

    assert woken(world, core) == WokenMsg("gms", 5)
    ((_, *grant),) = world.engine.arguments["understudy_take_kv"]
    assert grant == [3, "e" * 16]
    assert "understudy_forget_kv" not in world.asked


@pytest.mark.parametrize("problem", ["", "prefix caching is off"])
def test_an_index_that_nobody_keeps_is_forgotten_before_the_first_step(world: World, problem: str):
    """The core fails, or is not even asked: the engine is about to write over blocks that the index
    describes."""

    async def core(method, asked):
        raise RuntimeError("no pool")

    found = woken(world, core, problem)
    assert found.kv_note.startswith("no block is published")
    assert (problem or "no pool") in found.kv_note
    assert world.asked[-2:] == ["understudy_forget_kv", "wake_up"]
    world.engine.answers["understudy_forget_kv"] = [{**FINE, "code": "c.d", "problem": "x"}]
    with pytest.raises(UnderstudyError, match="x"):
        woken(world, core, problem)


# ---------------------------------------------------------------------- sleep


async def test_a_rest_gives_back_in_order_and_a_wake_takes_again(world: World):
    """Goal: what was published survives the reset of vLLM's cache at a hand-over; the core lets go
    before the ranks wait until the memory is free; this process leaves last. Method: the calls of a
    hand-over, of the wake after it under a later token, and of a rest that keeps nothing."""
    asked, backend = world.asked, world.backend
    await world.awake()
    assert world.is_held()
    rested = await backend.rest(BUDGET_S, keep_kv=True)
    assert (rested.kv_bytes_resident, world.is_held()) == (0, False)
    in_order = [("sleep", 1, "wait"), "understudy_leave"]
    closing = ["understudy_judge_kv", "understudy_close_kv"]
    assert asked == ["stop", *closing, *in_order, ("understudy_rest", True)]
    assert backend.is_parked
    assert serving.probe(world.path, world.file, 3).value == "free"  # what the server does
    asked.clear()
    await world.wake(4)
    assert world.is_held()
    joining = ["understudy_join", "understudy_join"]  # the core, and the ranks
    assert asked == [*joining, "understudy_take_kv", "understudy_begin_kv", "wake_up"]
    asked.clear()
    await backend.drain(BUDGET_S)
    await backend.rest(BUDGET_S, keep_kv=False)
    assert asked == ["stop", *in_order, ("understudy_rest", False)]


@pytest.mark.parametrize("what", ["sleep", "requests"])
async def test_a_rest_past_its_budget_aborts_requests(world: World, what: str):
    """A sleep that waits is overtaken, and not given up, which would park the engine later, when it
    is awake again. Where requests do not end no index is kept: their steps would write over blocks
    after it was closed."""
    world.engine.is_busy = what == "sleep"
    world.engine.in_flight = int(what == "requests")
    await world.awake()
    await world.backend.rest(0.05, keep_kv=what == "requests")
    waiting = [("sleep", 1, "wait")] if what == "sleep" else []
    calls = ["stop", *waiting, ("sleep", 1, "abort"), "understudy_leave"]
    assert world.asked[: len(calls)] == calls


@pytest.mark.parametrize("what", ["requests", "core", "rank"])
async def test_an_engine_that_is_not_parked_everywhere_fails_and_holds_on(
    world: World, what: str, monkeypatch: pytest.MonkeyPatch
):
    """Goal: such an incarnation ends: it does not say `rested`, and still holds its serving file.
    Method: a request that vLLM has although it sleeps, a core that keeps its index, a rank with
    memory."""
    engine = world.engine

    async def sleep(level: int, mode: str) -> None:
        engine.in_flight = 1 if what == "requests" else 0

    await world.awake()
    monkeypatch.setattr(engine, "sleep", sleep)
    refused = {"code": "vllm.not_parked", "problem": "it cannot"}
    if what == "core":
        engine.core = refused
    if what == "rank":
        engine.answers["understudy_rest"][0] |= refused
    with pytest.raises(UnderstudyError) as found:
        await world.backend.rest(BUDGET_S, keep_kv=False)
    assert world.is_held()
    code = "vllm.rest_in_flight" if what == "requests" else "vllm.not_parked"
    assert found.value.code == code


def test_an_order_to_wake_for_a_token_that_is_over_takes_nothing(world: World):
    """The server has sealed the file: the order was sent before, and arrives after."""
    assert serving.probe(world.path, world.file, 3).value == "free"
    world.backend.is_parked = True
    with pytest.raises(UnderstudyError) as found:
        asyncio.run(world.wake(3))
    assert (found.value.code, world.asked) == ("serving.over", [])


def test_an_engine_that_cannot_rest_says_why(monkeypatch: pytest.MonkeyPatch, world: World):
    """One contract is broken: `prepared` does not promise it, and the warning has the contract."""
    config = SimpleNamespace(kv_transfer_config=None, use_v2_model_runner=False)
    others = {"resume": "not asked", "keep_kv": "not asked"}
    sources = contracts.installed()
    found = Features.find(config, sources, **others)
    assert (found.has("sleep"), found.has("offload")) == (True, True)
    monkeypatch.setattr(contracts, "broken", lambda *asked: ["a pause ends", "another"])
    why = Features.find(config, sources, **others).why_not["sleep"]
    assert why.endswith("a pause ends, and 1 more")
    config.kv_transfer_config = object()
    assert "connector" in Features.find(config, sources, **others).why_not["sleep"]
    warnings = world.made(Features(sleep=why))._warnings()
    assert warnings == (f"it hands over by a relaunch and never sleeps: {why}",)


# ---------------------------------------------------------------------- sleep without weights

PLACE = "understudy_place_weights"


def make_worker(ours: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """Our worker of rank 1 with `ours` for weights, and the reasons that it reports."""
    reported: list[str] = []
    member = SimpleNamespace(report=lambda error: reported.append(error.code), seat=None)
    monkeypatch.setattr(membership, "_member", member)
    monkeypatch.setattr(weights, "_of_this_process", ours)
    found = object.__new__(ParkingWorker)
    found.rank = 1
    return found, reported


def test_nothing_is_computed_without_weights(monkeypatch: pytest.MonkeyPatch):
    """Goal: a step that comes too early ends the incarnation with a reason, not by a SIGSEGV.
    Method: both kinds of steps, while the weights are away and once they are back."""
    kept = SimpleNamespace(is_away=True)
    found, reported = make_worker(SimpleNamespace(kept=kept), monkeypatch)
    done: list[str] = []
    monkeypatch.setattr(StockGPUWorker, "execute_model", lambda self, asked: done.append("step"))
    monkeypatch.setattr(StockGPUWorker, "execute_dummy_batch", lambda self: done.append("empty"))
    for step in (lambda: found.execute_model(None), found.execute_dummy_batch):
        with pytest.raises(UnderstudyError, match="rank 1 was asked to compute"):
            step()
    assert (reported, done) == (["vllm.weights_away"] * 2, [])
    kept.is_away = False
    found.execute_model(None)
    found.execute_dummy_batch()
    assert done == ["step", "empty"]


def test_weights_that_are_needed_or_not_the_services_stay(monkeypatch: pytest.MonkeyPatch):
    """A rank with KV memory refuses; private copies are no error: the note has the reason."""
    kept = SimpleNamespace(is_away=False)
    found, _ = make_worker(SimpleNamespace(kept=kept), monkeypatch)
    found.kv = SimpleNamespace(backing=Backing.TAKEN)
    assert found.understudy_place_weights(True, 1.0)["code"] == "vllm.not_parked"
    private = SimpleNamespace(kept=kept, cannot_offload="it has a private copy")
    found, _ = make_worker(private, monkeypatch)
    answer = found.understudy_place_weights(True, 1.0)
    assert (answer["problem"], answer["is_away"]) == ("", False)
    assert answer["note"] == "it has a private copy"


def test_a_rank_maps_what_was_released_before_it_takes_memory(monkeypatch: pytest.MonkeyPatch):
    """Goal: no rank has KV memory without its weights. Method: a rank whose weights do not come
    back, and one whose do."""
    done: list[str] = []
    kept = SimpleNamespace(bring_back=lambda budget_s: 1 / 0)
    found, _ = make_worker(SimpleNamespace(kept=kept), monkeypatch)
    found.kv = SimpleNamespace(take=lambda left_s: done.append("memory"))
    assert found.understudy_take_kv(9.0)["problem"]
    assert not done
    kept.bring_back = lambda budget_s: done.append("weights")
    assert not found.understudy_take_kv(9.0)["problem"]
    assert done == ["weights", "memory"]


async def test_weights_are_released_and_mapped_while_the_engine_is_parked(world: World):
    backend = world.backend
    await world.awake()
    await backend.rest(BUDGET_S, keep_kv=False)
    assert await backend.place_weights(9.0, is_away=True) == WeightsPlacedMsg(True, 1)
    assert world.asked[-1][:2] == (PLACE, True)
    world.engine.answers[PLACE][0].update({"code": "x.y", "problem": "it cannot"})
    with pytest.raises(UnderstudyError, match="it cannot"):
        await backend.place_weights(9.0, is_away=False)
    await world.wake(8)
    assert await backend.place_weights(9.0, is_away=True) == WeightsPlacedMsg(False)
    await backend.drain(BUDGET_S)


async def test_a_release_that_a_wake_overtakes_does_nothing(world: World):
    """It waits for an earlier one, and finds that the engine is awake."""
    backend = world.backend
    backend.is_parked = True
    async with backend._placing:
        late = asyncio.create_task(backend.place_weights(9.0, is_away=True))
        await asyncio.sleep(0)
        await world.wake(3)
    assert await late == WeightsPlacedMsg(False)
    assert not [each for each in world.asked if each[0] == PLACE]
    await backend.drain(BUDGET_S)
