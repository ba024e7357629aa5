"""Weights through the memory service: what is shared, what is refused, what survives.

Two engines' ranks in this process, with real checkpoints and a real service; see `ranks`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import MultiModalConfig

from engine.backends import memory_session as session
from engine.backends.shards import same_on_every_rank
from engine.backends.vllm.worker import checkpoint_load, identity
from engine.backends.vllm.worker.binding import SHARED_BYTES_MIN
from gms import names
from plumbing.errors import RemoteError, UnderstudyError, UsageError
from tests.gms.bench import GmsProcess
from tests.gms.test_gms_offload import Copies
from tests.helpers import until
from tests.vllm.ranks import Rank, config_of, one_rank, written

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("ranks")):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("one") / "model", seed=1)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("two") / "draft", seed=2)


@pytest.fixture
def gms(monkeypatch: pytest.MonkeyPatch) -> Iterator[GmsProcess]:
    directory = tempfile.mkdtemp(prefix="gms-")
    monkeypatch.setenv(session.SOCKET_DIR_ENV, directory)
    server = GmsProcess(directory).start()
    yield server
    server.stop()
    shutil.rmtree(directory)


@pytest.fixture
def rank(gms: GmsProcess) -> Iterator[Callable[[str], Rank]]:
    """Makes ranks that end with the test."""
    made: list[Rank] = []

    def make(engine: str) -> Rank:
        made.append(Rank(engine))
        return made[-1]

    yield make
    for each in made:
        each.close()


def where(address: int) -> str:
    """The rights and the name of the mapping that `address` of this process is in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *name = line.split(maxsplit=5)
        first, end = (int(number, 16) for number in span.split("-"))
        if first <= address < end:
            return f"{rights} {''.join(name)}"
    return "unmapped"


def is_shared(tensor: torch.Tensor) -> bool:
    """Read-only, in memory that the service made."""
    found = where(tensor.data_ptr())
    return found.startswith("r--s /memfd:")


# ------------------------------------------------------------------ what is shared


def test_second_engine_maps_what_the_first_has_written(
    rank: Callable[[str], Rank], checkpoint: Path, gms: GmsProcess
):
    """Both ranks' models have the checkpoint's numbers at shared, read-only addresses; what is
    small and what is a buffer is private and can be written to; one epoch, said by both."""
    first, second = rank("engine-0"), rank("engine-1")
    models = [*first.load(checkpoint), *second.load(checkpoint)]
    stored = load_file(checkpoint / "model.safetensors")
    for model in models:
        mlp = model.model.layers[1].mlp.down_proj.weight
        torch.testing.assert_close(mlp, stored["model.layers.1.mlp.down_proj.weight"].float())
        for tensor in model.parameters():
            assert is_shared(tensor) == (tensor.nbytes >= SHARED_BYTES_MIN)
        buffers = list(model.buffers())
        assert buffers
        assert not any(is_shared(tensor) for tensor in buffers)
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name
    assert first.reader.is_author
    assert not second.reader.is_author
    assert first.said == second.said
    assert first.reader.epoch == second.reader.epoch == gms.status()["epoch"]
    assert first.weights.bytes == second.weights.bytes > 0


def test_draft_model_belongs_to_the_epoch_of_its_target(
    rank: Callable[[str], Rank], checkpoint: Path, draft: Path, gms: GmsProcess
):
    """Two calls of the loader, one commit after both; the reader finds each model's own tensors."""
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    first = rank("engine-0")
    written_models = first.load_only(checkpoint, speculative_config=speculative)
    assert gms.status()["state"] == "staging"
    first.weights.settle()
    second = rank("engine-1")
    models = second.load(checkpoint, speculative_config=speculative)
    for path, model, author in zip((checkpoint, draft), models, written_models, strict=True):
        stored = load_file(path / "model.safetensors")
        for each in (model, author):
            torch.testing.assert_close(
                each.model.layers[0].mlp.down_proj.weight,
                stored["model.layers.0.mlp.down_proj.weight"].float(),
            )
    names = second.reader.tensors
    assert {"0/model.embed_tokens.weight", "1/model.embed_tokens.weight"} <= set(names)
    assert first.reader.epoch == second.reader.epoch


def test_weights_survive_the_death_of_the_service(
    rank: Callable[[str], Rank], checkpoint: Path, gms: GmsProcess
):
    """SIGKILL the service under two engines: models compute on, the next service gets the same
    epoch from them, and a third engine maps it."""
    first, second = rank("engine-0"), rank("engine-1")
    (model,) = first.load(checkpoint)
    second.load(checkpoint)
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    gms.kill()
    keepers = [each.weights.kept.keeper for each in (first, second)]
    until(lambda: all(keeper.state == "rejoining" for keeper in keepers), "the loss to be seen")
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, before)
    gms.start()
    until(lambda: all(keeper.state == "attached" for keeper in keepers), "both to be back")
    third = rank("engine-2")
    third.load(checkpoint)
    assert third.reader.epoch == first.reader.epoch


def test_weights_of_a_model_come_back_where_they_were(
    rank: Callable[[str], Rank], checkpoint: Path, gms: GmsProcess, monkeypatch: pytest.MonkeyPatch
):
    """Load, copy, release: nothing of the shared tensors is mapped, the device is free, and private
    tensors stay. Mapped again, the same tensors have the same numbers at the same addresses; and
    once more. Without a copy they stay, with the reason."""
    monkeypatch.setattr(os, "setpriority", lambda *asked: None)  # a busy machine starves digests
    host = GmsProcess(gms.directory, device=names.offload_device(gms.device)).start()
    copies = Copies(gms)
    try:
        one = rank("engine-0")
        (model,) = one.load(checkpoint)
        ours = one.weights
        assert ours.kept.let_go()[0] == 0
        assert "no copy" in ours.kept.let_go()[1]
        assert not ours.kept.is_away
        until(lambda: gms.status()["digest"] not in (None, "pending"), "its digest")
        copies.settle()
        before = {name: tensor.clone() for name, tensor in model.named_parameters()}
        down = model.model.layers[0].mlp.down_proj.weight
        at, epoch = down.data_ptr(), ours.kept.reader.epoch
        for _ in range(2):
            assert ours.kept.let_go() == (ours.bytes, "")
            assert ours.kept.is_away
            assert gms.status()["state"] == "offloaded"
            assert where(at).startswith("---p")
            assert torch.equal(model.model.norm.weight, before["model.norm.weight"])
            ours.kept.bring_back(30)
            assert not ours.kept.is_away
            assert is_shared(down)
            assert down.data_ptr() == at
            for name, tensor in model.named_parameters():
                assert torch.equal(tensor, before[name]), name
        assert ours.kept.reader.epoch != epoch
        assert gms.status()["epoch"] == ours.kept.reader.epoch
    finally:
        copies.close()
        host.stop()


# ------------------------------------------------------------------ what is refused


def refused(rank: Rank, model: Path, **flags: Any) -> str:
    with pytest.raises(RemoteError) as found:
        rank.load(model, **flags)
    assert found.value.code == "gms.identity_mismatch"
    return found.value.message


def test_another_fine_tune_of_the_same_shape_is_refused(
    rank: Callable[[str], Rank], checkpoint: Path, tmp_path: Path
):
    """Same name, same configuration, same headers; only numbers differ."""
    rank("engine-0").load(checkpoint)
    said = refused(rank("engine-1"), written(tmp_path / "model", seed=3))
    assert "models.target.shards.model.safetensors.sample is " in said


def test_checkpoint_that_changes_while_it_is_loaded_is_not_published(
    rank: Callable[[str], Rank], tmp_path: Path, gms: GmsProcess
):
    """Replaced between load and commit by another fine-tune: an error, and nothing is there."""
    model = written(tmp_path / "model", seed=4)
    one = rank("engine-0")
    one.load_only(model)
    other = written(tmp_path / "other", seed=5)
    (other / "model.safetensors").replace(model / "model.safetensors")
    with pytest.raises(UnderstudyError, match="changed while it was read") as found:
        one.weights.settle()
    assert found.value.code == "model.changed"
    until(lambda: gms.status()["state"] == "empty", "the staging epoch to be dropped")


# ------------------------------------------------------------------ what cannot be shared


def test_unshareable_model_is_refused_or_loaded_privately_on_request(
    rank: Callable[[str], Rank], checkpoint: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
):
    """By default no engine holds a second copy. On request every engine loads for itself, on one
    epoch that says what it is: another model is refused as ever."""
    monkeypatch.setattr(checkpoint_load, "obstacle", lambda model, device: "layer x uses GPTQ")
    first = rank("engine-3")
    with pytest.raises(UsageError, match=r"layer x uses GPTQ.*--unshareable private") as found:
        first.load(checkpoint)
    assert found.value.code == "model.unshareable"
    first.close()  # it was to write them
    ranks = [rank("engine-0"), rank("engine-1")]
    for each in ranks:
        (model,) = each.load(checkpoint, unshareable="private")
        assert not any(is_shared(tensor) for tensor in model.parameters() if tensor.numel())
    assert ranks[0].reader.epoch == ranks[1].reader.epoch
    assert set(ranks[1].reader.tensors) == {"0/.model"}
    assert "'model' there" in refused(rank("engine-2"), draft, unshareable="private")


def test_quantised_layers_have_an_obstacle_by_name():
    """vLLM's own word is what counts; on the CPU only what we keep in place is shareable."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Packed(QuantizeMethodBase):
        supports_pre_processed_weights = False

        def create_weights(self, *args: Any, **kwargs: Any) -> None: ...
        def apply(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...  # type: ignore[empty-body]

    class Ready(Packed):
        supports_pre_processed_weights = True

    def model(method: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].quant_method = method
        return model

    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert "layer 0 uses Packed" in str(checkpoint_load.obstacle(model(Packed()), cuda))
    assert checkpoint_load.obstacle(model(Ready()), cuda) is None
    assert "layer 0 uses Ready" in str(checkpoint_load.obstacle(model(Ready()), cpu))
    linear = model(UnquantizedLinearMethod())
    assert "UnquantizedLinearMethod" in str(checkpoint_load.obstacle(linear, cpu))
    checkpoint_load.keep_in_place(linear, cpu)
    assert checkpoint_load.obstacle(linear, cpu) is None


# ------------------------------------------------------------------ what makes them the same


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
    same = same_on_every_rank(one) == same_on_every_rank(other)
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
