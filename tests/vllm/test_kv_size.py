"""The size of a KV cache: the proposal where none was given, the refusal of one that is too
small."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from engine.backends.vllm import core_serving, kv_size, membership
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


def test_a_core_whose_cache_holds_no_sequence_reports_to_the_supervisor(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: the refusal of vLLM's own core is permanent, with our flag. Method: its planning, with
    workers that have two layers and one byte."""
    told: list[Any] = []
    monkeypatch.setattr(membership, "_member", SimpleNamespace(report=told.append))
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    config = config_of(model, block_size=16)
    config.cache_config.kv_cache_layout = "LBHNC"
    executor = SimpleNamespace(
        get_kv_cache_specs=lambda: [{"layers.0": spec, "layers.1": spec}],
        get_supported_kv_cache_layouts=list,
        set_kv_cache_layout=lambda name: None,
        determine_available_memory=lambda: [1],
    )
    core = SimpleNamespace(model_executor=executor, available_gpu_memory_for_kv_cache=0)
    with pytest.raises(UsageError) as found:
        core_serving.EngineCore._initialize_kv_caches(core, config)  # type: ignore[arg-type]  # a stand-in
    assert (told, found.value.code) == ([found.value], "vllm.kv_too_small")
    assert "--kv-cache-memory-bytes" in found.value.message
