"""A tensor left unbound is an error that names it, in either direction."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.backends.reference.checkpoint import DTYPE, Checkpoint, check_bound, open_checkpoint
from gms.manifest import TensorRecord
from plumbing.errors import UnderstudyError
from tests.engine.reference.support import golden

EPOCH = "e" * 32


def found_for(checkpoint: Checkpoint) -> dict[str, TensorRecord]:
    return {
        t.name: TensorRecord(name=t.name, offset=0, nbytes=t.nbytes, shape=t.shape, dtype=DTYPE)
        for t in checkpoint.tensors
    }


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(golden("tied-f32"))


def test_exactly_the_models_tensors_are_bound(checkpoint: Checkpoint):
    """What the writer places is what an importer binds."""
    check_bound(checkpoint.tensors, EPOCH, found_for(checkpoint))


@pytest.mark.parametrize("index", [0, 3, -1])
def test_tensor_that_the_epoch_lacks_is_named(checkpoint: Checkpoint, index: int):
    """Take one tensor out of the epoch: the error names it (a peer leaves it on `meta`)."""
    found = found_for(checkpoint)
    name = checkpoint.tensors[index].name
    del found[name]
    with pytest.raises(UnderstudyError, match=r"model\.unbound") as caught:
        check_bound(checkpoint.tensors, EPOCH, found)
    assert f"tensor {name} of the model is not in epoch {EPOCH}" in caught.value.message
    assert caught.value.details == {"missing": [name], "surplus": []}


def test_tensor_that_no_part_of_the_model_reads_is_named(checkpoint: Checkpoint):
    """Put two tensors more into the epoch: the error names one and counts the other."""
    found = found_for(checkpoint)
    for name in ("model.layers.0.self_attn.q_norm.weight", "other"):
        found[name] = replace(next(iter(found.values())), name=name)
    with pytest.raises(UnderstudyError, match=r"q_norm\.weight and 1 more of epoch") as caught:
        check_bound(checkpoint.tensors, EPOCH, found)
    assert caught.value.details["surplus"][1] == "other"


@pytest.mark.parametrize("change", [{"shape": (1, 4)}, {"dtype": "float16"}, {"nbytes": 4}])
def test_tensor_of_another_shape_or_type_is_named(checkpoint: Checkpoint, change: dict):
    """The same name with other bytes behind it: the error names both."""
    found = found_for(checkpoint)
    name = checkpoint.tensors[1].name
    found[name] = replace(found[name], **change)
    with pytest.raises(UnderstudyError, match=r"model\.unbound") as caught:
        check_bound(checkpoint.tensors, EPOCH, found)
    assert name in caught.value.message
