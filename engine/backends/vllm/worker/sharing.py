"""Which weights two processes can share: after processing, are they still tensors of the layer?

vLLM's quantisation methods declare that (`supports_pre_processed_weights`); `SHAREABLE` lists those
of the supported versions, for the documentation and a test that reads the installed vLLM. The CPU
is stricter: most kernels there pack weights into memory of their own, which cannot be shared.

Surprising: on the CPU not even an unquantised layer could be shared, because oneDNN packs it. Such
layers get a method here that leaves the weight in place, at about half of oneDNN's speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from plumbing.errors import UsageError

# By vLLM's class of the method. Everything else loads privately or not at all: GPTQ, AWQ,
# compressed-tensors, Quark, INC, torchao, bitsandbytes, quantisation while loading, the mixtures of
# experts of GPT-OSS (MXFP4) and of ModelOpt FP8, Humming and FBGEMM.
SHAREABLE: Mapping[str, str] = {
    "UnquantizedLinearMethod": "no quantisation",
    "UnquantizedEmbeddingMethod": "no quantisation, embeddings and output heads",
    "UnquantizedFusedMoEMethod": "no quantisation, experts (CUDA; not with the MoonEP kernels)",
    "Fp8LinearMethod": "FP8 (CUDA)",
    "Fp8MoEMethod": "FP8, experts (CUDA)",
    "ModelOptNvFp4FusedMoE": "ModelOpt NVFP4, experts (CUDA)",
    "ModelOptLinearMethod": "ModelOpt, where the kernel can (CUDA: MXFP8 by FlashInfer, emulation)",
    "Mxfp4MoEMethod": "MXFP4, experts (CUDA)",
    "BaseKVCacheMethod": "scales of a quantised KV cache",
}


class SharedLinearMethod(UnquantizedLinearMethod):
    """A linear layer on the CPU whose weight stays in place."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.cpu_linear = nn.functional.linear


class SharedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """An embedding or output head on the CPU whose weight stays in place."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.cpu_linear = nn.functional.linear


# Exact types: subclasses may pack.
_CPU_METHODS: Mapping[type, type] = {
    UnquantizedLinearMethod: SharedLinearMethod,
    UnquantizedEmbeddingMethod: SharedEmbeddingMethod,
}


def keep_in_place(model: nn.Module, device: torch.device) -> None:
    """Keep the CPU build from packing weights; call it before they are loaded. No-op on CUDA."""
    if device.type != "cpu":
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        ours = _CPU_METHODS.get(type(method))
        if ours is not None and _has_matrix(module):
            module.quant_method = _recast(method, ours)


def obstacle(model: nn.Module, device: torch.device) -> str | None:
    """Why `model` (weights not needed yet) cannot be shared, as part of a sentence; or None."""
    for name, method in _methods(model):
        if not method.supports_pre_processed_weights:
            return f"layer {name} uses {type(method).__name__}, whose weights vLLM cannot share"
        if device.type != "cpu":
            continue
        if not isinstance(method, SharedLinearMethod | SharedEmbeddingMethod | BaseKVCacheMethod):
            return (
                f"layer {name} uses {type(method).__name__}, which on the CPU packs weights into"
                " memory of its own"
            )
    return None


def refusal(model: str, why: str) -> UsageError:
    """The error for a model with an obstacle, without `--unshareable private`."""
    return UsageError(
        "model.unshareable",
        f"{model} cannot be shared between engines: {why}; choose another checkpoint (docs/vllm.md"
        " lists what can be shared), or give every engine its own copy with --unshareable private",
    )


def _methods(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            yield name or "<root>", method


def _has_matrix(module: nn.Module) -> bool:
    """A causal convolution's weight has three dimensions, and its kernel needs it packed."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2


def _recast(method: Any, ours: type) -> Any:
    """`method` as an instance of `ours`, with all its attributes."""
    recast: Any = object.__new__(ours)
    recast.__dict__.update(method.__dict__)
    return recast
