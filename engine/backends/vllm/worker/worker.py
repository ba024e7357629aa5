"""vLLM's workers, parked and woken: weights through gms, a KV cache without memory in a standby.

Owns what both our workers do differently from vLLM's. The methods that the backend calls in every
worker (`understudy_…`), and `sleep`, never raise (`membership.py`). Errors before the backend can
call are reported to the supervisor directly. `wake_up` takes no memory: the backend takes it on
every rank before (`understudy_take_kv`), checks every answer, and only then wakes vLLM.

A parked rank waits for its next call without spinning. For a second after each call vLLM's workers
look for the next one without pause. So an engine that was put to sleep a moment ago would take a
core from the one that wakes in its place.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from msgspec import structs
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.worker.gpu_worker import Worker as StockGPUWorker

from engine.backends import process_memory
from engine.backends.kv_range import Backing, KvRange, Range
from engine.backends.memory_session import borrow, page_of
from engine.backends.process_memory import check_can_ever_fit
from engine.backends.shards import digest_of, same_on_every_rank
from engine.backends.vllm import NO_SELF_TEST, membership, resume
from engine.backends.vllm.kv import INSTALL_ENV as KEEP_KV_ENV
from engine.backends.vllm.kv import facts
from engine.backends.vllm.membership import Answer, answering, reporting
from engine.backends.vllm.worker import kv_arena, weights
from engine.backends.vllm.worker.kv_arena import KVArena
from engine.kv.layout import index_bytes
from gms.client import BEGUN, KvClaim, KvLease
from plumbing.errors import InvariantError, UnderstudyError, UsageError

logger = logging.getLogger(__name__)

GIVE_UP_S = 5.0  # to unmap and free takes milliseconds; the backend asks for longer


class ParkingWorker(StockGPUWorker):
    """What both workers have in common; its `super()` is the platform's worker (vLLM's CPU worker
    is a subclass of its GPU worker)."""

    kv: KvRange | None = None  # once vLLM has asked for it
    _expected_bytes = 0
    _cannot_resume = ""  # what is in the way
    _blocks = 0
    _used_by_test: list[Range] | None = None
    _kv_facts: Answer | None = None  # of the blocks, if the engine core is to keep their index
    _cannot_keep = ""  # what is in the way
    _not_parked = ""  # why the last `sleep` has failed
    _lease: KvLease | None = None  # of the device's KV memory, from the wake on

    # Of each platform's worker: a method that tells the memory available for KV caches (`Room`),
    # and how many ranks share it. The classes of vLLM that we extend have no ABCMeta, and a worker
    # that lacks one of these fails while it starts.
    room: Any
    ranks_together: Any

    # ------------------------------------------------------------------ the start

    def init_device(self) -> None:
        with reporting():
            super().init_device()
            if os.environ.get(resume.INSTALL_ENV):
                self._cannot_resume = resume.install(self.vllm_config, self.model_runner)
            needed_bytes = self.ranks_together * self.cache_config.kv_cache_memory_bytes
            check_can_ever_fit(needed_bytes, self.room(), "lower --kv-cache-memory-bytes")

    def load_model(self, **kwargs: Any) -> None:
        """Load as vLLM does, with our loader. A draft model is loaded after the target, so only now
        is the epoch complete."""
        with reporting():
            super().load_model(**kwargs)
            weights.of_this_process().settle()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with reporting():
            sizes = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
            if len(sizes) != 1:
                raise UsageError(
                    "vllm.kv_contract",
                    f"this model has a KV cache of {len(sizes)} buffers; only one can be parked",
                )
            self._expected_bytes = sizes.pop()
            self._blocks = int(kv_cache_config.num_blocks)
            self._used_by_test = kv_arena.ranges(kv_cache_config)
            super().initialize_from_config(kv_cache_config)
            if self.kv is None:
                raise UsageError(
                    "vllm.kv_contract",
                    "this vLLM allocated its KV cache without asking its worker for memory; does it"
                    " have a KV connector?",
                )
            if not os.environ.get(KEEP_KV_ENV):
                return
            try:
                self._kv_facts = facts.facts_of(self, kv_cache_config, self.kv.address)
            except Exception as error:  # an engine that publishes nothing serves all the same
                logger.exception("what KV blocks depend on cannot be found out")
                self._cannot_keep = f"{type(error).__name__}: {error}"

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM does, at the start. Its warm-up writes to KV blocks as if they were its own.

        Raises:
            UnderstudyError: `engine.warm_up`; it would overwrite blocks, or touch no memory.
        """
        if self.kv is not None and self.kv.backing is not Backing.SCRATCH:
            raise UnderstudyError(
                "engine.warm_up",
                f"rank {self.rank} cannot warm up: its KV memory is {self.kv.backing}",
            )
        took: Any = super().compile_or_warm_up_model()
        process_memory.into_huge_pages()  # so that this process dies sooner
        return took

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag != "kv_cache":
            elsewhere: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
            return elsewhere
        self.kv = KvRange(
            weights.device_of(self.rank),
            self._expected_bytes,
            self.room,
            ranks=self.ranks_together,
            used=self._used_by_test,
        )
        return KVArena(self.kv, torch.device(self.device))

    # ------------------------------------------------------------------ park and wake

    def sleep(self, level: int = 1) -> None:
        """Park, at any level: the weights are shared and cost a standby nothing.

        Never raises: after one rank's failure vLLM takes itself for awake, while the memory of the
        others is gone. The next request to this rank is told.
        """
        try:
            self._park()
            self._not_parked = ""
        except Exception as error:
            logger.exception("rank %d cannot be parked", self.rank)
            self._not_parked = f"the KV memory was not freed: {type(error).__name__}: {error}"

    def _park(self) -> None:
        if self.kv is not None:
            self.kv.park()

    @property
    def _has_kv(self) -> bool:
        return self.kv is not None and self.kv.backing is not Backing.PARKED

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Only check that there is memory: the engine's own, or, for a self-test, scratch memory.

        Raises:
            UnderstudyError: `engine.not_awake`; to continue would touch memory that is not there.
        """
        if self.kv is not None and self.kv.backing is Backing.PARKED:
            raise UnderstudyError(
                "engine.not_awake",
                f"rank {self.rank} is {self.kv.backing}: its KV memory must be taken first",
            )

    def discard(self, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            self.sleep()

    # ------------------------------------------------------------------ what the backend calls

    @answering
    def understudy_status(self) -> Answer:
        ours = weights.of_this_process()
        if self._not_parked:
            raise UnderstudyError("vllm.not_parked", self._not_parked)
        return {
            "weights_bytes": ours.bytes,
            "kv_bytes": self.kv.size_bytes if self.kv else 0,
            "epoch": ours.kept.reader.epoch,
            "identity": same_on_every_rank(ours.identity),
            "cannot_resume": self._cannot_resume,
            "cannot_keep_kv": self._cannot_keep,
            "cannot_offload": ours.cannot_offload,
        }

    @answering
    def understudy_scratch(self) -> None:
        """For a self-test of an engine that is parked. `sleep` follows."""
        if self.kv is not None and not self.kv.can_test:
            raise UsageError(
                NO_SELF_TEST,
                "the KV blocks of this model are too large, or lie in parts, so that a self-test in"
                " scratch memory is not possible",
            )
        if self.kv is not None:
            self.kv.scratch()

    @answering
    def understudy_join(self, token: int) -> None:
        """Hold the serving file, before any rank maps KV memory under `token`."""
        membership.join_serving(token)
        resume_spinning()

    @answering
    def understudy_take_kv(self, deadline_s: float, token: int = 0, era: str = "") -> Answer:
        """Map the weights, where they were released. Then wait until the memory is free (the second
        fence) and take it, or, as the holder of `active` under `token` of `era`, borrow the
        device's pool."""
        membership.check_serving()
        end_s = time.monotonic() + deadline_s
        weights.of_this_process().kept.bring_back(deadline_s)
        kv, pool, left_s = self.kv, {}, max(0.0, end_s - time.monotonic())
        if kv is not None and not token:
            kv.take(left_s)
        elif kv is not None:
            pool = self._borrow(kv, left_s, token, era)
        return {"pool": pool}

    def _borrow(self, kv: KvRange, deadline_s: float, token: int, era: str) -> Answer:
        """What the engine core needs, to keep the index of this rank's pool. The first holder of a
        new region on a GPU zeroes it before it is used.

        Raises:
            UnderstudyError: as `memory_session.borrow`.
        """
        member, device = membership.current(), weights.device_of(self.rank)
        records = self._blocks if self.rank == 0 else 0  # the others' pools have a header only
        sizes = kv.pool_bytes, index_bytes(records)
        claim = KvClaim(member.engine, member.incarnation, token, era, *sizes)
        if self._lease is None:
            self._lease = borrow(device, claim, deadline_s)
        kv.borrow(self._lease.slabs, is_new=self._lease.is_fresh)
        self._lease.mark(BEGUN)  # the memory is zero or a predecessor's; from here on it is written
        known, ours = self._kv_facts, weights.of_this_process()
        if known is not None:
            digest = digest_of(ours.identity)
            epoch = ours.kept.reader.epoch
            known = {**known, "weights_epoch": epoch, "identity_digest": digest}
        return {"device": device, "claim": structs.asdict(claim), "facts": known}

    @answering
    def understudy_rest(self, keep_kv: bool) -> Answer:
        """After `sleep`, on every rank: prove that nothing is mapped, give the pool back or up, and
        leave the serving file.

        Raises:
            UnderstudyError: `vllm.not_parked`, or the memory service's reason; it holds the serving
                file still.
        """
        resident_bytes = self.kv.resident_bytes() if self.kv is not None else 0
        if self._not_parked or self._has_kv or resident_bytes:
            why = (
                f"the KV memory is still mapped: {self._has_kv}, with {resident_bytes} bytes"
                " resident"
            )
            raise UnderstudyError("vllm.not_parked", self._not_parked or why)
        lease, self._lease = self._lease, None
        if lease is not None and keep_kv:
            lease.close()  # the content is the next holder's
        elif lease is not None:
            lease.give_up(GIVE_UP_S)
        membership.leave_serving()
        stop_spinning()
        return {"kv_resident_bytes": resident_bytes}

    @answering
    def understudy_forget_kv(self) -> None:
        """The index of this rank's pool is not maintained, so no engine may believe it, until a
        writer begins it anew."""
        if self._lease is None:
            raise InvariantError("there is no lease")
        page = page_of(self._lease)
        page.invalidate_header()
        page.release()

    @answering
    def understudy_distrust(self, detail: str) -> None:
        weights.of_this_process().kept.distrust(detail)

    # ------------------------------------------------------------------ without weights

    # The tensors of the model stay what they are: addresses where for a while nothing is mapped. On
    # a GPU captured graphs keep these addresses, too. Surprising: `sleep` and `wake_up` know
    # nothing of this. vLLM sleeps with its weights mapped; the backend has them released
    # afterwards, and they are mapped again before there is KV memory.

    def execute_model(self, *asked: Any, **more: Any) -> Any:
        self.check_weights()
        return super().execute_model(*asked, **more)

    def execute_dummy_batch(self) -> None:
        self.check_weights()
        super().execute_dummy_batch()

    def check_weights(self) -> None:
        """Report that something was to be computed without weights, which ends this incarnation: it
        would end the process (SIGSEGV; on a GPU the context is lost), without a word on why.

        Raises:
            UnderstudyError: `vllm.weights_away`.
        """
        if weights.of_this_process().kept.is_away:
            with reporting():
                raise UnderstudyError(
                    "vllm.weights_away",
                    f"rank {self.rank} was asked to compute while its weights are only in host"
                    " memory",
                )

    def finish_work(self) -> None:
        """Nothing that was started may still read weights; on host memory nothing can."""

    @answering
    def understudy_place_weights(self, is_away: bool, budget_s: float) -> Answer:
        """While parked: release the weights and have their memory freed, or map them again where
        they were. `note`: why they are still mapped, or why their memory is not free yet.

        Raises:
            UnderstudyError: `vllm.not_parked`; they cannot be mapped again, so this process must
                end.
        """
        ours, freed_bytes, note = weights.of_this_process(), 0, ""
        if not is_away:
            ours.kept.bring_back(budget_s)
        elif self._has_kv:
            raise UnderstudyError(
                "vllm.not_parked", "the weights are in use: this rank has KV memory"
            )
        elif ours.cannot_offload:
            note = ours.cannot_offload
        else:
            self.finish_work()
            freed_bytes, note = ours.kept.let_go()
        return {"is_away": ours.kept.is_away, "freed_bytes": freed_bytes, "note": note}

    # ------------------------------------------------------------------ refused

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnderstudyError(
            "vllm.weights_are_shared",
            "this worker shares its weights, read-only, with the other engine and cannot change"
            " them; start engines with the new weights instead",
        )

    reload_weights = update_weights = reset_weights = _refuse
    init_weight_transfer_engine = start_weight_update = start_draft_weight_update = _refuse
    finish_weight_update = elastic_ep_execute = _refuse


LONG_AGO_S = 0.0  # on the monotonic clock

_stock_wait = SpinCondition.wait
_is_parked = False


def stop_spinning() -> None:
    """This rank is parked. Safe to repeat."""
    global _is_parked
    _is_parked = True
    SpinCondition.wait = _wait


def resume_spinning() -> None:
    """It is about to wake: calls follow each other."""
    global _is_parked
    _is_parked = False


def _wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
    if _is_parked:
        self.last_read = LONG_AGO_S
    _stock_wait(self, timeout_ms)
