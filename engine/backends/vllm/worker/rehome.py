"""Moves a loaded model into the memory service: copies every tensor once and frees its own memory.

Each storage is freed before the next one is copied, so that the peak is the weights and one slab.
Names in the epoch are `<model>/<tensor>`: the target is model 0, a draft is model 1. The JSON
record `<model>/.model` is what a reader must know beside the tensors.

Surprising: afterwards the loaded model is an empty shell. Freeing happens through the storage,
despite other references to it (kernels keep some), so using that model would read address 0. The
engine runs on a model that was bound to the shared memory like any reader's, so the first engine
already fails on whatever would stop the second.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from engine.backends.vllm.worker.pulse import Meter
from engine.backends.vllm.worker.tensors import Layout, bytes_at, bytes_of, dtype_name
from gms.client import Reader, Writer

ABOUT = ".model"  # no parameter's name begins with a dot
# torch caches freed device memory; it is released after each slab's worth, so that the driver has
# it for the next slab.
RELEASE_BYTES = 64 << 20


@dataclass(frozen=True)
class About:
    """The record `<model>/.model`.

    `created`: data type and shape of each parameter before anything was loaded; processing may
    change both. `buffers`: tensors that are not parameters. `on_host`: tensors that vLLM keeps in
    host memory. `dropped`: parameters that processing has removed. `flags`: attributes that loading
    has set on the model.
    """

    architecture: str
    is_shared: bool = True
    created: dict[str, str] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    on_host: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    flags: dict[str, bool] = field(default_factory=dict)


def name_in_epoch(model: int, name: str) -> str:
    return f"{model}/{name}"


def write_about(writer: Writer, model: int, about: About) -> None:
    """Put `<model>/.model` into the epoch."""
    content, name = json.dumps(asdict(about)).encode(), name_in_epoch(model, ABOUT)
    writer.place(name, len(content), (len(content),), "uint8")
    writer.write(name, content)


def read_about(reader: Reader, model: int) -> About | None:
    """The record of `model`; None if the epoch has no such model."""
    name = name_in_epoch(model, ABOUT)
    return About(**json.loads(reader.read(name))) if name in reader.tensors else None


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, is_buffer) of every registered tensor, under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter.data, False
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer, True


def rehome(
    model: nn.Module, number: int, writer: Writer, device: torch.device, about: About, meter: Meter
) -> None:
    """Move all of `model`'s tensors into `writer`'s epoch and leave it without memory.

    Adds buffers and host tensors to `about`. `device` is where the weights belong.
    """
    names: dict[Layout, list[str]] = defaultdict(list)
    tensors: dict[Layout, torch.Tensor] = {}
    layouts: dict[int, list[Layout]] = defaultdict(list)  # by storage, in the model's order
    buffers: set[int] = set()
    for name, tensor, is_buffer in tensors_of(model):
        if tensor.is_meta:  # never loaded; binding will name it as missing
            continue
        layout = Layout.of(tensor)
        if layout not in tensors:
            tensors[layout] = tensor
            layouts[layout.storage].append(layout)
        names[layout].append(name)
        if is_buffer:
            about.buffers.append(name)
            buffers.add(layout.storage)
        if tensor.device.type != device.type:
            about.on_host.append(name)
    sizes = [layout.nbytes for layout in tensors]
    before = sum(record.nbytes for record in writer.tensors.values())
    writer.plan(before + sum(sizes), max(sizes, default=0))
    move = _Move(writer, number, device, meter)
    for storage, views in layouts.items():
        for layout in views:
            move.copy(tensors[layout], layout, names[layout])
        # A buffer is small and may be shared with a bound model (rotary tables).
        if storage not in buffers:
            move.free(tensors[views[0]])
    move.release_cached()


class _Move:
    """Copies tensors into the epoch and frees their memory."""

    def __init__(self, writer: Writer, number: int, device: torch.device, meter: Meter) -> None:
        self._writer, self._number, self._device = writer, number, device
        self._meter, self._freed_bytes = meter, 0

    def copy(self, tensor: torch.Tensor, layout: Layout, names: list[str]) -> None:
        first, *others = [name_in_epoch(self._number, name) for name in names]
        address = self._writer.place(
            first,
            layout.nbytes,
            layout.shape,
            dtype_name(layout.dtype),
            None if tensor.is_contiguous() else layout.strides,
        )
        for other in others:
            self._writer.alias(other, first)
        bytes_at(address, layout.nbytes, self._device).copy_(bytes_of(tensor))
        self._meter.add(layout.nbytes)
        self._meter.report()

    def free(self, tensor: torch.Tensor) -> None:
        storage: Any = tensor.untyped_storage()
        self._freed_bytes += storage.nbytes()
        storage.resize_(0)
        if self._freed_bytes >= RELEASE_BYTES:
            self.release_cached()

    def release_cached(self) -> None:
        self._freed_bytes = 0
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
