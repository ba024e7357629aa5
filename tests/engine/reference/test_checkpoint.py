"""A checkpoint on its way into memory: what is understood or refused by name, its identity."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from engine.backends.process import fault_report
from engine.backends.reference import checkpoint as module
from engine.backends.reference.checkpoint import identity, open_checkpoint
from engine.backends.reference.config import parse_config
from engine.backends.shards import read_file, read_shard
from plumbing.errors import UnderstudyError, UsageError
from tests.engine.reference.support import GOLDEN_NAMES, copy_of, edit_header, golden, load
from tests.helpers import descriptors_below

with open(os.path.join(golden("untied-gqa-bf16"), "config.json"), encoding="utf-8") as file:
    GOOD: dict[str, Any] = json.load(file)

WRONG: list[tuple[str, Any, str]] = [
    ("architectures", ["MistralForCausalLM"], "model.unsupported"),
    ("hidden_act", "gelu", "model.unsupported"),
    ("quantization_config", {"quant_method": "fp8"}, "model.unsupported"),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "model.unsupported"),
    ("rope_parameters", {"rope_type": "yarn"}, "model.unsupported"),
    ("vocab_size", None, "model.broken"),
    ("vocab_size", True, "model.broken"),
    ("hidden_size", 0, "model.broken"),
    ("num_key_value_heads", 3, "model.broken"),
    ("head_dim", 7, "model.broken"),
    ("rms_norm_eps", float("nan"), "model.broken"),
    ("eos_token_id", "</s>", "model.broken"),
    ("rope_parameters", {"rope_theta": -1}, "model.broken"),
]


@pytest.mark.parametrize(("key", "value", "code"), WRONG)
def test_parse_config_what_the_decoder_lacks_and_nonsense_are_refused(
    key: str, value: Any, code: str
):
    """No silent wrong text: each foreign or impossible value is refused, naming the file."""
    with pytest.raises(UsageError) as caught:
        parse_config({**GOOD, key: value}, "/m/config.json")
    assert caught.value.code == code
    assert "/m/config.json" in caught.value.message
    assert code == "model.broken" or key[:4] in caught.value.message


def test_eos_may_be_one_token_or_several():
    """Chat models end by more than one token."""
    assert parse_config(GOOD, "c").eos_token_ids == (2,)
    assert parse_config({**GOOD, "eos_token_id": [2, 5]}, "c").eos_token_ids == (2, 5)


SHARDED = "sharded-bf16"


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_load_into_small_pieces_report_every_byte(name: str, monkeypatch: pytest.MonkeyPatch):
    """Progress only grows and ends at the total; pieces that cut tensors change no byte."""
    whole = {key: bytes(view) for key, view in load(open_checkpoint(golden(name))).items()}
    monkeypatch.setattr(module, "READ_BYTES", 200)
    checkpoint = open_checkpoint(golden(name))
    memory: dict[str, bytearray] = {}
    seen: list[tuple[int, int]] = []

    def place(key: str, nbytes: int, shape: tuple[int, ...], dtype: str) -> memoryview:
        memory[key] = bytearray(nbytes)
        return memoryview(memory[key])

    checkpoint.load_into(place, lambda done, total: seen.append((done, total)))
    assert {key: bytes(value) for key, value in memory.items()} == whole
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (checkpoint.weights_bytes, checkpoint.weights_bytes)
    memory[checkpoint.tensors[0].name].clear()  # BufferError if a view had been kept


def _remove(name: str) -> Callable[[str], None]:
    return lambda directory: os.unlink(os.path.join(directory, name))


def _cut(name: str, size: int) -> Callable[[str], None]:
    return lambda directory: os.truncate(os.path.join(directory, name), size)


def _header(change: Callable[[dict[str, Any]], Any], name: str = "model.safetensors") -> Any:
    return lambda directory: edit_header(os.path.join(directory, name), change)


def _write(name: str, content: bytes) -> Callable[[str], None]:
    def write(directory: str) -> None:
        with open(os.path.join(directory, name), "wb") as file:
            file.write(content)

    return write


NORM = "model.norm.weight"
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LAST = "model-00003-of-00003.safetensors"
DAMAGE: list[tuple[Callable[[str], None], str]] = [
    (_remove("config.json"), "model.missing: config.json"),
    (_remove(WEIGHTS), "model.missing: neither"),
    (_cut(WEIGHTS, 100), "model.broken: truncated"),
    (_write(WEIGHTS, b"\x04" + b"\0" * 7 + b"oops"), "model.broken: not valid JSON"),
    (_header(lambda h: h.pop(NORM)), f"model.broken: {NORM}"),
    (_header(lambda h: h.update({"extra.bias": EMPTY})), "model.unsupported: extra.bias"),
    (_header(lambda h: h[NORM].update(shape=[4, 8])), "model.broken: [4, 8]"),
    (_header(lambda h: h[NORM].update(dtype="I32")), "model.unsupported: I32"),
    (_header(lambda h: h[NORM].update(data_offsets=[0, 128])), "model.broken: overlap"),
]
UP = b'{"weight_map": {"a": "../../etc/passwd"}}'
DAMAGE_OF_SHARDS = [
    (_cut(LAST, 11_959), "model.broken: truncated"),
    (_write(INDEX, b"{}"), "model.broken: weight_map"),
    (_write(INDEX, UP), "model.broken: plain file name"),
]


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        *(("tied-f32", *each) for each in DAMAGE),
        *((SHARDED, *each) for each in DAMAGE_OF_SHARDS),
    ],
)
def test_open_checkpoint_damaged_is_one_sentence(name: str, damage: Any, said: str, tmp_path: Any):
    """Every kind of damage is found before any weight is read, with the cause and the fix."""
    directory = copy_of(name, tmp_path)
    damage(directory)
    with pytest.raises(UsageError) as caught:
        open_checkpoint(directory)
    code, _, expected = said.partition(": ")
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
    assert expected in caught.value.message
    assert "\n" not in caught.value.message


def test_load_into_file_cut_after_opening_is_refused(tmp_path: Any):
    """A checkpoint replaced under the loader's feet: cut the file between header and load."""
    directory = copy_of("tied-f32", tmp_path)
    checkpoint = open_checkpoint(directory)
    os.truncate(os.path.join(directory, "model.safetensors"), 60_000)
    with pytest.raises(UsageError, match="while it was read"):
        load(checkpoint)


def test_identity_sees_a_fine_tune_whose_headers_are_equal(tmp_path: Any):
    """Same structure, other weights: flip one byte at the start of one tensor."""
    directory = copy_of("tied-f32", tmp_path)
    before = identity(directory)
    stored = open_checkpoint(directory).tensors[3].stored
    with open(stored.shard, "r+b") as file:
        file.seek(stored.offset)
        byte = file.read(1)[0]
        file.seek(stored.offset)
        file.write(bytes([byte ^ 1]))
    after = identity(directory)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"shards"}
    assert (
        before["shards"]["model.safetensors"]["header"]
        == (after["shards"]["model.safetensors"]["header"])
    )


@pytest.mark.parametrize("read", [read_file, read_shard])
def test_a_file_that_the_disk_does_not_give_is_not_called_broken(read):
    """Method: a file whose first bytes the kernel answers with EIO."""
    with pytest.raises(UnderstudyError) as caught:
        read("/proc/self/mem")
    assert caught.value.code == "model.unreadable"
    report = fault_report(caught.value, "e-0-1")
    assert (report.is_machine, report.permanent) == (True, False)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_cannot_be_opened_for_lack_of_descriptors_is_not_called_broken(name: str):
    """Goal: the launch is repeated, while a broken checkpoint ends the engine. Method: a process
    that may open nothing."""
    path = os.path.join(golden("tied-f32"), name)
    read = read_shard if name == "model.safetensors" else read_file
    with descriptors_below(3), pytest.raises(UnderstudyError) as caught:
        read(path)
    assert caught.value.code == "model.shortage"
    assert not isinstance(caught.value, UsageError)
    assert path in caught.value.message
