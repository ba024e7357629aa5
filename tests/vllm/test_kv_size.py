"""The size of a KV cache: the proposal where none was given, the refusal of one that is too
small."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from engine.backends.vllm import kv_size, membership, versions
from engine.backends.vllm.kv_size import check_holds_a_sequence
from engine.backends.vllm.worker.worker_cpu import CPUWorker
from engine.backends.vllm.worker.worker_gpu import GPUWorker
from plumbing.errors import UsageError
from plumbing.text import size
from tests.vllm.ranks import config_of

LAYERS, KV_HEADS, HEAD = 2, 2, 64  # of the small random checkpoint


@pytest.fixture(scope="module")
def configure(model: Path) -> Any:
    def made(**more: Any) -> Any:
        arguments = {"dtype": "float32", "max_model_len": 1000, "block_size": 32, **more}
        return EngineArgs(model=str(model), **arguments).create_engine_config()

    return made


@pytest.mark.parametrize(
    ("more", "per_token"),
    [
        ({}, 2 * LAYERS * KV_HEADS * HEAD * 4),
        ({"dtype": "bfloat16"}, 2 * LAYERS * KV_HEADS * HEAD * 2),
        ({"kv_cache_dtype": "fp8_e5m2"}, 2 * LAYERS * KV_HEADS * HEAD),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, 2 * LAYERS * HEAD * 4),
    ],
)
def test_bytes_of_a_token_are_those_of_one_rank(configure: Any, more: Any, per_token: int):
    """Layers, heads of this rank, both keys and values, the cache's own data type."""
    assert kv_size.propose(configure(**more)).bytes_per_token == per_token


def test_proposal_is_a_few_full_sequences_in_round_numbers(configure: Any):
    """1000 tokens are 32 blocks and vLLM's own one; fewer sequences where fewer are allowed."""
    found = kv_size.propose(configure())
    assert (found.tokens, found.sequences) == (33 * 32, kv_size.SEQUENCES)
    needed = found.tokens * found.sequences * found.bytes_per_token
    assert needed <= found.size_bytes < needed + kv_size.STEP_BYTES
    assert found.size_bytes % kv_size.STEP_BYTES == 0
    assert kv_size.propose(configure(max_num_seqs=1)).sequences == 1


@pytest.mark.parametrize("v2", [False, True])
def test_what_v2_keeps_for_its_requests_is_said(
    configure: Any, v2: bool, monkeypatch: pytest.MonkeyPatch
):
    """1024 requests × 152,064 tokens × 4 bytes are 622,854,144."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2)))
    config = configure(max_num_seqs=1024)
    monkeypatch.setattr(config.model_config, "get_vocab_size", lambda: 152_064)
    found = kv_size.warnings(config)
    assert len(found) == int(v2)
    assert all("--max-num-seqs 1024: every" in each and size(622_854_144) in each for each in found)
    config.scheduler_config.max_num_seqs = 16
    assert kv_size.warnings(config) == []


# ---------------------------------------------------------------------- a size that is too small


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
