"""The KV cache of one worker: one tensor with fixed addresses, whose memory is taken and released.

Owns how vLLM comes to use our addresses, and whether there is memory behind them. vLLM allocates
the whole KV cache of a worker by one `torch.zeros(bytes, dtype=torch.int8)`, inside a context that
the worker supplies. That context is this object: it answers that one call with a tensor over our
address range, and requires that there was exactly one call, of the expected size. So a vLLM that
allocates differently fails at start, and never serves from memory that a standby cannot release.

    scratch   any address may be touched, nothing lasts   warm-up, graph capture
    parked    addresses only, touching them is fatal      standby
    taken     zeroed memory, or the pool's with what      from the wake on
              earlier engines have left in it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.backends.kv_range import KvRange, Range
from engine.backends.vllm import NO_SELF_TEST
from engine.backends.vllm.worker.binding import bytes_at
from gms.client import Allocation
from plumbing.errors import InvariantError, UsageError


class Backing(StrEnum):
    """What is behind the addresses."""

    SCRATCH = "scratch"
    PARKED = "parked"
    TAKEN = "taken"


class KVArena(TorchFunctionMode):
    """The context in which vLLM allocates the KV cache, and the memory of that cache."""

    def __init__(self, addresses: KvRange, device: torch.device) -> None:
        """`addresses` of `device` are parked and have the size that vLLM will allocate."""
        super().__init__()
        self.backing = Backing.PARKED
        self.addresses, self.kv_bytes = addresses, addresses.size_bytes
        self._device = device
        self._seen_bytes: list[Any] = []

    # ------------------------------------------------------------------ the allocation

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        if exc_info[0] is None:
            self._check()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.get("dtype") is not torch.int8:
            return func(*args, **kwargs)
        self._seen_bytes.append(args[0] if len(args) == 1 else args)
        self._check()
        self.addresses.scratch()
        self.backing = Backing.SCRATCH
        return bytes_at(self.addresses.address, self.kv_bytes, self._device).view(torch.int8)

    def _check(self) -> None:
        """Refuse a vLLM that allocates its KV cache in an unknown way."""
        if self._seen_bytes == [self.kv_bytes]:
            return
        seen = " and ".join(map(str, self._seen_bytes)) or "none"
        raise UsageError(
            "vllm.kv_contract",
            f"this vLLM's KV cache cannot be parked: one buffer of {self.kv_bytes} bytes was"
            f" expected, but it allocated {seen}; use a supported version of vLLM",
            expected_bytes=self.kv_bytes,
            seen_bytes=[str(each) for each in self._seen_bytes],
        )

    # ------------------------------------------------------------------ park and wake

    def scratch(self) -> None:
        """From parked: scratch memory again, for a trial."""
        if self.backing is not Backing.PARKED:
            raise InvariantError(f"scratch memory for a KV cache that is {self.backing}")
        if not self.addresses.can_test:
            raise UsageError(
                NO_SELF_TEST,
                "the KV blocks of this model are too large, or lie in parts, so that a self-test in"
                " scratch memory is not possible",
            )
        self.addresses.scratch()
        self.backing = Backing.SCRATCH

    def release(self) -> None:
        """Park; idempotent."""
        if self.backing is not Backing.PARKED:
            # Set first: after a failure half-way the memory must not count as taken.
            self.backing = Backing.PARKED
            self.addresses.park()

    def take(self, deadline_s: float) -> None:
        """Take zeroed memory; idempotent.

        Raises:
            WaitTimeoutError: `engine.kv_memory_busy`; it stays parked, and may be retried.
        """
        self._have(lambda: self.addresses.take(deadline_s))

    def borrow(self, slabs: Sequence[Allocation], *, is_new: bool) -> None:
        """Use the memory of a pool, whose content stays; a new one on a GPU has none yet.

        Raises:
            UnderstudyError: it cannot be mapped, and the cache stays parked.
        """
        self._have(lambda: self.addresses.borrow(slabs, is_new=is_new))

    def _have(self, take: Callable[[], None]) -> None:
        if not self._seen_bytes:
            raise InvariantError("the KV cache has not been allocated")
        if self.backing is not Backing.TAKEN:
            self.release()
            take()
            self.backing = Backing.TAKEN


BLOCKS = 192  # of each group of layers: what a self-test uses at most (`self_test.most_blocks`)


def ranges(kv_cache_config: Any) -> list[Range] | None:
    """Where the first `BLOCKS` blocks of all layers lie, in order and joined; None: that cannot be
    told, because the parts of a block lie apart."""
    found: list[Range] = []
    pages = [group.kv_cache_spec.page_size_bytes for group in kv_cache_config.kv_cache_groups]
    for tensor in kv_cache_config.kv_cache_tensors:
        of_block = int(getattr(tensor, "block_stride", 0))
        if of_block < max(pages):
            return None
        length = min(BLOCKS * len(pages), int(kv_cache_config.num_blocks)) * of_block
        starts = [tensor.offset + at * tensor.layer_stride for at in range(len(tensor.layers))]
        found += [(start, min(start + length, tensor.size)) for start in starts]
    joined: list[Range] = []
    for start, end in sorted(found):
        if joined and start <= joined[-1][1]:
            start, before = joined.pop()
            end = max(end, before)
        joined.append((start, end))
    return joined
