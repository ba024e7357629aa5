"""A small module and bytes at an address: what is bound, what is copied, what is an error.

Plain torch modules replace vLLM's models: the tests are about tensors, and here any shape of tensor
is easy to make.
"""

from __future__ import annotations

import ast
import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.backends.vllm.worker.binding import (
    About,
    Binding,
    Layout,
    bytes_of,
    forms_of,
    rehome,
    tensor_at,
)
from engine.backends.vllm.worker.pulse import Meter
from gms.client import TensorRecord
from plumbing.errors import UnderstudyError
from tests.engine.pod import ROOT

CPU = torch.device("cpu")
MODEL_CONFIG: Any = SimpleNamespace(
    dtype=torch.float32, word_embeddings_untied_by_checkpoint=False, quantization=None
)
LARGE = 256  # squared, and four bytes each: more than what is copied


class Memory:
    """A writer without a service: tensors in a buffer of this process."""

    epoch = "e"

    def __init__(self) -> None:
        self.buffer = (ctypes.c_uint8 * (8 << 20))()
        self.tensors: dict[str, TensorRecord] = {}
        self.end = 0
        self.told: list[tuple[int, int]] = []

    def plan(self, total_bytes: int) -> None: ...

    def place(
        self,
        name: str,
        nbytes: int,
        shape: tuple[int, ...],
        dtype: str,
        strides: tuple[int, ...] | None = None,
    ) -> int:
        self.tensors[name] = TensorRecord(name, self.end, nbytes, tuple(shape), dtype, strides)
        self.end += -(-nbytes // 256) * 256
        return self.address(name)

    def alias(self, name: str, of: str) -> None:
        self.tensors[name] = self.tensors[of]

    def address(self, name: str) -> int:
        return ctypes.addressof(self.buffer) + self.tensors[name].offset

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.told.append((done_bytes, total_bytes))


def moved(model: nn.Module) -> tuple[Memory, About]:
    memory, about = Memory(), About()
    rehome(model, 0, memory, CPU, about, Meter(memory))  # type: ignore[arg-type]  # no Writer
    return memory, about


def bound(model: nn.Module, memory: Memory, about: About) -> Binding:
    """`model` (on meta), bound to what is in `memory`."""
    binding = Binding(model, memory, 0, CPU)  # type: ignore[arg-type]  # no Writer
    binding.run(about, MODEL_CONFIG)
    return binding


def fresh(kind: Callable[[], nn.Module]) -> Any:
    """A model without memory."""
    with torch.device("meta"):
        return kind()


class Tied(nn.Module):
    """Two names for one parameter, a strided one, a scale, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(LARGE, LARGE, bias=False)
        self.other = nn.Linear(LARGE, LARGE, bias=False)
        self.other.weight = self.one.weight
        self.turned = nn.Parameter(torch.randn(LARGE, LARGE + 1).t(), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("table", torch.arange(LARGE * LARGE).float(), persistent=False)


def test_model_is_moved_and_bound_with_its_ties_and_strides():
    """Every number comes back; ties stay one object and one place; strides stay; small tensors and
    buffers are copies of this process's own."""
    loaded = Tied()
    wanted = {name: tensor.clone() for name, tensor in loaded.named_parameters()}
    memory, about = moved(loaded)
    model = fresh(Tied)
    binding = bound(model, memory, about)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, wanted[name]), name
    assert model.other.weight is model.one.weight
    assert model.turned.stride() == (1, LARGE + 1)
    assert memory.tensors["0/other.weight"] is memory.tensors["0/one.weight"]
    assert set(binding.shared) == {"one.weight", "other.weight", "turned"}
    first = ctypes.addressof(memory.buffer)
    for tensor in (model.scale, model.table):
        assert not first <= tensor.data_ptr() < first + len(memory.buffer)
    assert "table" not in model.state_dict()
    assert about.buffers == ["table"]


class Hidden(Tied):
    """With tensors of which torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.impl = SimpleNamespace(scales=[torch.ones(3)], empty=torch.empty(0))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, f"tensor {name} of the model") for name in ("turned", "table", "scale")),
        ("lost.weight", r"tensor lost\.weight of epoch e"),
        ("", r"\.scales of the model"),
    ],
)
def test_tensor_that_is_on_one_side_only_is_an_error(name: str, said: str):
    """Parameters, buffers, small and large, and a plain attribute: what is left without memory is
    named. What is in the epoch and belongs nowhere would silently not be computed."""
    kind = Tied if name else Hidden
    memory, about = moved(kind())
    if memory.tensors.pop(f"0/{name}", None) is None and name:
        memory.tensors[f"0/{name}"] = memory.tensors["0/scale"]
    with pytest.raises(UnderstudyError, match=said) as found:
        bound(fresh(kind), memory, about)
    assert found.value.code == "model.unbound"


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (torch.zeros(LARGE, 2 * LARGE), f"float32 [{LARGE}, {2 * LARGE}]"),
        (torch.zeros(LARGE, LARGE, dtype=torch.bfloat16), f"bfloat16 [{LARGE}, {LARGE}]"),
    ],
    ids=["shape", "type"],
)
def test_model_of_another_form_is_an_error(there: torch.Tensor, here: str):
    """The writer's fresh model had another shape, or type, of a tensor: its name and both."""

    def made(form: torch.Tensor) -> Tied:
        model = Tied()
        model.turned = nn.Parameter(torch.empty_like(form), requires_grad=False)
        return model

    loaded = made(torch.zeros(LARGE, LARGE))
    created = forms_of(loaded)
    memory, about = moved(loaded)
    model = fresh(lambda: made(there.to("meta")))
    with pytest.raises(UnderstudyError) as found:
        bound(model, memory, About(created=created, buffers=about.buffers))
    assert (found.value.code, found.value.details) == ("model.unbound", {"tensor": "turned"})
    assert f"turned is float32 [{LARGE}, {LARGE}] in epoch e and {here} in" in found.value.message


def test_tensor_that_processing_repacks_is_bound_as_it_is():
    """Another shape and type than its fresh model's, in the same model: no difference."""
    loaded = Tied()
    created = forms_of(loaded)
    packed = torch.randint(0, 9, (2 * LARGE, LARGE), dtype=torch.int8)
    loaded.turned = nn.Parameter(packed.clone(), requires_grad=False)
    memory, about = moved(loaded)
    model = fresh(Tied)
    bound(model, memory, About(created=created, buffers=about.buffers))
    assert torch.equal(model.turned, packed)


def test_parameter_that_processing_removes_is_removed():
    """It is in the fresh model and not in a loaded one: gone, not filled with anything."""
    memory, about = moved(Tied())
    del memory.tensors["0/scale"]
    model = fresh(Tied)
    bound(model, memory, About(buffers=about.buffers, dropped=["scale"]))
    assert not hasattr(model, "scale")


def test_parameter_that_processing_adds_is_a_copy():
    """vLLM may compute it again, in place."""
    loaded = Tied()
    loaded.one.derived = nn.Parameter(torch.randn(LARGE, LARGE), requires_grad=False)
    wanted = loaded.one.derived.clone()
    memory, about = moved(loaded)
    model = fresh(Tied)
    binding = bound(model, memory, about)
    assert torch.equal(model.one.derived, wanted)
    assert "one.derived" not in binding.shared


def test_write_to_shared_weights_is_an_error_by_name():
    """A model that changes its weights after the load cannot be shared."""

    class Writing(Tied):
        def process_weights_after_loading(self) -> None:
            self.turned.add_(1)

    memory, about = moved(Writing())
    model = fresh(Writing)
    with pytest.raises(UnderstudyError, match="tensor turned") as found:
        bound(model, memory, about)
    assert found.value.code == "model.written"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(24.0).view(4, 6)[:, :4],
        torch.arange(24, dtype=torch.int8)[5:],
        torch.ones(3, dtype=torch.bfloat16).expand(2, 3),
        torch.tensor(3.0),
        torch.empty(0, 4),
    ],
    ids=["plain", "transposed", "padded", "offset", "expanded", "scalar", "empty"],
)
def test_tensor_survives_the_way_through_bytes(tensor: torch.Tensor):
    """Layout, bytes, and back: the same numbers with the same strides."""
    layout = Layout.of(tensor)
    raw = bytes_of(tensor).clone()
    assert raw.numel() == layout.nbytes
    strides = None if tensor.is_contiguous() else layout.strides
    name = str(layout.dtype).removeprefix("torch.")
    record = TensorRecord("t", 0, layout.nbytes, layout.shape, name, strides)
    back = tensor_at(raw.data_ptr(), record, CPU)
    assert torch.equal(back, tensor)
    assert strides is None or back.stride() == tensor.stride()


def test_page_lists_the_methods_that_vllm_declares_shareable():
    """docs/vllm.md against vLLM's sources: the classes that set `supports_pre_processed_weights` to
    other than False, in the class, in its constructor, or as a property."""
    import vllm.model_executor.layers as layers

    name, found = "supports_pre_processed_weights", set()
    for path in Path(str(layers.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name != "QuantizeMethodBase":
                inside = [*ast.walk(node)]
                set_to = [ast.unparse(each) for each in inside if isinstance(each, ast.Assign)]
                is_set = any(f"{name} =" in each and "False" not in each for each in set_to)
                if is_set or name in [getattr(each, "name", "") for each in inside]:
                    found.add(node.name)
    section = (Path(ROOT) / "docs/vllm.md").read_text().partition("## Quantisation")[2]
    table = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "\n".join(table))) == found
