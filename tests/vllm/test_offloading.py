"""Goal: nobody computes without weights that are away, and they are back before a wake goes on.

Method: our worker without vLLM's; the backend around a fake engine. What happens to the weights is
in `test_weights.py`, and a pod that does all of it in `test_pod_resume.py`.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.test_resting import BUDGET_S, World, world  # noqa: F401  # quiet; a fixture

# isort: split
from engine.backends.vllm import membership
from engine.backends.vllm.worker import offloading, weights
from engine.backends.vllm.worker.offloading import OffloadingWorker
from engine.messages import WeightsPlacedMsg
from plumbing.errors import ProtocolError, UnderstudyError

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
    assert (answer["ok"], answer["code"]) == (False, "vllm.not_parked")
    private = weights.RankWeights(SimpleNamespace())  # type: ignore[arg-type]
    private.cannot_offload = "it has a private copy"
    found, _ = make_worker(private, monkeypatch)
    answer = found.understudy_place_weights(True, 1.0)
    assert answer["ok"]
    assert (answer["is_away"], answer["note"]) == (False, "it has a private copy")


def test_a_wake_maps_what_was_released_before_it_takes_memory(world: World):  # noqa: F811
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
        world.engine.placed |= {"ok": False, "code": "x.y", "error": "it cannot"}
        with pytest.raises(UnderstudyError, match="it cannot"):
            await backend.place_weights(9.0, is_away=True)
        world.engine.placed["ok"] = True
        assert await woken(7) == restored
        await world.wake(8)
        with pytest.raises(ProtocolError, match="awake"):
            await backend.place_weights(9.0, is_away=True)
        await backend.drain(BUDGET_S)

    asyncio.run(scenario())


def test_a_release_that_a_wake_overtakes_does_nothing(world: World):  # noqa: F811
    """It waits for an earlier one, and finds that the engine is awake."""
    backend = world.backend

    async def scenario() -> None:
        backend.phases.step("ready")
        async with backend._offloading.lock:
            late = asyncio.create_task(backend.place_weights(9.0, is_away=True))
            await asyncio.sleep(0)
            await world.wake(3)
        assert await late == WeightsPlacedMsg(False)
        assert not [each for each in world.engine.asked if each[0] == PLACE]
        await backend.drain(BUDGET_S)

    asyncio.run(scenario())
