"""The proposal for a size that was not given, from vLLM's own configuration; and the warnings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM say of themselves as they are imported
    from vllm.engine.arg_utils import EngineArgs

from engine.backends.vllm import kv_size

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


def test_refusal_shows_the_arithmetic(configure: Any):
    """A flag to copy, and every factor of it."""
    error = kv_size.refusal(configure())
    assert (error.code, error.exit_code) == ("vllm.no_kv_size", 2)
    size, per_token = error.details["proposed_bytes"], error.details["bytes_per_token"]
    assert f"--kv-cache-memory-bytes {size}: 4 sequences of 1056 tokens" in error.message
    assert (
        f"at {per_token} bytes per token, rounded up to 64 MiB; each of the engine's ranks (1)"
        in error.message
    )


def test_pinned_memory_is_warned_about(configure: Any):
    """Each setting by its flag; none by default."""
    assert kv_size.warnings(configure()) == []
    config = configure(cpu_offload_gb=2)
    config.cache_config.kv_offloading_size = 3.5
    config.offload_config.prefetch.offload_group_size = 8
    found = kv_size.warnings(config)
    said = ("--kv-offloading-size 3.5", "--cpu-offload-gb 2", "--offload-group-size 8")
    assert [text.partition(" (")[0] for text in found] == list(said)
    assert all("--reap-ms" in text for text in found)


@pytest.mark.parametrize("v2", [False, True])
def test_what_v2_keeps_for_its_requests_is_said_with_a_proposal(
    configure: Any, v2: bool, monkeypatch: pytest.MonkeyPatch
):
    """1024 requests × 152,064 tokens × 4 bytes; a KV cache for 20 requests of 1,024 tokens."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2)))
    config = configure(max_num_seqs=1024)
    monkeypatch.setattr(config.model_config, "get_vocab_size", lambda: 152_064)
    config.cache_config.kv_cache_memory_bytes = 20 * 1024 * kv_size.propose(config).bytes_per_token
    assert kv_size.bytes_of_requests(config, 1024) == (622_854_144, 1024 * 1000 * 4)
    found = kv_size.warnings(config)
    assert len(found) == int(v2)
    assert all("--max-num-seqs 1024" in each and "--max-num-seqs 32 " in each for each in found)
    config.scheduler_config.max_num_seqs = 16
    assert kv_size.warnings(config) == []
