"""Goal: an engine that rests has given everything back, or ends; nothing is left half done.

Method: the backend around a fake engine and front that write down what is asked of them, and the
real serving file. What a real vLLM does is in `test_pod_resume.py`.
"""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vllm import contracts, membership
from engine.backends.vllm.api.backend import StepCounter, VllmBackend
from engine.backends.vllm.api.features import Features
from engine.backends.vllm.api.kept_memory import KeptMemory, KvChoice
from engine.backends.vllm.worker import offloading, weights
from engine.backends.vllm.worker.offloading import OffloadingWorker
from engine.messages import WeightsPlacedMsg
from lockserver import serving
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.wire.fds import OwnedFd
from tests.vllm.fake_engine import FakeEngine, FakeFront

INCARNATION = f"e-{1:016x}"
BUDGET_S = 60.0


class World:
    """An engine that is awake for token 3, with the memory service's KV memory."""

    def __init__(self, directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GMS_SOCKET_DIR", str(directory))
        monkeypatch.setenv("UNDERSTUDY_INCARNATION", INCARNATION)
        self.path, self.file = serving.create(str(directory), INCARNATION)
        self.engine = FakeEngine()
        self.seat = serving.ServingSeat(self.path, self.file)
        self.backend = VllmBackend(
            self.engine,  # type: ignore[arg-type]
            FakeFront(self.engine),  # type: ignore[arg-type]
            StepCounter(),
            kv=KeptMemory(KvChoice(is_shared=True)),
            seat=self.seat,
        )

    async def wake(self, token: int) -> None:
        with OwnedFd(socket.socket().detach()) as listening:
            await self.backend.wake("e", token, listening)

    async def awake(self) -> None:
        self.backend.phases.step("ready")
        await self.wake(3)
        self.engine.asked.clear()
        await self.backend.drain(BUDGET_S)

    def is_held(self) -> bool:
        return serving.probe(self.path, self.file, 0).value == "held"


@pytest.fixture
def world(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_a_rest_gives_back_in_order_and_a_wake_takes_again(world: World):
    """Goal: what was published survives the reset of vLLM's cache at a hand-over; the core lets go
    before the ranks wait until the memory is free; this process leaves last. Method: the calls of a
    hand-over, of the wake after it under a later token, and of a rest that keeps nothing."""
    asked = world.engine.asked

    async def scenario() -> None:
        await world.awake()
        assert world.is_held()
        rested = await world.backend.rest(BUDGET_S, keep_kv=True)
        assert (rested.kv_bytes_resident, world.is_held()) == (0, False)
        in_order = [("sleep", 1, "wait"), "understudy_leave"]
        closing = ["understudy_judge_kv", "understudy_close_kv"]
        assert asked == ["stop", *closing, *in_order, ("understudy_rest", True)]
        assert world.backend.phases.is_parked
        assert serving.probe(world.path, world.file, 3).value == "free"  # what the server does
        asked.clear()
        await world.wake(4)
        assert world.is_held()
        joining = ["understudy_join", "understudy_join"]  # the core, and the ranks
        taking = [*joining, "understudy_take_kv", "understudy_begin_kv", "wake_up"]
        assert asked == taking
        asked.clear()
        await world.backend.drain(BUDGET_S)
        await world.backend.rest(BUDGET_S, keep_kv=False)
        assert asked == ["stop", *in_order, ("understudy_rest", False)]

    asyncio.run(scenario())


def test_a_sleep_past_its_budget_is_overtaken_and_not_given_up(world: World):
    """A sleep that was given up would park the engine later, when it is awake again."""
    world.engine.is_busy = True

    async def scenario() -> None:
        await world.awake()
        await world.backend.rest(0.05, keep_kv=False)
        assert world.engine.asked[1:3] == [("sleep", 1, "wait"), ("sleep", 1, "abort")]

    asyncio.run(scenario())


def test_requests_that_do_not_end_are_aborted_and_no_index_is_kept(world: World):
    """Their steps would write over blocks after the index was closed."""
    world.engine.in_flight = 1

    async def scenario() -> None:
        await world.awake()
        await world.backend.rest(0.05, keep_kv=True)
        assert world.engine.asked[:2] == ["stop", ("sleep", 1, "abort")]

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["requests", "core", "rank"])
def test_an_engine_that_is_not_parked_everywhere_fails_and_holds_on(
    world: World, what: str, monkeypatch: pytest.MonkeyPatch
):
    """Goal: such an incarnation ends: it does not say `rested`, cannot be woken, and still holds
    its serving file. Method: a request that vLLM has although it sleeps, a core that keeps its
    index, a rank with memory."""
    engine = world.engine

    async def sleep(level: int, mode: str) -> None:
        engine.in_flight = 1 if what == "requests" else 0

    async def scenario() -> str:
        await world.awake()
        monkeypatch.setattr(engine, "sleep", sleep)
        if what == "core":
            engine.core = {"code": "vllm.not_parked", "problem": "it cannot"}
        if what == "rank":
            engine.rested |= {"code": "vllm.not_parked", "problem": "it has some"}
        with pytest.raises(UnderstudyError) as found:
            await world.backend.rest(BUDGET_S, keep_kv=False)
        with pytest.raises(UnderstudyError):
            await world.wake(4)
        assert world.is_held()
        return found.value.code

    code = "vllm.rest_in_flight" if what == "requests" else "vllm.not_parked"
    assert asyncio.run(scenario()) == code


def test_an_order_to_wake_for_a_token_that_is_over_takes_nothing(world: World):
    """The server has sealed the file: the order was sent before, and arrives after."""
    assert serving.probe(world.path, world.file, 3).value == "free"
    world.backend.phases.step("ready")
    with pytest.raises(UnderstudyError) as found:
        asyncio.run(world.wake(3))
    assert (found.value.code, world.engine.asked) == ("serving.over", [])


def test_an_engine_that_cannot_rest_says_why(monkeypatch: pytest.MonkeyPatch, world: World):
    """One contract is broken: `prepared` does not promise it, and the warning has the contract."""
    broken = SimpleNamespace(__str__=lambda: "x")
    config = SimpleNamespace(kv_transfer_config=None, use_v2_model_runner=False)
    others = {"resume": "not asked", "keep_kv": "not asked"}
    sources = contracts.installed()
    found = Features.find(config, sources, **others)
    assert (found.has("sleep"), found.has("offload")) == (True, True)
    monkeypatch.setattr(contracts, "broken", lambda *asked: ["a pause ends", broken])
    found = Features.find(config, sources, **others)
    why = found.why_not["sleep"]
    assert why.endswith("a pause ends, and 1 more")
    config.kv_transfer_config = object()
    assert "connector" in Features.find(config, sources, **others).why_not["sleep"]
    world.backend._features = Features(sleep=why)
    assert world.backend._warnings() == (f"it hands over by a relaunch and never sleeps: {why}",)


PLACE = "understudy_place_weights"


def make_worker(ours: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[OffloadingWorker, list[str]]:
    """Our worker of rank 1 with `ours` for weights, and the reasons that it reports."""
    reported: list[str] = []
    member = SimpleNamespace(report=lambda error: reported.append(error.code))
    monkeypatch.setattr(membership, "_member", member)
    monkeypatch.setattr(weights, "_of_this_process", ours)
    found = object.__new__(OffloadingWorker)
    found.rank = 1
    return found, reported


def test_nothing_is_computed_without_weights(monkeypatch: pytest.MonkeyPatch):
    """Goal: a step that comes too early ends the incarnation with a reason, not by a SIGSEGV.
    Method: both kinds of steps, while the weights are away and once they are back."""
    ours = SimpleNamespace(is_away=True)
    found, reported = make_worker(ours, monkeypatch)
    done: list[str] = []
    stock = offloading.StockGPUWorker
    monkeypatch.setattr(stock, "execute_model", lambda self, asked: done.append("step"))
    monkeypatch.setattr(stock, "execute_dummy_batch", lambda self: done.append("empty"))
    for step in (lambda: found.execute_model(None), found.execute_dummy_batch):
        with pytest.raises(UnderstudyError, match="rank 1 was asked to compute"):
            step()
    assert (reported, done) == (["vllm.weights_away"] * 2, [])
    ours.is_away = False
    found.execute_model(None)
    found.execute_dummy_batch()
    assert done == ["step", "empty"]


def test_weights_that_are_needed_or_not_the_services_stay(monkeypatch: pytest.MonkeyPatch):
    """A rank with KV memory refuses; private copies are no error: the note has the reason."""
    ours = SimpleNamespace(is_awake=True, is_away=False)
    found, _ = make_worker(ours, monkeypatch)
    answer = found.understudy_place_weights(True, 1.0)
    assert answer["code"] == "vllm.not_parked"
    private = weights.RankWeights(SimpleNamespace())  # type: ignore[arg-type]
    private.cannot_offload = "it has a private copy"
    found, _ = make_worker(private, monkeypatch)
    answer = found.understudy_place_weights(True, 1.0)
    assert not answer["problem"]
    assert (answer["is_away"], answer["note"]) == (False, "it has a private copy")


def test_a_wake_maps_what_was_released_before_it_takes_memory(world: World):
    """Goal: vLLM is never woken without its weights, also if a release was not answered. Method:
    the calls of a release and of the wake after it; of a wake after one that failed; and of one
    without any, which asks for nothing."""
    asked, backend = world.engine.asked, world.backend
    taking = ["understudy_join", "understudy_join", "understudy_take_kv"]

    async def woken(token: int) -> list[Any]:
        asked.clear()
        await world.wake(token)
        found = [each for each in asked if each in taking or each[0] == PLACE]
        await backend.drain(BUDGET_S)
        await backend.rest(BUDGET_S, keep_kv=False)
        return found

    async def scenario() -> None:
        await world.awake()
        await backend.rest(BUDGET_S, keep_kv=False)
        assert await woken(4) == taking
        assert await backend.place_weights(9.0, is_away=True) == WeightsPlacedMsg(True, 1)
        restored = [taking[0], taking[1], (PLACE, False, 45.0), taking[2]]
        assert await woken(5) == restored
        assert await woken(6) == taking
        world.engine.placed |= {"code": "x.y", "problem": "it cannot"}
        with pytest.raises(UnderstudyError, match="it cannot"):
            await backend.place_weights(9.0, is_away=True)
        world.engine.placed["problem"] = ""
        assert await woken(7) == restored
        await world.wake(8)
        with pytest.raises(ProtocolError, match="awake"):
            await backend.place_weights(9.0, is_away=True)
        await backend.drain(BUDGET_S)

    asyncio.run(scenario())


def test_a_release_that_a_wake_overtakes_does_nothing(world: World):
    """It waits for an earlier one, and finds that the engine is awake."""
    backend = world.backend

    async def scenario() -> None:
        backend.phases.step("ready")
        async with backend._placing:
            late = asyncio.create_task(backend.place_weights(9.0, is_away=True))
            await asyncio.sleep(0)
            await world.wake(3)
        assert await late == WeightsPlacedMsg(False)
        assert not [each for each in world.engine.asked if each[0] == PLACE]
        await backend.drain(BUDGET_S)

    asyncio.run(scenario())
