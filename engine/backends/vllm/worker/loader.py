"""The loader that vLLM calls for `--load-format understudy`: weights through the memory service.

A thin end of `weights.py`, which has them for the whole process. vLLM makes a loader more than
once (for a draft model, or only to ask it a question), so one costs nothing and does nothing until
`load_model`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from engine.backends.vllm.worker import weights
from engine.backends.vllm.worker.model_load import inner_loader
from plumbing.errors import UnderstudyError


class Loader(BaseModelLoader):
    """Registered as `understudy` by the plugin."""

    def download_model(self, model_config: ModelConfig) -> None:
        inner_loader(self.load_config).download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> NoReturn:
        raise UnderstudyError(
            "vllm.weights_are_shared",
            "weights are shared and read-only here: they cannot be loaded into a model that is"
            " there already; start engines with the new weights instead",
        )

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        ours: Any = weights.of_this_process()
        model: nn.Module = ours.load_model(self.load_config, vllm_config, model_config, prefix)
        return model
