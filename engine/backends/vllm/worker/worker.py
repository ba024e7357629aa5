"""vLLM's workers, parked and woken: weights through gms, a KV cache without memory in a standby.

Owns what our workers do differently from vLLM's, and the GPU worker. The methods that the backend
calls in every worker (`understudy_…`) never raise and return a dictionary: after an exception on
one rank vLLM leaves the other ranks' answers in their queues, and every later call gets the answer
to an earlier one. Errors before the backend can call are reported to the supervisor directly.

Surprising: `wake_up` takes no memory. The backend takes it on every rank before
(`understudy_take_kv`), checks every answer, and only then wakes vLLM.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from msgspec import structs
from vllm.v1.worker.gpu_worker import Worker as StockGPUWorker

from engine.backends.free_memory import Room, check_can_ever_fit
from engine.backends.vllm.kv import INSTALL_ENV as KEEP_KV_ENV
from engine.backends.vllm.kv import audit, facts
from engine.backends.vllm.kv_size import check_holds_a_sequence
from engine.backends.vllm.resume import INSTALL_ENV
from engine.backends.vllm.worker import membership, weights
from engine.backends.vllm.worker.kv_arena import AddressRange, Backing, KVArena
from engine.backends.vllm.worker.kv_cuda import CudaRange
from engine.backends.vllm.worker.kv_lease import Lending, RankLease, lending_of
from plumbing.errors import UnderstudyError, UsageError

logger = logging.getLogger(__name__)

FIX = "lower --kv-cache-memory-bytes"
CODE_UNEXPECTED = "vllm.worker_failed"
MEETING_FILE = "file://"  # torch's FileStore; over TCP there is no file to remove

Answer = dict[str, Any]


@contextmanager
def reporting() -> Iterator[None]:
    """Report errors to the supervisor; vLLM would only say that its core has failed."""
    try:
        yield
    except UnderstudyError as error:
        membership.current().report(error)
        raise


def answering(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Make `method` never raise, and add the rank and whether it succeeded to its answer."""

    @functools.wraps(method)
    def answer(self: Any, *args: Any) -> Answer:
        about: Answer = {"rank": self.rank, "ok": True, "code": "", "error": ""}
        try:
            return about | method(self, *args)
        except UnderstudyError as error:
            logger.error("%s: %s", method.__name__, error)
            return about | {"ok": False, "code": error.code, "error": error.message}
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            text = f"{method.__name__} failed: {type(error).__name__}: {error}"
            return about | {"ok": False, "code": CODE_UNEXPECTED, "error": text}

    return answer


class ParkingWorker(StockGPUWorker):
    """What both workers have in common; its `super()` is the platform's worker (vLLM's CPU worker
    is a subclass of its GPU worker)."""

    arena: KVArena | None = None
    _expected_bytes = 0
    _cannot_resume = ""  # what is in the way
    _blocks = 0
    _kv_facts: Answer | None = None  # of the blocks, if the engine core is to keep their index
    _cannot_keep = ""  # what is in the way

    @functools.cached_property
    def _lease(self) -> RankLease:
        return RankLease()

    # ------------------------------------------------------------------ what differs

    # Each platform's worker has these three. vLLM's worker is not an abstract class, so a worker
    # that lacks one fails while it starts.

    def room(self) -> Room:
        """The memory available for KV caches."""
        raise NotImplementedError

    def kv_bytes_of_all(self, kv_bytes: int) -> int:
        """What all ranks that share this memory need together."""
        raise NotImplementedError

    def reserve(self, kv_bytes: int) -> AddressRange:
        raise NotImplementedError

    def _install_resume(self) -> str:
        """Let the model runner take up requests; returns what is in the way, or nothing."""
        if getattr(self, "use_v2_model_runner", False):
            return ""  # the scheduler tells it all tokens
        from engine.backends.vllm.resume import batch

        return batch.install(self.model_runner)

    # ------------------------------------------------------------------ the start

    def init_device(self) -> None:
        with reporting():
            super().init_device()
            if os.environ.get(INSTALL_ENV):
                self._cannot_resume = self._install_resume()
            self._report_meeting_file()
            kv_bytes = self._kv_bytes_asked()
            check_can_ever_fit(self.kv_bytes_of_all(kv_bytes), self.room(), FIX)

    def _report_meeting_file(self) -> None:
        """Ranks on one machine meet through a file that none keeps open; it outlives SIGKILL."""
        place = str(self.distributed_init_method)
        if self.rank == 0 and place.startswith(MEETING_FILE):
            membership.current().leftover(place.removeprefix(MEETING_FILE))

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
            super().initialize_from_config(kv_cache_config)
            if self.arena is None:
                raise UsageError(
                    "vllm.kv_contract",
                    "this vLLM allocated its KV cache without asking its worker for memory; does it"
                    " have a KV connector?",
                )
            if os.environ.get(KEEP_KV_ENV):
                self._find_kv_facts(kv_cache_config, self.arena.address)

    def _find_kv_facts(self, kv_cache_config: Any, address: int) -> None:
        try:
            self._kv_facts = facts.facts_of(self, kv_cache_config, address)
        except Exception as error:  # an engine that publishes nothing serves all the same
            logger.exception("what KV blocks depend on cannot be found out")
            self._cannot_keep = f"{type(error).__name__}: {error}"

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag != "kv_cache":
            elsewhere: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
            return elsewhere
        self.arena = KVArena(self.reserve(self._expected_bytes), torch.device(self.device))
        return self.arena

    def _kv_bytes_asked(self) -> int:
        asked = self.cache_config.kv_cache_memory_bytes
        if not asked:
            raise UsageError(
                "vllm.no_kv_size",
                "the KV cache has no size: give every engine the same --kv-cache-memory-bytes",
            )
        return int(asked)

    def _enough_for_a_sequence(self, kv_bytes: int) -> int:
        """`kv_bytes`, if enough; the engine core checks later, and could not report it.

        Raises:
            UsageError: `vllm.kv_too_small`.
        """
        check_holds_a_sequence(self.vllm_config, self.get_kv_cache_spec(), kv_bytes)
        return kv_bytes

    # ------------------------------------------------------------------ park and wake

    def sleep(self, level: int = 1) -> None:
        """Park, at any level: the weights are shared and cost a standby nothing."""
        weights.of_this_process().is_awake = False
        if self.arena is not None:
            self.arena.release()
        self._lease.close()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Only check that the memory was taken.

        Raises:
            UnderstudyError: `engine.not_awake`; to continue would touch memory that is not there.
        """
        if self.arena is not None and self.arena.backing is not Backing.TAKEN:
            raise UnderstudyError(
                "engine.not_awake",
                f"rank {self.rank} is {self.arena.backing}: its KV memory must be taken first",
            )

    def discard(self, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            self.sleep()

    # ------------------------------------------------------------------ what the backend calls

    @answering
    def understudy_status(self) -> Answer:
        ours, arena = weights.of_this_process(), self.arena
        return {
            "weights_bytes": ours.bytes,
            "kv_bytes": arena.kv_bytes if arena else 0,
            "kv_resident_bytes": arena.resident_bytes() if arena else 0,
            "kv_hold": str(arena.backing) if arena else "",
            "epoch": ours.epoch,
            "identity": weights.same_on_every_rank(ours.identity),
            "cannot_resume": self._cannot_resume,
            "cannot_keep_kv": self._cannot_keep,
        }

    @answering
    def understudy_take_kv(self, deadline_s: float, lending: Answer | None = None) -> Answer:
        """Wait until the memory is free (the second fence) and take it, or with `lending` borrow
        the device's pool; `ms` is the duration."""
        began = time.monotonic()
        weights.of_this_process().is_awake = True  # no digests from now on
        pool: Answer = {}
        if self.arena is not None and lending is None:
            if self._lease.is_held:  # another rank could not borrow
                self.sleep()
                weights.of_this_process().is_awake = True
            self.arena.take(deadline_s)
        elif self.arena is not None:
            pool = self._borrow(lending_of(lending), self.arena, deadline_s)
        ms = (time.monotonic() - began) * 1000
        kv_bytes = self.arena.kv_bytes if self.arena else 0
        return {"kv_bytes": kv_bytes, "ms": round(ms, 3), "pool": pool}

    def _borrow(self, lending: Lending, arena: KVArena, deadline_s: float) -> Answer:
        """What the engine core needs, to keep the index of this rank's pool."""
        device = weights.device_of(self.rank)
        claim = lending.claim(arena.pool_bytes, self._blocks, self.rank)
        lease = self._lease.borrow(lending.directory, device, claim, deadline_s)
        arena.borrow(lease.slabs, is_new=lease.is_fresh)
        self._lease.begin()
        return {"device": device, "claim": structs.asdict(claim), "facts": self._all_kv_facts()}

    def _all_kv_facts(self) -> Answer | None:
        if self._kv_facts is None:
            return None
        ours = weights.of_this_process()
        of_weights = {
            "weights_epoch": ours.epoch,
            "identity_digest": facts.digest_of(ours.identity),
        }
        return self._kv_facts | of_weights

    @answering
    def understudy_forget_kv(self) -> Answer:
        """Nobody keeps the index of this rank's pool, so nobody may believe it."""
        self._lease.forget()
        return {}

    @answering
    def understudy_checksum_kv(self, blocks: list[int]) -> Answer:
        """Of this rank's part of `blocks`, of all of which it has the memory."""
        return {"checksums": audit.checksums(self.model_runner.kv_caches, self._blocks, blocks)}

    @answering
    def understudy_distrust(self, detail: str) -> Answer:
        weights.of_this_process().distrust(detail)
        return {}

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


class GPUWorker(ParkingWorker):
    """A worker with its own GPU."""

    _are_comms_suspended = False

    def room(self) -> Room:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return Room(free_bytes, total_bytes, f"the memory of {self._device()}")

    def kv_bytes_of_all(self, kv_bytes: int) -> int:
        return kv_bytes

    def reserve(self, kv_bytes: int) -> AddressRange:
        return CudaRange(self._device(), kv_bytes, self.room)

    def determine_available_memory(self) -> int:
        with reporting():
            self._enough_for_a_sequence(self._kv_bytes_asked())
            # Again: vLLM may reserve a part of it.
            return self._enough_for_a_sequence(int(super().determine_available_memory()))

    def sleep(self, level: int = 1) -> None:
        from vllm.distributed.parallel_state import suspend_device_comms

        torch.cuda.synchronize()
        super().sleep(level)
        torch.cuda.empty_cache()  # the engine that wakes needs what torch has cached
        if self.model_config.enable_nccl_comm_suspend and not self._are_comms_suspended:
            suspend_device_comms()
            self._are_comms_suspended = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        from vllm.distributed.parallel_state import resume_device_comms

        super().wake_up(tags)
        if self._are_comms_suspended:
            resume_device_comms()
            self._are_comms_suspended = False

    def _device(self) -> str:
        return weights.device_of(self.rank)
