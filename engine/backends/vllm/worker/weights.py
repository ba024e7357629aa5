"""A rank's weights: written into the memory service by the first engine, mapped by the next.

Owns the order in which a worker comes to its weights: identity, leave to load, session with its
own device, one model after the other (`model_load`), commit, report. A draft model is loaded after
the target and belongs to the same epoch, so that the commit comes when vLLM's worker is done with
all of them (`settle`). Knows neither KV memory nor HTTP.

The surprising thing: a writer goes the reader's way as well. It loads as vLLM does, moves every
tensor into the epoch, throws that model away and binds a fresh one to the epoch's addresses, which
`commit` makes read-only in place.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.platforms import current_platform

from engine.backends import session
from engine.backends.process import Member
from engine.backends.vllm.worker import membership, rehome
from engine.backends.vllm.worker.identity import Document, Identity, same_on_every_rank
from engine.backends.vllm.worker.model_load import ModelLoad
from engine.backends.vllm.worker.pulse import Meter
from gms.client import Keeper, Reader, Writer
from plumbing.errors import InvariantError, UnderstudyError

__all__ = ["Weights", "device_of", "of_this_process", "same_on_every_rank"]

logger = logging.getLogger(__name__)

# Who distrusts its weights is about to end, and its report with it: a memory service that has just
# died is back within a second, and nothing serves meanwhile.
REPORT_WAIT_S = 2.0

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
        load = ModelLoad(self._session, number, config, vllm_config, model_config, prefix)
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
        leave = self._member.may_load(session.WAIT_S, self._rank, parallel.world_size)
        self._began_s = time.monotonic()
        attached = session.attach(self._member, self._device, leave.mode, self.identity, self._rank)
        if isinstance(attached, Writer):
            self._meter = Meter(attached)
        return attached

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
