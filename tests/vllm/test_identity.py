"""What makes two engines' weights the same, and what must make them differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import MultiModalConfig

from engine.backends.vllm.worker import identity
from plumbing.errors import UsageError
from tests.vllm.ranks import config_of, written

MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("one") / "model", seed=1)


def read(config: Any) -> Any:
    return identity.Identity(config, config.load_config, "auto").read()


def differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one if one[name] != other[name]}


def test_identity_tells_files_apart(tmp_path: Path):
    """Safetensors by header and sample, other files by sample, and nothing is an error."""
    with pytest.raises(UsageError, match="has no") as found:
        identity.files_of(str(tmp_path))
    assert found.value.code == "model.missing"
    (tmp_path / "weights.bin").write_bytes(b"1" * MIB)
    one = identity.files_of(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"1" * (MIB - 1) + b"2")
    assert identity.files_of(str(tmp_path)) != one
    assert identity.files_of(str(tmp_path / "weights.bin")) == identity.files_of(str(tmp_path))
    model = written(tmp_path / "model", seed=6)
    assert set(identity.files_of(str(model))["model.safetensors"]) == {"header", "sample"}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("rank", 1, set()),
        ("decode_context_parallel_size", 2, {"decode_context"}),
        ("expert_placement_strategy", "round_robin", {"expert_placement"}),
        ("all2all_backend", "deepep_low_latency", {"all2all"}),
        ("dcp_q_replicate", True, {"query_replicated"}),
    ],
)
def test_identity_tells_apart_what_splits_weights(
    checkpoint: Path, field: str, value: Any, said: set[str]
):
    """A setting that gives a rank other weights of the same checkpoint, by its field. What the
    ranks of one engine must agree on is all but their number."""
    config = config_of(checkpoint)
    one = read(config)
    setattr(config.parallel_config, field, value)
    other = read(config)
    assert differences(one["parallel"], other["parallel"]) == said
    assert differences(one, other) == ({"parallel"} if said else {"rank"})
    same = identity.same_on_every_rank(one) == identity.same_on_every_rank(other)
    assert same == (field == "rank")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mm_encoder_tp_mode": "data"}, "encoder_split"),
        ({"mm_encoder_only": True}, "encoder_only"),
        ({"language_model_only": True}, "language_only"),
        ({"limit_per_prompt": {"image": 0}}, "absent"),
    ],
)
def test_identity_tells_encoders_apart(checkpoint: Path, settings: dict[str, Any], said: str):
    """Whether the parts beside the language model are there, and whether ranks split them."""
    config, found = config_of(checkpoint), []
    for each in ({}, settings):
        config.model_config.multimodal_config = MultiModalConfig(**each)
        found.append(read(config)["models"]["target"]["multimodal"])
    assert differences(*found) == {said}
