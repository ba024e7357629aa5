"""The KV cache of one worker: one tensor whose addresses last, and whose memory comes and goes.

Owns how vLLM comes to use our addresses, and whether there is memory behind them. vLLM allocates
the whole KV cache of a worker by one `torch.zeros(bytes, dtype=torch.int8)`, inside a context that
the worker supplies. That context is this object: it answers that one call with a tensor over a
range of ours, and insists that it was one call and of the size that was expected. So a vLLM that
allocates otherwise fails at start, and never serves from memory that a standby cannot give up.

    scratch   anything may be touched, nothing lasts     warm-up, capture of graphs
    parked    addresses only, touching them is fatal     standby
    taken     zeroed memory                              from the wake on
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol, Self

import torch
from torch.overrides import TorchFunctionMode

from plumbing.errors import InvariantError, UsageError


class Hold(StrEnum):
    """What is behind the addresses."""

    SCRATCH = "scratch"
    PARKED = "parked"
    TAKEN = "taken"


class Range(Protocol):
    """Addresses on one kind of memory: `kv_host.HostRange`, `kv_cuda.CudaRange`."""

    size_bytes: int

    @property
    def address(self) -> int: ...

    def scratch(self) -> None:
        """From parked: all of it may be touched."""
        ...

    def park(self) -> None:
        """Give all memory back."""
        ...

    def take(self, deadline_s: float) -> None:
        """From parked: zeroed memory, or an error and parked as before."""
        ...

    def resident_bytes(self) -> int: ...


TensorAt = Callable[[int, int], torch.Tensor]  # of int8, at an address, of so many bytes


class KVArena(TorchFunctionMode):
    """A context for the allocation of the KV cache, and what that allocation got."""

    def __init__(self, addresses: Range, tensor_at: TensorAt) -> None:
        """Takes parked `addresses`, whose size is what vLLM is going to allocate."""
        super().__init__()
        self.hold = Hold.PARKED
        self._addresses = addresses
        self._tensor_at = tensor_at
        self._seen_bytes: list[Any] = []

    @property
    def kv_bytes(self) -> int:
        return self._addresses.size_bytes

    def resident_bytes(self) -> int:
        """Memory behind the addresses now."""
        return self._addresses.resident_bytes()

    # ------------------------------------------------------------------ the allocation

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        if exc_info[0] is None:
            self.check_allocated()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.get("dtype") is not torch.int8:
            return func(*args, **kwargs)
        self._seen_bytes.append(args[0] if len(args) == 1 else args)
        self._check(is_over=False)
        self._addresses.scratch()
        self.hold = Hold.SCRATCH
        return self._tensor_at(self._addresses.address, self.kv_bytes)

    def check_allocated(self) -> None:
        """Raises:
        UsageError: `vllm.kv_contract`, this vLLM did not allocate as those that we know do.
        """
        self._check(is_over=True)

    def _check(self, *, is_over: bool) -> None:
        expected = [self.kv_bytes]
        if self._seen_bytes == expected or (not is_over and self._seen_bytes == expected[:0]):
            return
        seen = " and ".join(map(str, self._seen_bytes)) or "none"
        raise UsageError(
            "vllm.kv_contract",
            f"this vLLM's KV cache cannot be parked: one buffer of {self.kv_bytes} bytes was"
            f" expected, and it allocated {seen}; use a version of vLLM that is supported",
            expected_bytes=self.kv_bytes,
            seen_bytes=[str(each) for each in self._seen_bytes],
        )

    # ------------------------------------------------------------------ memory comes and goes

    def release(self) -> None:
        """Park; again is harmless."""
        if self.hold is not Hold.PARKED:
            # First the word, then the deed: whoever fails half-way has nothing to rely on.
            self.hold = Hold.PARKED
            self._addresses.park()

    def take(self, deadline_s: float) -> None:
        """Zeroed memory; again is harmless.

        Raises:
            WaitTimeoutError: `engine.kv_memory_busy`; it is parked then, and may be tried again.
        """
        if not self._seen_bytes:
            raise InvariantError("there is no KV cache to take memory for")
        if self.hold is not Hold.TAKEN:
            self.release()
            self._addresses.take(deadline_s)
            self.hold = Hold.TAKEN
