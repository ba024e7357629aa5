"""Ranks that get their weights in this process: vLLM's models without its engine.

A rank here does what a worker does between `init_device` and the end of `load_model`, with a real
memory service. That is seconds faster than starting a worker, so every refusal can have its own
test.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM say of themselves as they are imported
    from vllm.config import VllmConfig, replace, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader import get_model, register_model_loader
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    from engine.backends.vllm.worker.weights import Loader, RankWeights

from torch import nn

from engine.backends.reference.random_model import write_random_model
from engine.backends.vllm import LOAD_FORMAT
from engine.backends.vllm.worker import weights
from gms.client import Reader

# The smallest that vLLM's attention on the CPU takes: heads of 32.
SHAPE = {"hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 256}


def written(directory: Path, *, seed: int) -> Path:
    """`directory`, with a random checkpoint in it."""
    write_random_model(str(directory), seed=seed, **SHAPE)
    return directory


@contextmanager
def one_rank(directory: Path) -> Iterator[None]:
    """vLLM's process groups for a tensor-parallel size of 1, which would meet in `directory`."""
    register_model_loader(LOAD_FORMAT)(Loader)
    _set_torch_accelerator_to_noop()  # as the CPU's model runner does
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{directory / 'ranks'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()


class Rank:
    """Rank 0 of `engine`, whose supervisor always permits a load."""

    def __init__(self, engine: str) -> None:
        self.engine, self.incarnation = engine, f"{engine}-1"
        self.said: list[tuple[dict[str, Any], int]] = []
        self.weights = RankWeights(self)  # type: ignore[arg-type]  # a stand-in for a BackendProcess

    def may_load(self, timeout_s: float, ranks: int = 1) -> Any:
        return SimpleNamespace(mode="rw_or_ro")

    def attached(self, identity: dict[str, Any], rank: int = 0, place: str = "") -> None:
        self.said.append((identity, rank))

    @property
    def reader(self) -> Reader:
        assert isinstance(self.weights._session, Reader)
        return self.weights._session

    def load(self, model: Path, *, unshareable: str = "refuse", **flags: Any) -> list[nn.Module]:
        """What `Worker.load_model` does: the target, then a draft, then `settle`."""
        models = self.load_only(model, unshareable=unshareable, **flags)
        self.weights.settle()
        return models

    def load_only(
        self, model: Path, *, unshareable: str = "refuse", **flags: Any
    ) -> list[nn.Module]:
        """The models, with nothing published yet."""
        extra = {"load_format": "auto", "extra": {}, "unshareable": unshareable}
        config = config_of(model, model_loader_extra_config=extra, **flags)
        rotary_embedding._ROPE_DICT.clear()  # another engine's, in this process
        weights._of_this_process = self.weights
        try:
            with set_current_vllm_config(config):
                models = [get_model(vllm_config=config)]
                if config.speculative_config is not None:
                    models.append(get_model(vllm_config=_draft(config), prefix="draft_model"))
                return models
        finally:
            weights._of_this_process = None

    def close(self) -> None:
        """End as a worker ends; what its models point at is gone then."""
        if self.weights._kept is not None:
            self.weights.kept.close()
        if self.weights._session is not None:
            self.weights._session.close()


def config_of(model: Path, **flags: Any) -> Any:
    """vLLM's configuration of an engine with our loader."""
    arguments = {
        "load_format": LOAD_FORMAT,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 256,
        "kv_cache_memory_bytes": 16 << 20,
        "distributed_executor_backend": "mp",
        **flags,
    }
    return EngineArgs(model=str(model), **arguments).create_engine_config()


def _draft(config: Any) -> Any:
    """As vLLM's proposer makes it for a draft model."""
    draft = config.speculative_config.draft_model_config
    return replace(config, quant_config=None, model_config=draft)
