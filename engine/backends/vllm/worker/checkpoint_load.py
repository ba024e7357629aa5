"""Loads one model of a rank with shared weights, as a writer or as a reader, and decides which
weights two processes can share. The order of a load is in `weights.py` beside this; how the bytes
reach other processes is in `gms/client/weights.py`.

First the model that will run is built without memory, which shows whether it can be shared. A
writer then loads another beside it, as vLLM does, moves its tensors into the epoch and drops it.
Two public methods of vLLM's own loader are hooked, on that one object and for one load: only
between creating a model and reading its weights can the CPU build be kept from packing them.

Weights can be shared if they are still tensors of the layer after processing. vLLM's quantisation
methods declare that (`supports_pre_processed_weights`). Most kernels of the CPU build pack weights
into memory of their own, even unquantised ones (oneDNN). The methods of such layers are kept from
it here, at about half of oneDNN's speed.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from typing import Any

import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from engine.backends.vllm import PRIVATE
from engine.backends.vllm.worker import binding
from engine.backends.vllm.worker.binding import About
from engine.backends.vllm.worker.pulse import Meter, Pulse
from gms.client import Reader, Writer
from plumbing.errors import UnderstudyError, UsageError

logger = logging.getLogger(__name__)

# What `load_weights` sets on draft models, and what must be set on a model that was not loaded.
FLAGS = ("has_own_embed_tokens", "has_own_lm_head")


def inner_loader(config: LoadConfig) -> BaseModelLoader:
    """vLLM's own loader for the load format that the user asked for."""
    ours = config.model_loader_extra_config
    inner = dataclasses.replace(
        config, load_format=ours["load_format"], model_loader_extra_config=ours["extra"]
    )
    return get_model_loader(inner)


class Registries:
    """What vLLM registers per process while it builds a model, for one engine's configuration.

    A writer builds each model twice, once to load it and once to run it. But vLLM lets every layer
    register once (`static_forward_context` refuses a duplicate name), and passes rotary embeddings
    from one model to the next. So what is registered is saved and restored, in place, because other
    parts of vLLM hold these objects.
    """

    def __init__(self, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        self._mappings = (compilation.static_forward_context, rotary_embedding._ROPE_DICT)
        self._expert_layers = compilation.static_all_moe_layers

    def snapshot(self) -> tuple[list[dict[Any, Any]], list[str]]:
        return [dict(each) for each in self._mappings], list(self._expert_layers)

    def restore(self, snapshot: tuple[list[dict[Any, Any]], list[str]]) -> None:
        mappings, self._expert_layers[:] = snapshot
        for live, saved in zip(self._mappings, mappings, strict=True):
            live.clear()
            live.update(saved)


class ModelLoad:
    """Model `number` of an epoch: the target is 0, a draft is 1.

    The constructor builds the model without memory and checks whether it can be shared.
    `needed_bytes` is what its parameters take while they are loaded.

    Raises:
        UsageError: `model.unshareable`, where private copies were not asked for.
    """

    def __init__(
        self,
        attached: Reader | Writer,
        number: int,
        config: LoadConfig,
        vllm_config: Any,
        model_config: Any,
        prefix: str,
    ) -> None:
        self.name, self.dtype = str(model_config.model), str(model_config.dtype)
        self._attached, self._number, self._config = attached, number, config
        self._vllm_config, self._model_config, self._prefix = vllm_config, model_config, prefix
        self._device = _torch_device(vllm_config)
        self._registries = Registries(vllm_config)
        self._before = self._registries.snapshot()
        self._model = binding.skeleton(vllm_config, model_config, prefix)
        self.needed_bytes = sum(tensor.nbytes for tensor in self._model.parameters())
        keep_in_place(self._model, self._device)
        why = obstacle(self._model, self._device)
        self.is_shared = why is None
        if why is None:
            return
        if config.model_loader_extra_config["unshareable"] != PRIVATE:
            raise UsageError(
                "model.unshareable",
                f"{self.name} cannot be shared between engines: {why}; choose another checkpoint"
                " (docs/vllm.md lists what can be shared), or give every engine its own copy with"
                " --unshareable private",
            )
        logger.warning("every engine loads a private copy of %s: %s", self.name, why)

    def read(self) -> nn.Module:
        """The model, with the epoch's tensors.

        Raises:
            UnderstudyError: `model.unbound`, `model.written`.
        """
        assert isinstance(self._attached, Reader)
        about = binding.read_about(self._attached, self._number)
        if about is None or about.is_shared != self.is_shared:
            there = "lacks" if about is None else "shares" if about.is_shared else "does not share"
            raise UnderstudyError(
                "model.unbound",
                f"epoch {self._attached.epoch} {there} {self.name}, which this engine would"
                f" {'share' if self.is_shared else 'load privately'}; run the same release of"
                " understudy and of vLLM, with the same flags, in every container",
            )
        return self._bound(about) if self.is_shared else self._loaded(inner_loader(self._config))

    def write(self, meter: Meter) -> nn.Module:
        """The model, after its tensors were loaded and moved into the epoch.

        Raises:
            UsageError: `model.unshareable`; what vLLM's loader raises.
            UnderstudyError: `model.unbound`, `model.written`; from the service.
        """
        assert isinstance(self._attached, Writer)
        if self.is_shared:
            return self._bound(self._write(self._attached, meter))
        meter.expect(self.needed_bytes)
        with Pulse(meter):
            model = self._loaded(inner_loader(self._config))
        binding.write_about(self._attached, self._number, About(is_shared=False))
        return model

    def _bound(self, about: About) -> nn.Module:
        bound = binding.Binding(self._model, self._attached, self._number, self._device)
        return bound.run(about, self._model_config)

    # ------------------------------------------------------------------ vLLM's own load

    def _write(self, writer: Writer, meter: Meter) -> About:
        """Load the model as vLLM does, beside the one that will run, and move it into the epoch."""
        inner: Any = inner_loader(self._config)
        created: dict[str, str] = {}
        create, weights = inner.create_model, getattr(inner, "get_all_weights", None)

        def create_model(*args: Any, **kwargs: Any) -> nn.Module:
            model: nn.Module = create(*args, **kwargs)
            keep_in_place(model, self._device)
            created.update(binding.forms_of(model))
            return model

        inner.create_model = create_model
        if weights is not None:  # it exposes what it reads
            inner.get_all_weights = lambda *args, **kwargs: meter.counted(weights(*args, **kwargs))
        meter.expect(2 * self.needed_bytes)  # read, then moved
        running = self._registries.snapshot()
        with Pulse(meter):
            loaded = self._loaded(inner)
        self._registries.restore(running)
        if not created:
            raise UsageError(
                "model.unshareable",
                f"--load-format {self._config.model_loader_extra_config['load_format']} builds"
                " models in its own way, which cannot be shared; choose another, such as auto",
            )
        left = {name for name, _ in loaded.named_parameters(remove_duplicate=False)}
        about = About(
            created=created,
            dropped=sorted(created.keys() - left),
            flags={flag: bool(getattr(loaded, flag)) for flag in FLAGS if hasattr(loaded, flag)},
        )
        binding.rehome(loaded, self._number, writer, self._device, about, meter)
        binding.write_about(writer, self._number, about)
        del loaded
        gc.collect()
        return about

    def _loaded(self, loader: BaseModelLoader) -> nn.Module:
        """What `loader` loads, as if nothing had been built before."""
        self._registries.restore(self._before)
        model: nn.Module = loader.load_model(
            vllm_config=self._vllm_config, model_config=self._model_config, prefix=self._prefix
        )
        return model


def _torch_device(vllm_config: Any) -> torch.device:
    device = torch.device(vllm_config.device_config.device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# Exact types: subclasses may pack.
_CPU_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def _keep(layer: nn.Module) -> None:
    """In place of a method's processing of weights on the CPU, which packs them."""
    layer.cpu_linear = nn.functional.linear


def keep_in_place(model: nn.Module, device: torch.device) -> None:
    """Keep the CPU build from packing weights; call it before they are loaded. No-op on CUDA."""
    if device.type != "cpu":
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        weight = getattr(module, "weight", None)
        # A causal convolution's weight has three dimensions, and its kernel needs it packed.
        is_matrix = isinstance(weight, torch.Tensor) and weight.ndim == 2
        if type(method) in _CPU_METHODS and is_matrix:
            method.process_weights_after_loading = _keep


def obstacle(model: nn.Module, device: torch.device) -> str | None:
    """Why `model` (weights not needed yet) cannot be shared, as part of a sentence; or None."""
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase):
            continue
        uses = f"layer {name or '<root>'} uses {type(method).__name__}"
        if not method.supports_pre_processed_weights:
            return f"{uses}, whose weights vLLM cannot share"
        is_kept = method.process_weights_after_loading is _keep
        if device.type == "cpu" and not (is_kept or isinstance(method, BaseKVCacheMethod)):
            return f"{uses}, which on the CPU packs weights into memory of its own"
    return None
