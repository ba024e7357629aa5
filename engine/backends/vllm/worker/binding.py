"""A model's tensors and an epoch of the memory service: moves a loaded model into the epoch, and
binds a model without weights to it, completely or not at all.

`rehome` copies every tensor once and frees its own memory. Each storage is freed before the next
one is copied, so the peak is the weights and one slab. Names in the epoch are `<model>/<tensor>`:
the target is model 0, a draft is model 1. The JSON record `<model>/.model` is what a reader must
know beside the tensors. Afterwards the loaded model is an empty shell, and using it would read
address 0: memory is freed through the storage, despite other references to it.

Writer and reader bind alike, following vLLM's own recipe for weights of another process
(`vllm.model_executor.model_loader.weight_cache`), so the first engine already fails on whatever
would stop the second. A tensor is shared if the model has a parameter of that name before anything
is loaded: vLLM may recompute in place what it adds or derives later, and a write to shared memory
kills the process. Buffers, derived tensors and small ones are private copies of the epoch's bytes.
An unbound tensor is an error and never a warning: vLLM would fill it with whatever the allocator
returns, and the model would generate nonsense.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from engine.backends.vllm.worker.pulse import Meter
from gms.client import Reader, TensorRecord, Writer
from plumbing.errors import UnderstudyError

ABOUT = ".model"  # no parameter's name begins with a dot
# torch caches freed device memory; it is released after each slab's worth, so that the driver has
# it for the next slab.
RELEASE_BYTES = 64 << 20


class About(msgspec.Struct):
    """The record `<model>/.model`.

    `created`: data type and shape of each parameter before anything was loaded; processing may
    change both. `buffers`: tensors that are not parameters. `on_host`: tensors that vLLM keeps in
    host memory. `dropped`: parameters that processing has removed. `flags`: attributes that loading
    has set on the model.
    """

    is_shared: bool = True
    created: dict[str, str] = {}
    buffers: list[str] = []
    on_host: list[str] = []
    dropped: list[str] = []
    flags: dict[str, bool] = {}


def name_in_epoch(model: int, name: str) -> str:
    return f"{model}/{name}"


def write_about(writer: Writer, model: int, about: About) -> None:
    """Put `<model>/.model` into the epoch."""
    content, name = msgspec.json.encode(about), name_in_epoch(model, ABOUT)
    writer.place(name, len(content), (len(content),), "uint8")
    writer.write(name, content)


def read_about(reader: Reader, model: int) -> About | None:
    """The record of `model`; None if the epoch has no such model."""
    name = name_in_epoch(model, ABOUT)
    if name not in reader.tensors:
        return None
    return msgspec.json.decode(reader.read(name), type=About)


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
    before = sum(record.nbytes for record in writer.tensors.values())
    writer.plan(before + sum(layout.nbytes for layout in tensors))
    freed_bytes = 0
    for storage, views in layouts.items():
        for layout in views:
            _copy(writer, number, names[layout], tensors[layout], layout, device)
            meter.add(layout.nbytes)
            meter.report()
        # A buffer is small and may be shared with a bound model (rotary tables).
        if storage not in buffers:
            memory: Any = tensors[views[0]].untyped_storage()
            freed_bytes += memory.nbytes()
            memory.resize_(0)
        if freed_bytes >= RELEASE_BYTES:
            _release_cached(device)
            freed_bytes = 0
    _release_cached(device)


def _copy(
    writer: Writer,
    number: int,
    names: list[str],
    tensor: torch.Tensor,
    layout: Layout,
    device: torch.device,
) -> None:
    """One tensor into the epoch, under all of its names."""
    first, *others = [name_in_epoch(number, name) for name in names]
    strides = None if tensor.is_contiguous() else layout.strides
    address = writer.place(first, layout.nbytes, layout.shape, dtype_name(layout.dtype), strides)
    for other in others:
        writer.alias(other, first)
    bytes_at(address, layout.nbytes, device).copy_(bytes_of(tensor))


def _release_cached(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# Smaller ones are scales and norms: cheap to copy, and vLLM writes to some of them.
SHARED_BYTES_MIN = 64 << 10
_META = torch.device("meta")
_AGAIN = (
    "stop every engine that maps this epoch, so that the next one loads it again, and run the same"
    " release of understudy and of vLLM in every container"
)


def skeleton(vllm_config: Any, model_config: Any, prefix: str) -> nn.Module:
    """The model as vLLM builds it, without memory for its tensors."""
    with set_default_torch_dtype(model_config.dtype), _META:
        model: nn.Module = initialize_model(
            vllm_config=vllm_config, model_config=model_config, prefix=prefix
        )
    return model


def forms_of(model: nn.Module) -> dict[str, str]:
    """Type and shape (`float32 [256, 128]`) of every parameter of a fresh model, by name."""
    return {
        name: f"{dtype_name(parameter.dtype)} {list(parameter.shape)}"
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


class Binding:
    """Binds `model`, from `skeleton`, to the tensors of model `number` in an epoch."""

    def __init__(
        self, model: nn.Module, attached: Reader | Writer, number: int, device: torch.device
    ) -> None:
        self._model, self._attached, self._device = model, attached, device
        self._epoch, self._prefix = attached.epoch, name_in_epoch(number, "")
        self._records = {
            name.removeprefix(self._prefix): record
            for name, record in attached.tensors.items()
            if name.startswith(self._prefix)
        }
        # By every full name, also of modules that occur twice.
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._forms = forms_of(model)
        self._made: dict[Any, torch.Tensor] = {}
        self.shared: dict[str, torch.Tensor] = {}

    def run(self, about: About, model_config: Any) -> nn.Module:
        """Bind everything, then let vLLM rebuild what is not a tensor.

        Raises:
            UnderstudyError: `model.unbound`, `model.written`, naming the tensor.
        """
        for name, form in self._forms.items():
            # Fresh models are compared: what processing does to a tensor is no difference.
            there = about.created.get(name, form)
            if there != form:
                raise self._unbound(
                    f"tensor {name} is {there} in epoch {self._epoch} and {form} in this engine's"
                    " model, so a flag that shapes weights differs between them",
                    name,
                )
        for name in self._records:
            if name != ABOUT:
                self._bind(name, about)
        for flag, value in about.flags.items():
            setattr(self._model, flag, value)
        versions = {name: tensor._version for name, tensor in self.shared.items()}
        with set_default_torch_dtype(model_config.dtype), weights_already_processed():
            process_weights_after_loading(self._model, model_config, self._device)
        self._drop(about.dropped)
        for name, tensor in _all_tensors(self._model):
            if tensor.is_meta and tensor.numel():
                raise self._unbound(
                    f"tensor {name} of the model is not in epoch {self._epoch}", name
                )
        for name, tensor in self.shared.items():
            if tensor._version != versions[name]:
                raise UnderstudyError(
                    "model.written",
                    f"vLLM writes to tensor {name} of this model after it was loaded, so it cannot"
                    " be shared; run this model with --unshareable private, and report it",
                    tensor=name,
                )
        return self._model.eval()

    def _bind(self, name: str, about: About) -> None:
        """Register tensor `name` in its module, replacing the placeholder."""
        owner, _, leaf = name.rpartition(".")
        module = self._modules.get(owner)
        if module is None:
            raise self._unbound(
                f"tensor {name} of epoch {self._epoch} belongs to no module of the model", name
            )
        is_buffer = name in about.buffers
        tensor = self._tensor(name, is_buffer=is_buffer, is_on_host=name in about.on_host)
        # Registered again: the data of a tensor without memory cannot be replaced.
        persistent = leaf not in module._non_persistent_buffers_set
        module._parameters.pop(leaf, None)
        module._buffers.pop(leaf, None)
        if is_buffer:
            module.register_buffer(leaf, tensor, persistent=persistent)
        else:
            module.register_parameter(leaf, tensor)

    def _tensor(self, name: str, *, is_buffer: bool, is_on_host: bool) -> Any:
        """The tensor for `name`: one object for all names of the same bytes."""
        record = self._records[name]
        is_private = is_buffer or is_on_host or name not in self._forms
        is_shared = not is_private and record.nbytes >= SHARED_BYTES_MIN
        key = (record.offset, record.shape, record.strides, is_buffer, is_shared, is_on_host)
        if key not in self._made:
            address = self._attached.address(self._prefix + name)
            tensor = tensor_at(address, record, self._device)
            if not is_shared:
                tensor = (tensor.cpu() if is_on_host else tensor).clone()
            self._made[key] = tensor if is_buffer else nn.Parameter(tensor, requires_grad=False)
        if is_shared:
            self.shared[name] = self._made[key]
        return self._made[key]

    def _drop(self, dropped: list[str]) -> None:
        """Remove the parameters that processing removes after a real load."""
        for name in dropped:
            owner, _, leaf = name.rpartition(".")
            if getattr(self._modules[owner]._parameters.get(leaf), "is_meta", False):
                delattr(self._modules[owner], leaf)

    def _unbound(self, what: str, name: str) -> UnderstudyError:
        return UnderstudyError("model.unbound", f"{what}; {_AGAIN}", tensor=name)


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `model` by name, including plain attributes of a module, of its attention
    backend or of its quantisation method, which torch does not list."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for owner, module in model.named_modules():
        for part in (module, getattr(module, "impl", None), getattr(module, "quant_method", None)):
            for attribute, value in getattr(part, "__dict__", {}).items():
                for tensor in _tensors_in(value):
                    yield f"{owner}.{attribute}", tensor


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """`value` itself, or the tensors in a list, tuple or dictionary."""
    values = value.values() if isinstance(value, dict) else value
    inside = values if isinstance(value, list | tuple | dict) else (value,)
    return (item for item in inside if isinstance(item, torch.Tensor))


# A tensor over a bare address keeps nothing alive: its memory stays mapped while the process lives.
# Surprising: on the host, a tensor over read-only memory looks writable to torch; a write to it
# kills the process.


class Layout(NamedTuple):
    """Where a tensor lies in its storage; equal for two names of one tensor."""

    storage: int  # the address of the storage
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
        )

    @property
    def nbytes(self) -> int:
        """From the first element's first byte to the last one's end, gaps included."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return (sum((n - 1) * step for n, step in steps) + 1) * int(self.dtype.itemsize)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`, as in manifests."""
    return str(dtype).removeprefix("torch.")


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """`nbytes` bytes of `device` at `address`, as a tensor of uint8."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)
    about = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=about), device=device)


def tensor_at(address: int, record: TensorRecord, device: torch.device) -> torch.Tensor:
    """The tensor that `record` describes, with its first byte at `address` of `device`."""
    flat = bytes_at(address, record.nbytes, device).view(getattr(torch, record.dtype))
    if record.strides is None:
        return flat.view(record.shape)
    return flat.as_strided(record.shape, record.strides)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of `tensor` in its storage, gaps included, as a view of uint8."""
    first = tensor.storage_offset() * tensor.dtype.itemsize
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), first, (Layout.of(tensor).nbytes,), (1,))
