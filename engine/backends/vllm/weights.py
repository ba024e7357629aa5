"""A rank's weights: written into the memory service by the first engine, mapped by the next.

Owns the order in which a worker comes to its weights: identity, leave to load, session with its
own device, one model after the other, commit, report. A draft model is loaded after the target and
belongs to the same epoch, so that the commit comes when vLLM's worker is done with all of them
(`settle`). Knows neither KV memory nor HTTP.

The surprising thing: a writer goes the reader's way as well. It loads as vLLM does, moves every
tensor into the epoch, throws that model away and binds a fresh one to the epoch's addresses, which
`commit` makes read-only in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import time
from typing import Any

import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from engine.backends import session
from engine.backends.process import Member
from engine.backends.vllm import binding, membership, rehome, sharing
from engine.backends.vllm.identity import Document, Identity, same_on_every_rank
from engine.backends.vllm.pulse import Meter, Pulse
from engine.backends.vllm.registries import Registered, Registries
from engine.backends.vllm.rehome import About
from gms.client import Keeper, Reader, Writer
from understudy.errors import InvariantError, UnderstudyError, UsageError

__all__ = ["Weights", "device_of", "inner_loader", "of_this_process", "same_on_every_rank"]

logger = logging.getLogger(__name__)

# Who distrusts its weights is about to end, and its report with it: a memory service that has just
# died is back within a second, and nothing serves meanwhile.
REPORT_WAIT_S = 2.0
# What `load_weights` sets on draft models, and what a model that was not loaded has to be told.
FLAGS = ("has_own_embed_tokens", "has_own_lm_head")

_of_this_process: Weights | None = None


def of_this_process() -> Weights:
    """The one of this worker process; made at first use."""
    global _of_this_process
    if _of_this_process is None:
        _of_this_process = Weights(membership.current())
    return _of_this_process


def device_of(rank: int) -> str:
    """The device whose memory service has the weights of `rank`, which runs in this process."""
    if current_platform.is_cpu():
        return session.host_device(rank)
    ordinal = int(torch.cuda.current_device())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if ordinal < len(visible) and visible[ordinal].startswith("MIG-"):
        return visible[ordinal]
    return str(current_platform.get_device_uuid(ordinal))


def inner_loader(config: LoadConfig) -> BaseModelLoader:
    """vLLM's own loader for the load format that the user asked for."""
    ours = config.model_loader_extra_config
    inner = dataclasses.replace(
        config, load_format=ours["load_format"], model_loader_extra_config=ours["extra"]
    )
    return get_model_loader(inner)


class Weights:
    """`identity` is that of this rank, `bytes` what the epoch takes of its device.

    `is_awake` is set by who wakes: a standby has time to read all of its weights when the service
    asks for their digest, an engine that serves has not.
    """

    def __init__(self, member: Member) -> None:
        self.epoch = ""
        self.identity: Document = {}
        self.bytes = 0
        self.keeper: Keeper | None = None
        self.is_awake = False
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
        number, self._models = self._models, self._models + 1
        load = _Load(self._session, number, config, vllm_config, model_config, prefix, self._meter)
        with self._explaining(load):
            return load.run()

    def _attach(self, config: LoadConfig, vllm_config: Any) -> Reader | Writer:
        parallel = vllm_config.parallel_config
        self._rank, self._device = parallel.rank, device_of(parallel.rank)
        load_format = config.model_loader_extra_config["load_format"]
        self._source = Identity(vllm_config, config, str(load_format))
        self.identity = self._source.read()
        leave = self._member.may_load(session.WAIT_S, self._rank, parallel.world_size)
        self._began_s = time.monotonic()
        attached = session.attach(self._member, self._device, leave.mode, self.identity, self._rank)
        if isinstance(attached, Writer):
            self._meter = Meter(attached)
        return attached

    def _explaining(self, load: _Load) -> contextlib.AbstractContextManager[None]:
        if not isinstance(self._session, Writer):
            return contextlib.nullcontext()
        config = load.model_config
        return session.loading(self._device, config.model, str(config.dtype), load.needed_bytes)

    # ------------------------------------------------------------------ all of them

    def settle(self) -> None:
        """All models are there: publish what was written, keep the session, tell the supervisor.

        Raises:
            UnderstudyError: `model.changed`, `model.unbound`; from the supervisor or the service.
        """
        if self._session is None:
            raise InvariantError("vLLM loaded its model without our loader")
        reader = self._commit(self._session) if isinstance(self._session, Writer) else self._session
        if rehome.read_about(reader, self._models) is not None:
            raise UnderstudyError(
                "model.unbound",
                f"epoch {reader.epoch} has a draft model and this engine has none; start every"
                " engine with the same --speculative-config",
            )
        self._session, self.epoch, self.bytes = reader, reader.epoch, reader.size_bytes
        self.keeper = Keeper(reader, may_digest=lambda: not self.is_awake, on_change=logger.warning)
        self.keeper.start()
        self._member.attached(self.epoch, same_on_every_rank(self.identity), self._rank)

    def _commit(self, writer: Writer) -> Reader:
        assert self._source is not None
        after = self._source.read()
        if after != self.identity:
            writer.abort()
            raise UnderstudyError(
                "model.changed",
                f"the files of {after['models']['target']['name']} changed while they were loaded;"
                " nothing was published, and the next attempt reads them anew",
            )
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # no copy may be under way when its target becomes read-only
        with session.loading(self._device, "this model", "", 0):
            reader = writer.commit(after)
        logger.info(
            "loaded and committed %d MiB on %s in %.1f s",
            reader.size_bytes >> 20,
            self._device,
            time.monotonic() - self._began_s,
        )
        return reader

    def distrust(self, detail: str) -> None:
        """A canary over these weights failed; once a second incarnation says so they are loaded
        anew. Waits a little until that is said."""
        if self.keeper is None:
            return
        self.keeper.report_canary_failure(detail)
        if not self.keeper.wait_until_reported(REPORT_WAIT_S):
            logger.warning("no memory service is there to be told that a canary failed")


class _Load:
    """One model on its way, as writer or as reader."""

    def __init__(
        self,
        attached: Reader | Writer,
        number: int,
        config: LoadConfig,
        vllm_config: Any,
        model_config: Any,
        prefix: str,
        meter: Meter | None,
    ) -> None:
        self.model_config = model_config
        self.needed_bytes = 0
        self._session, self._number, self._config = attached, number, config
        self._vllm_config, self._prefix = vllm_config, prefix
        self._device = _torch_device(vllm_config)
        self._registries = Registries(vllm_config)
        self._meter = meter

    def run(self) -> nn.Module:
        before = self._registries.now()
        model = binding.skeleton(self._vllm_config, self.model_config, self._prefix)
        self.needed_bytes = sum(tensor.nbytes for tensor in model.parameters())
        sharing.keep_in_place(model, self._device)
        why = sharing.obstacle(model, self._device)
        if why is None:
            return self._shared(model, before)
        if self._config.model_loader_extra_config["unshareable"] != sharing.PRIVATE:
            raise sharing.refusal(self.model_config.model, why)
        logger.warning("%s is loaded privately, by every engine: %s", self.model_config.model, why)
        self._registries.put(before)
        del model
        return self._private()

    def _shared(self, model: nn.Module, before: Registered) -> nn.Module:
        attached, prefix = self._session, rehome.name_in_epoch(self._number, "")
        if isinstance(attached, Writer):
            about = self._write(attached, before)
        else:
            about = self._about(attached, is_shared=True)
        records = {
            name.removeprefix(prefix): record
            for name, record in attached.tensors.items()
            if name.startswith(prefix)
        }
        bound = binding.Binding(
            model,
            attached.epoch,
            records,
            lambda name: attached.address(prefix + name),
            self._device,
        )
        return bound.run(about, self.model_config)

    def _private(self) -> nn.Module:
        if isinstance(self._session, Reader):
            self._about(self._session, is_shared=False)
            return self._load(inner_loader(self._config))
        assert self._meter is not None
        self._meter.expect(self.needed_bytes)
        with Pulse(self._meter):
            model = self._load(inner_loader(self._config))
        rehome.write_about(
            self._session, self._number, About(type(model).__name__, is_shared=False)
        )
        return model

    def _about(self, reader: Reader, *, is_shared: bool) -> About:
        about = rehome.read_about(reader, self._number)
        if about is None or about.is_shared != is_shared:
            there = "lacks" if about is None else "shares" if about.is_shared else "does not share"
            raise UnderstudyError(
                "model.unbound",
                f"epoch {reader.epoch} {there} {self.model_config.model}, which this engine would"
                f" {'share' if is_shared else 'load privately'}; run the same release of"
                " understudy and of vLLM, with the same flags, in every container",
            )
        return about

    # ------------------------------------------------------------------ writing

    def _write(self, writer: Writer, before: Registered) -> About:
        """Load the model as vLLM does, beside the one that will run, and move it into the epoch."""
        running = self._registries.now()
        self._registries.put(before)
        inner, created = inner_loader(self._config), set[str]()
        _after_creation(inner, lambda model: self._note(model, created))
        assert self._meter is not None
        self._meter.expect(2 * self.needed_bytes)
        _before_reading(inner, self._meter)
        with Pulse(self._meter):
            loaded = self._load(inner)
        self._registries.put(running)
        if not created:
            raise UsageError(
                "model.unshareable",
                f"--load-format {self._config.model_loader_extra_config['load_format']} builds"
                " models in a way of its own that cannot be shared; choose another, such as auto",
            )
        left = {name for name, _ in loaded.named_parameters(remove_duplicate=False)}
        about = About(
            type(loaded).__name__,
            dropped=sorted(created - left),
            flags={flag: bool(getattr(loaded, flag)) for flag in FLAGS if hasattr(loaded, flag)},
        )
        rehome.rehome(loaded, self._number, writer, self._device, about, self._meter)
        rehome.write_about(writer, self._number, about)
        del loaded
        gc.collect()
        return about

    def _note(self, model: nn.Module, created: set[str]) -> None:
        sharing.keep_in_place(model, self._device)
        created.update(name for name, _ in model.named_parameters(remove_duplicate=False))

    def _load(self, loader: BaseModelLoader) -> nn.Module:
        model: nn.Module = loader.load_model(
            vllm_config=self._vllm_config, model_config=self.model_config, prefix=self._prefix
        )
        return model


def _after_creation(loader: Any, then: Any) -> None:
    """Have `then(model)` called when this loader has created its model, before anything is read."""
    create = loader.create_model

    def created(*args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = create(*args, **kwargs)
        then(model)
        return model

    loader.create_model = created


def _before_reading(loader: Any, meter: Meter) -> None:
    """Count what this loader reads, if it is one that says."""
    weights = getattr(loader, "get_all_weights", None)
    if weights is not None:
        loader.get_all_weights = lambda *args, **kwargs: meter.counted(weights(*args, **kwargs))


def _torch_device(vllm_config: Any) -> torch.device:
    device = torch.device(vllm_config.device_config.device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
