"""Goal: a self-test runs once for each kind of engine, one at a time, and never for ever.

Method: tests that are functions, in a directory of their own.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM say of themselves as they are imported
    from engine.backends.vllm.api import self_test
    from engine.backends.vllm.api.self_test import NAME, Proof

ABOUT = {"driver": "1", "runner": "v2"}


class Test:
    __test__ = False

    def __init__(self, problem: str = "") -> None:
        self.problem, self.times = problem, 0

    async def run(self) -> str:
        self.times += 1
        return self.problem


def obtain(
    base: Path, test: Any, about: dict[str, Any] | None = None, *, forced: bool = False
) -> str:
    return asyncio.run(Proof(str(base), about or ABOUT, forced=forced).obtain(test.run))


def test_the_result_is_filed_and_asked_for_once(tmp_path: Path):
    """Another engine of the same kind is not tested; one with another driver or runner is."""
    test = Test()
    assert [obtain(tmp_path, test), obtain(tmp_path, test)] == ["", ""]
    assert test.times == 1
    assert obtain(tmp_path, test, {**ABOUT, "driver": "2"}) == ""
    assert obtain(tmp_path, test, {**ABOUT, "runner": "v1"}) == ""
    assert test.times == 3
    (first, *_) = json.loads((tmp_path / NAME).read_text()).values()
    assert (first["about"], first["attempts"], first["problem"]) == (ABOUT, 1, "")


def test_a_failure_is_filed_too_and_says_how_to_repeat_the_test(tmp_path: Path):
    bad, good = Test("token 3 is 1, not 2"), Test()
    for _ in range(2):
        why = obtain(tmp_path, bad)
        assert "token 3 is 1, not 2" in why
        assert str(tmp_path / NAME) in why
    assert bad.times == 1
    assert obtain(tmp_path, good, forced=True) == ""
    assert obtain(tmp_path, bad) == ""


def test_an_engine_that_ends_in_its_test_is_not_launched_into_it_for_ever(tmp_path: Path):
    class Ends(Test):
        async def run(self) -> str:
            self.times += 1
            raise RuntimeError("the worker died")

    test = Ends()
    for _ in range(self_test.ATTEMPTS_MAX):
        with pytest.raises(RuntimeError):
            obtain(tmp_path, test)
    assert f"{self_test.ATTEMPTS_MAX} engines ended" in obtain(tmp_path, test)
    assert test.times == self_test.ATTEMPTS_MAX


def test_the_second_engine_of_a_new_pod_waits_for_the_first_ones_result(tmp_path: Path):
    async def both() -> list[str]:
        may_end, has_begun = asyncio.Event(), asyncio.Event()
        first, second = Test(), Test()

        async def slow() -> str:
            has_begun.set()
            await may_end.wait()
            return await first.run()

        begun = asyncio.create_task(Proof(str(tmp_path), ABOUT, forced=False).obtain(slow))
        await has_begun.wait()
        other = asyncio.create_task(Proof(str(tmp_path), ABOUT, forced=False).obtain(second.run))
        await asyncio.sleep(0)
        may_end.set()
        found = [await begun, await other]
        assert (first.times, second.times) == (1, 0)
        return found

    assert asyncio.run(both()) == ["", ""]


def test_an_engine_whose_turn_does_not_come_does_without(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(self_test, "TURN_S", 0.0)
    test = Test()
    with open(tmp_path / f"{NAME}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another engine" in obtain(tmp_path, test)
    assert "cannot be filed" in obtain(tmp_path / "missing", test)
    assert test.times == 0


@pytest.mark.parametrize(
    "other",
    [
        {"use_v2_model_runner": True},
        {"model_config": SimpleNamespace(use_fp64_gumbel=True)},
        {"compute_hash": lambda: "other"},
        {"cache_config": SimpleNamespace(block_size=32, enable_prefix_caching=True)},
    ],
    ids=["runner", "noise", "computation", "blocks"],
)
def test_the_result_is_of_one_device_runner_and_configuration(other: dict[str, Any]):
    given = {
        "use_v2_model_runner": False,
        "model_config": SimpleNamespace(use_fp64_gumbel=False),
        "compute_hash": lambda: "digest",
        "cache_config": SimpleNamespace(block_size=16, enable_prefix_caching=True),
        "parallel_config": SimpleNamespace(world_size=2),
        "scheduler_config": SimpleNamespace(
            async_scheduling=True, max_num_seqs=8, max_num_batched_tokens=64
        ),
    }
    same = self_test.about(SimpleNamespace(**given))
    assert self_test.about(SimpleNamespace(**given)) == same
    assert len(same["devices"]) == 2
    assert same["driver"]
    assert self_test.about(SimpleNamespace(**{**given, **other})) != same
