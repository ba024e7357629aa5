"""A KV cache too small for one sequence: refused by the worker, which can report it, in bytes."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM say of themselves as they are imported
    from engine.backends.vllm.worker.worker_cpu import CPUWorker

# isort: split
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from engine.backends.vllm import membership, versions
from engine.backends.vllm.kv_size import check_holds_a_sequence
from engine.backends.vllm.worker.worker_gpu import GPUWorker
from plumbing.errors import UsageError
from tests.vllm.ranks import config_of

LAYERS, BLOCK = 2, 16
TOKENS = 256  # of `config_of`
BLOCK_BYTES = LAYERS * 2 * BLOCK * 2 * 32 * 4  # keys and values, two heads of 32, float32
NEEDED_BYTES = (TOKENS // BLOCK + 1) * BLOCK_BYTES  # vLLM keeps one block to itself


def layers(kind: Any = FullAttentionSpec, **more: Any) -> dict[str, Any]:
    spec = kind(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, **more)
    return {f"layers.{number}": spec for number in range(LAYERS)}


@pytest.fixture
def config(model: Any) -> Any:
    made = config_of(model, block_size=BLOCK)
    made.cache_config.kv_cache_layout = "LBHNC"  # what the engine core tells its workers
    return made


def test_size_is_refused_to_the_last_missing_byte(config: Any):
    """The sentence has both sizes and both ways out; what it asks for is taken, a byte less not."""
    check_holds_a_sequence(config, layers(), NEEDED_BYTES)
    for given in (0, 1, NEEDED_BYTES - 1):
        with pytest.raises(UsageError) as found:
            check_holds_a_sequence(config, layers(), given)
        assert (found.value.code, found.value.exit_code) == ("vllm.kv_too_small", 2)
        details = found.value.details
        assert (details["given_bytes"], details["needed_bytes"]) == (given, NEEDED_BYTES)
        for part in (str(given), str(NEEDED_BYTES), f"{TOKENS} tokens", "--max-model-len"):
            assert part in found.value.message


@pytest.mark.parametrize("given", [BLOCK_BYTES, 8 * BLOCK_BYTES, 64 * BLOCK_BYTES])
def test_answer_is_the_engine_cores_own(config: Any, given: int):
    """Layers of two kinds, which vLLM groups: refused if, and only if, its core would refuse."""
    mixed = layers() | {
        f"windows.{number}": each
        for number, each in enumerate(layers(SlidingWindowSpec, sliding_window=64).values())
    }
    try:
        versions.get_kv_cache_configs(config, [dict(mixed)], [given])
        is_enough = True
    except ValueError:
        is_enough = False
    try:
        check_holds_a_sequence(config, mixed, given)
    except UsageError as error:
        assert not is_enough
        check_holds_a_sequence(config, mixed, error.details["needed_bytes"])
    else:
        assert is_enough


def test_automatic_max_model_len_is_left_unchanged(config: Any):
    """With `--max-model-len auto` the engine core shortens it, for everybody, and not we."""
    config.model_config.original_max_model_len = -1
    check_holds_a_sequence(config, layers(), NEEDED_BYTES // 2)
    assert config.model_config.max_model_len == TOKENS


def test_model_without_a_cache_needs_none(config: Any):
    check_holds_a_sequence(config, {}, 0)


@pytest.mark.parametrize("kind", [CPUWorker, GPUWorker])
def test_worker_reports_to_the_supervisor_before_it_measures(
    config: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
):
    """The engine core asks its workers for sizes first: ours reports the refusal, and raises."""
    told: list[Any] = []
    monkeypatch.setattr(membership, "_member", SimpleNamespace(report=told.append))
    worker = object.__new__(kind)
    config.cache_config.kv_cache_memory_bytes = NEEDED_BYTES - 1
    worker.vllm_config, worker.cache_config = config, config.cache_config
    worker.model_runner = SimpleNamespace(get_kv_cache_spec=layers)
    with pytest.raises(UsageError) as found:
        worker.determine_available_memory()
    assert [error.code for error in told] == ["vllm.kv_too_small"]
    assert told == [found.value]
