"""The identity of this rank's weights: two processes may share weights only if it is equal.

The settings are read once, before anything is loaded, because vLLM changes the model's
configuration while it processes weights. The files are read each time, so that a checkpoint that is
replaced during a load is never published under the old identity.

Surprising: the order of names matters. An error names the first field, in sorted order, in which
two identities differ, so readable fields sort before hashes.
"""

from __future__ import annotations

import glob
import os
import platform
from typing import Any

import torch
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf
from vllm.platforms import current_platform

from engine.backends.shards import digest_of, identity_of, read_shard, sample_of
from engine.backends.vllm import versions
from plumbing.errors import UsageError

FORMAT = 2  # of our records in an epoch
SAFETENSORS = "*.safetensors"
OTHER_FILES = ("*.bin", "*.pt", "*.pth", "*.gguf")
DUMMY = "dummy"  # vLLM's load format that reads no files
# Parts of the names of vLLM's variables that choose kernels, and with them the layout of processed
# weights. Only variables that are set are compared; defaults belong to the version.
KERNEL_WORDS = ("MOE", "GEMM", "MARLIN", "FLASHINFER", "CUTLASS", "FP8", "FP4", "MLA", "AITER")
# Properties of a copy of the configuration, not of the model.
NO_SETTINGS = ("_name_or_path", "transformers_version")

Document = dict[str, Any]


class Identity:
    """The identity of one rank of one engine, target and draft model together."""

    def __init__(self, vllm_config: Any, load_config: Any, load_format: str) -> None:
        """`load_format` is the user's own, `load_config` names ours."""
        self._load_format, self._load_config = load_format, load_config
        self._configs = {"target": vllm_config.model_config}
        draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
        if draft is not None:
            self._configs["draft"] = draft
        self._settings = _settings(vllm_config, load_format)
        self._models = {
            role: _model_settings(config, vllm_config) for role, config in self._configs.items()
        }

    def read(self) -> Document:
        """The identity, with the checkpoint's files as they are now.

        Raises:
            UsageError: `model.missing`, `model.broken`.
        """
        models = {role: {**about, "shards": {}} for role, about in self._models.items()}
        if self._load_format != DUMMY:
            for role, config in self._configs.items():
                models[role]["shards"] = files_of(_location(config, self._load_config))
        # Also on its own: otherwise an error would name all of a model's settings.
        draft = self._models["draft"]["name"] if "draft" in self._models else "none"
        return {**self._settings, "draft": draft, "models": models}


def files_of(path: str) -> Document:
    """Header and sample of every weight file in the directory `path`, or of that file, by name.

    Raises:
        UsageError: `model.missing`, `model.broken`.
    """
    if os.path.isfile(path):
        return {os.path.basename(path): {"sample": sample_of(path)}}
    found = sorted(glob.glob(os.path.join(glob.escape(path), SAFETENSORS)))
    if found:
        return identity_of(map(read_shard, found))
    here = glob.escape(path)
    others = sorted(name for kind in OTHER_FILES for name in glob.glob(os.path.join(here, kind)))
    if not others:
        raise UsageError(
            "model.missing",
            f"{path} has no {SAFETENSORS}, {', '.join(OTHER_FILES)}; download the checkpoint",
        )
    return {os.path.basename(name): {"sample": sample_of(name)} for name in others}


def _location(config: Any, load_config: Any) -> str:
    """The checkpoint's directory or file on this machine; downloaded if it is missing."""
    model = str(getattr(config, "model_weights", "") or config.model)
    if os.path.exists(model):
        return model
    if "://" in model:
        raise UsageError(
            "model.missing",
            f"{model} cannot be read before it is loaded, so it cannot be told from another"
            " checkpoint; copy it to a directory",
        )
    try:
        place = download_weights_from_hf(
            model,
            load_config.download_dir,
            [SAFETENSORS, *OTHER_FILES],
            config.revision,
            ignore_patterns=load_config.ignore_patterns,
        )
    except Exception as error:  # huggingface_hub raises a dozen unrelated classes
        raise UsageError(
            "model.missing",
            f"{model} is not a directory and cannot be downloaded"
            f" ({type(error).__name__}: {error}); name a directory that contains it",
        ) from error
    return str(place)


def _settings(vllm_config: Any, load_format: str) -> Document:
    parallel, kernel = vllm_config.parallel_config, vllm_config.kernel_config
    draft = getattr(vllm_config.speculative_config, "draft_parallel_config", None)
    if current_platform.is_cpu():
        architecture = platform.machine()
    else:
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("VLLM_") and any(word in name for word in KERNEL_WORDS)
    }
    return {
        "architecture": architecture,
        "engine": "vllm",
        "engine_version": versions.vllm_version(),
        "format": FORMAT,
        "kernels": {
            "environment": environment,
            "linear": str(getattr(kernel, "linear_backend", "")),
            "linear_per_method": str(getattr(kernel, "linear_backend_per_quant", "")),
            "moe": str(getattr(kernel, "moe_backend", "")),
        },
        "load_format": load_format,
        "lora": vllm_config.lora_config is not None,
        "parallel": {
            "all2all": str(parallel.all2all_backend),
            "data": parallel.data_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "expert": bool(parallel.enable_expert_parallel),
            "expert_placement": str(parallel.expert_placement_strategy),
            "hyper_connections": bool(getattr(parallel, "enable_hc_sp", False)),
            "pipeline": parallel.pipeline_parallel_size,
            "query_replicated": bool(getattr(parallel, "dcp_q_replicate", False)),
            "tensor": parallel.tensor_parallel_size,
            "tensor_draft": int(getattr(draft, "tensor_parallel_size", 0)),
        },
        "rank": parallel.rank,
        "torch": versions.torch_version(),
    }


def _model_settings(config: Any, vllm_config: Any) -> Document:
    cache, model = vllm_config.cache_config, str(config.model)
    settings = {
        name: value for name, value in config.hf_config.to_dict().items() if name not in NO_SETTINGS
    }
    return {
        "architectures": list(getattr(config.hf_config, "architectures", None) or []),
        "dtype": str(config.dtype),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_cache_skipped": [str(layer) for layer in cache.kv_cache_dtype_skip_layers or []],
        "implementation": str(config.model_impl),
        "max_model_len": config.max_model_len,
        "multimodal": _multimodal(config),
        # A directory's last part: another container may mount it elsewhere.
        "name": os.path.basename(os.path.realpath(model)) if os.path.exists(model) else model,
        "quantization": str(config.quantization),
        "quantization_settings": digest_of(str(config.quantization_config)),
        "revision": str(config.revision),
        "settings": digest_of(settings),
    }


def _multimodal(config: Any) -> Document:
    """What decides which encoders the model has, and how they are split."""
    found = config.multimodal_config
    if found is None:
        return {}
    limits = getattr(found, "limit_per_prompt", {})
    return {
        "absent": sorted(kind for kind in limits if found.get_limit_per_prompt(kind) == 0),
        "encoder_attention": str(getattr(found, "mm_encoder_attn_dtype", None)),
        "encoder_only": bool(getattr(found, "mm_encoder_only", False)),
        "encoder_split": str(found.mm_encoder_tp_mode),
        "language_only": bool(found.language_model_only),
    }
