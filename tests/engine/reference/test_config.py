from __future__ import annotations

import json
import os
from typing import Any

import pytest

from engine.backends.reference.config import Rope, parse_config, read_config
from plumbing.errors import UsageError
from tests.engine.reference.support import copy_of, edit_json, golden

with open(os.path.join(golden("untied-gqa-bf16"), "config.json"), encoding="utf-8") as file:
    GOOD: dict[str, Any] = json.load(file)

UNSUPPORTED = [
    ("architectures", ["MistralForCausalLM"]),
    ("architectures", ["LlamaForSequenceClassification"]),
    ("model_type", "qwen3"),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("quantization_config", {"quant_method": "fp8"}),
    ("sliding_window", 4096),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ("partial_rotary_factor", 0.5),
    ("rope_interleaved", True),
]
BROKEN = [
    ("vocab_size", None),
    ("vocab_size", "many"),
    ("vocab_size", True),
    ("hidden_size", 0),
    ("hidden_size", -1),
    ("num_hidden_layers", 2.5),
    ("num_key_value_heads", 3),
    ("head_dim", 7),
    ("rms_norm_eps", "tiny"),
    ("rms_norm_eps", float("nan")),
    ("tie_word_embeddings", "yes"),
    ("eos_token_id", "</s>"),
    ("rope_parameters", "llama3"),
    ("rope_parameters", {"rope_type": "llama3"}),
    ("rope_parameters", {"rope_type": "linear", "factor": 0}),
]


@pytest.mark.parametrize(("key", "value"), UNSUPPORTED)
def test_parse_config_key_the_decoder_lacks_is_refused_by_name(key: str, value: Any):
    """No silent wrong text: each foreign value is refused, naming file, key and value."""
    with pytest.raises(UsageError) as caught:
        parse_config({**GOOD, key: value}, {}, "/m/config.json")
    assert caught.value.code == "model.unsupported"
    assert "/m/config.json" in caught.value.message
    assert key in caught.value.message


@pytest.mark.parametrize(("key", "value"), BROKEN)
def test_parse_config_nonsense_is_refused_by_name(key: str, value: Any):
    """A damaged file ends in a sentence: each impossible value, naming file and key."""
    with pytest.raises(UsageError) as caught:
        parse_config({**GOOD, key: value}, {}, "/m/config.json")
    assert caught.value.code == "model.broken"
    assert "/m/config.json" in caught.value.message


def test_parse_config_older_transformers_keys_mean_the_same():
    """`rope_theta` and `rope_scaling` of transformers 4 equal `rope_parameters` of 5."""
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain = {key: value for key, value in GOOD.items() if key != "rope_parameters"}
    old = {**plain, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    new = {**plain, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    assert parse_config(old, {}, "c") == parse_config(new, {}, "c")
    assert parse_config(old, {}, "c").rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    oldest = {**plain, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert parse_config(oldest, {}, "c").rope == Rope(10000.0, "linear", 2.0)
    assert parse_config({**plain, "rope_scaling": None}, {}, "c").rope == Rope(10000.0)


def test_read_config_generation_config_decides_when_text_ends(tmp_path: Any):
    """Chat models end by more than one token: the list in generation_config.json wins."""
    directory = copy_of("tied-f32", tmp_path)
    assert read_config(directory).eos_token_ids == (2,)
    path = os.path.join(directory, "generation_config.json")
    edit_json(path, lambda document: document.update(eos_token_id=[2, 5]))
    assert read_config(directory).eos_token_ids == (2, 5)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_read_config_file_that_is_no_json_object_is_named(tmp_path: Any, content: bytes):
    """Broken JSON of several kinds is one sentence with the file's name."""
    directory = copy_of("tied-f32", tmp_path)
    with open(os.path.join(directory, "config.json"), "wb") as target:
        target.write(content)
    with pytest.raises(UsageError, match=r"config\.json is not valid JSON") as caught:
        read_config(directory)
    assert caught.value.code == "model.broken"
