"""A rank's weights: written into the memory service by the first engine, mapped by the next.

Owns the order of a load: identity, permission to load, session with the device's memory service,
one model after the other (`checkpoint_load`), commit, report. A draft model belongs to the target's
epoch, so the commit follows when vLLM's worker has loaded both (`settle`).

Surprising: a writer binds its model as a reader does. It loads as vLLM does, moves every tensor
into the epoch, drops that model and binds a fresh one to the epoch's addresses, which `commit`
makes read-only in place.
"""

from __future__ import annotations

import os
import time
from typing import Any, NoReturn

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from engine.backends import memory_session as session
from engine.backends.memory_session import KeptWeights
from engine.backends.process import BackendProcess
from engine.backends.shards import same_on_every_rank
from engine.backends.vllm import membership
from engine.backends.vllm.worker import binding
from engine.backends.vllm.worker.checkpoint_load import ModelLoad, inner_loader
from engine.backends.vllm.worker.identity import Document, Identity
from engine.backends.vllm.worker.pulse import Meter
from gms.client import Reader, Writer
from plumbing.errors import InvariantError, UnderstudyError

_of_this_process: RankWeights | None = None


def of_this_process() -> RankWeights:
    """This worker process's weights; created at first use."""
    global _of_this_process
    if _of_this_process is None:
        _of_this_process = RankWeights(membership.current())
    return _of_this_process


def device_of(rank: int) -> str:
    """The device that holds the weights of `rank`, which runs in this process."""
    if current_platform.is_cpu():
        return session.host_device(rank)
    ordinal = int(torch.cuda.current_device())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if ordinal < len(visible) and visible[ordinal].startswith("MIG-"):
        return session.place_on(visible[ordinal])
    return session.place_on(str(current_platform.get_device_uuid(ordinal)))


class RankWeights:
    """`identity` is this rank's, `bytes` is the size of its epoch."""

    def __init__(self, member: BackendProcess) -> None:
        self.identity: Document = {}
        self.bytes = 0
        self._kept: KeptWeights | None = None
        self.cannot_offload = ""  # why it cannot release them, or nothing
        self._member = member
        self._models = 0
        self._rank = 0
        self._device = ""
        self._source: Identity | None = None
        self._session: Reader | Writer | None = None
        self._meter: Meter | None = None  # a writer's
        self._began_s = 0.0

    # ------------------------------------------------------------------ one model

    def load_model(
        self, config: LoadConfig, vllm_config: Any, model_config: Any, prefix: str = ""
    ) -> nn.Module:
        """The next model of this rank, ready to run: target first, then a draft.

        Raises:
            UsageError: `model.unshareable`, `model.missing`.
            UnderstudyError: `model.unbound`, `model.written`; from the supervisor or the service.
        """
        if self._session is None:
            self._session = self._attach(config, vllm_config)
        load = ModelLoad(self._session, self._models, config, vllm_config, model_config, prefix)
        self._models += 1
        if not load.is_shared:
            self.cannot_offload = (
                f"it has a private copy of {load.name}, which the memory service cannot free"
            )
        if self._meter is None:
            return load.read()
        with session.loading(self._device, load.name, load.dtype, load.needed_bytes):
            return load.write(self._meter)

    def _attach(self, config: LoadConfig, vllm_config: Any) -> Reader | Writer:
        parallel = vllm_config.parallel_config
        self._rank, self._device = parallel.rank, device_of(parallel.rank)
        load_format = config.model_loader_extra_config["load_format"]
        self._source = Identity(vllm_config, config, str(load_format))
        self.identity = self._source.read()
        about = self.identity, self._rank, parallel.world_size
        attached = session.attach(self._member, self._device, *about)
        self._began_s = time.monotonic()
        if isinstance(attached, Writer):
            self._meter = Meter(attached)
        return attached

    # ------------------------------------------------------------------ all of them

    @property
    def kept(self) -> KeptWeights:
        """Since `settle`."""
        assert self._kept is not None
        return self._kept

    def settle(self) -> None:
        """All models are loaded: publish what was written, keep the session, tell the supervisor.

        Raises:
            UnderstudyError: `model.changed`, `model.unbound`; from the supervisor or the service.
        """
        if self._session is None:
            raise InvariantError("vLLM loaded its model without our loader")
        reader = self._commit(self._session) if isinstance(self._session, Writer) else self._session
        if binding.read_about(reader, self._models) is not None:
            raise UnderstudyError(
                "model.unbound",
                f"epoch {reader.epoch} has a draft model and this engine has none; start every"
                " engine with the same --speculative-config",
            )
        self._session, self.bytes = reader, reader.size_bytes
        self._kept = KeptWeights(reader)
        same = same_on_every_rank(self.identity)
        self._member.attached(same, self._rank, self._device)

    def _commit(self, writer: Writer) -> Reader:
        assert self._source is not None
        after = self._source.read()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # no copy may be pending when its target becomes read-only
        with session.loading(self._device, "this model", "", 0):
            what, device = "the model's checkpoint", self._device
            return session.commit(writer, self.identity, after, what, device, self._began_s)


class Loader(BaseModelLoader):
    """Loads weights through the memory service; registered as `understudy` by the plugin.

    vLLM makes more than one (for a draft model, or only to ask it a question), so this holds
    nothing and does nothing until `load_model`.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        inner_loader(self.load_config).download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> NoReturn:
        raise UnderstudyError(
            "vllm.weights_are_shared",
            "weights are shared and read-only here, so they cannot be loaded into an existing"
            " model; start engines with the new weights instead",
        )

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        ours = of_this_process()
        return ours.load_model(self.load_config, vllm_config, model_config, prefix)
