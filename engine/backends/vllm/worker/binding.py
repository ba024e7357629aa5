"""Binds a model without weights to the tensors of an epoch, completely or not at all.

Writer and reader bind alike, following vLLM's own recipe for weights of another process
(`vllm.model_executor.model_loader.weight_cache`). A tensor is shared if the model has a parameter
of that name before anything is loaded: vLLM may recompute in place what it adds or derives later,
and a write to shared memory kills the process. Buffers, derived tensors and small ones are private
copies of the epoch's bytes.

Surprising: an unbound tensor is an error and never a warning. vLLM would fill it with whatever the
allocator returns, and the model would generate nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from engine.backends.vllm.worker.rehome import ABOUT, About
from engine.backends.vllm.worker.tensors import dtype_name, tensor_at
from gms.client import TensorRecord
from plumbing.errors import UnderstudyError

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
    """Binds one model to its tensors in one epoch."""

    def __init__(
        self,
        model: nn.Module,
        epoch: str,
        records: Mapping[str, TensorRecord],
        address_of: Callable[[str], int],
        device: torch.device,
    ) -> None:
        """
        Args:
            model: from `skeleton`.
            records: the model's tensors by their names in the model.
            address_of: the address of a tensor's first byte, by its name in the model.
        """
        self._model, self._epoch, self._device = model, epoch, device
        self._records, self._address_of = records, address_of
        # By every full name, also of modules that occur twice.
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._made: dict[Any, torch.Tensor] = {}
        self.shared: dict[str, nn.Parameter] = {}

    def run(self, about: About, model_config: Any) -> nn.Module:
        """Bind everything, then let vLLM rebuild what is not a tensor.

        Raises:
            UnderstudyError: `model.unbound`, `model.written`, naming the tensor.
        """
        self._check_same_forms(about.created)
        for name in self._records:
            if name != ABOUT:
                self._bind(name, about)
        for flag, value in about.flags.items():
            setattr(self._model, flag, value)
        versions = {name: tensor._version for name, tensor in self.shared.items()}
        with set_default_torch_dtype(model_config.dtype), weights_already_processed():
            process_weights_after_loading(self._model, model_config, self._device)
        self._drop(about.dropped)
        self._check_complete()
        self._check_unwritten(versions)
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

    def _tensor(self, name: str, *, is_buffer: bool, is_on_host: bool) -> torch.Tensor:
        """The tensor for `name`: one object for all names of the same bytes."""
        record = self._records[name]
        is_shared = (
            not is_buffer
            and not is_on_host
            and name in self._parameters
            and record.nbytes >= SHARED_BYTES_MIN
        )
        key = (record.offset, record.shape, record.strides, is_buffer, is_shared, is_on_host)
        if key not in self._made:
            tensor = tensor_at(self._address_of(name), record, self._device)
            if not is_shared:
                tensor = tensor.cpu() if is_on_host else tensor
                tensor = tensor.clone()
            self._made[key] = tensor if is_buffer else nn.Parameter(tensor, requires_grad=False)
        made = self._made[key]
        if is_shared:
            assert isinstance(made, nn.Parameter)
            self.shared[name] = made
        return made

    # ------------------------------------------------------------------ nothing is forgotten

    def _check_same_forms(self, created: Mapping[str, str]) -> None:
        """Compare fresh models: what processing does to a tensor is no difference."""
        for name, form in forms_of(self._model).items():
            there = created.get(name, form)
            if there != form:
                raise self._unbound(
                    f"tensor {name} is {there} in epoch {self._epoch} and {form} in this engine's"
                    " model, so a flag that shapes weights differs between them",
                    name,
                )

    def _drop(self, dropped: list[str]) -> None:
        """Remove the parameters that processing removes after a real load."""
        for name in dropped:
            owner, _, leaf = name.rpartition(".")
            module = self._modules.get(owner)
            found = None if module is None else module._parameters.get(leaf)
            if module is not None and found is not None and found.is_meta:
                delattr(module, leaf)

    def _check_complete(self) -> None:
        for name, tensor in _all_tensors(self._model):
            if tensor.is_meta and tensor.numel():
                raise self._unbound(
                    f"tensor {name} of the model is not in epoch {self._epoch}", name
                )

    def _check_unwritten(self, versions: Mapping[str, int]) -> None:
        for name, tensor in self.shared.items():
            if tensor._version != versions[name]:
                raise UnderstudyError(
                    "model.written",
                    f"vLLM writes to tensor {name} of this model after it was loaded, so it cannot"
                    " be shared; run this model with --unshareable private, and report it",
                    tensor=name,
                )

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
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, torch.Tensor))
    elif isinstance(value, dict):
        yield from (item for item in value.values() if isinstance(item, torch.Tensor))
