"""Goal: whenever an engine dies, the index of its pool holds true records only, and with nothing in
flight all of them. Method: vLLM's real schedulers over a simulated device, by random schedules of
requests, aborts, preemptions, resets and deaths at every point of a step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.kept_world import Device, Engine, config_of

SEEDS = 25
STEPS = 120
MODES = [(False, False), (True, False), (False, True), (True, True)]


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: "async" * mode[0] + "prio" * mode[1])
def config(request: pytest.FixtureRequest, model: Path) -> Any:
    is_async, by_priority = request.param
    return config_of(model, is_async=is_async, by_priority=by_priority)


def live(engine: Engine, rng: random.Random, steps: int) -> None:
    """Anything may happen, and the index is read in between."""
    for _ in range(steps):
        match rng.randrange(20):
            case 0 | 1 | 2:
                engine.add_any()
            case 3:
                engine.abort()
            case 4 if rng.random() < 0.1:
                engine.reset()
            case 5 | 6 | 7 | 8 | 9 if engine.in_flight < engine.depth and engine.has_requests:
                engine.send()
            case 10 | 11 | 12 | 13:
                engine.write_some()
            case _:
                engine.process()
        engine.device.check()


def test_every_record_is_true_whenever_the_engine_dies(config: Any):
    adopted = published = 0
    for seed in range(SEEDS):
        rng, device = random.Random(seed), Device()
        for generation in range(3):
            engine = Engine(config, device, rng, f"e{seed}-{generation}")
            adopted += engine.adopted
            live(engine, rng, rng.randrange(STEPS))
            published += engine.counts.published
            assert engine.scheduler.kept.problem == ""
    assert adopted > SEEDS
    assert published > adopted


def test_engines_that_hand_over_in_turn_adopt_all_that_is_true(config: Any):
    """Two engines live on while they rest, and each finds whole what the other has left; and what
    it had hashed itself before it rested is forgotten."""
    adopted = 0
    for seed in range(SEEDS):
        rng, device = random.Random(seed), Device()
        first, second = (Engine(config, device, rng, f"e{seed}-{name}") for name in "ab")
        second.rest()
        first.rest()
        for turn in range(4):
            engine = (first, second)[turn % 2]
            left = device.check()
            engine.wake()
            assert engine.adopted == left == len(engine.hashed_blocks())
            adopted += left
            live(engine, rng, rng.randrange(STEPS))
            engine.rest()
            assert engine.hashed_blocks() == set()
            assert engine.scheduler.kept.problem == ""
    assert adopted > SEEDS


def test_with_nothing_in_flight_every_block_of_the_cache_is_published(config: Any):
    for seed in range(SEEDS):
        rng, device = random.Random(seed), Device()
        engine = Engine(config, device, rng, f"e{seed}")
        for _ in range(5):
            engine.add_any()
        while engine.has_requests or engine.in_flight:
            if engine.has_requests:
                engine.send()
            if not engine.has_requests or engine.in_flight == engine.depth:
                engine.process()
        assert device.check() == len(engine.hashed_blocks())


def test_block_of_a_request_that_is_taken_out_of_its_step_is_not_published(model: Path):
    """The first request is given the last two free blocks, and gives way to the second one in the
    same step. vLLM keeps the hash of the block that the second one does not need."""
    device, config = Device(), config_of(model, is_async=False, by_priority=True)
    config.scheduler_config.max_num_batched_tokens = 16
    config.scheduler_config.max_num_scheduled_tokens = 16
    config.scheduler_config.long_prefill_token_threshold = 8
    engine = Engine(config, device, random.Random(0), "e")

    def step() -> set[str]:
        sent = engine.send()
        engine.process()
        device.check()
        return set(sent.num_scheduled_tokens)

    first = engine.add([0] * 40, 4, priority=2)
    assert step() == {first}
    second = engine.add([1] * 4, 4, priority=0)
    assert step() == {first, second}
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 2)
    assert step() == {second}
    assert any(device.holds(block)[-1] is None for block in engine.hashed_blocks())
