"""How vLLM comes to use our addresses for the KV cache of one worker.

vLLM allocates the whole KV cache of a worker by one `torch.zeros(bytes, dtype=torch.int8)`, inside
a context that the worker supplies. That context is `KVArena`: it answers that one call with a
tensor over our address range, and requires that there was exactly one call, of the expected size.
So a vLLM that allocates differently fails at start, and never serves from memory that a standby
cannot release.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.backends.kv_range import KvRange, Range
from engine.backends.vllm.worker.binding import bytes_at
from plumbing.errors import UsageError


class KVArena(TorchFunctionMode):
    """The context in which vLLM allocates the KV cache."""

    def __init__(self, addresses: KvRange, device: torch.device) -> None:
        """`addresses` of `device` are parked and have the size that vLLM will allocate."""
        super().__init__()
        self._addresses, self._kv_bytes, self._device = addresses, addresses.size_bytes, device
        self._seen_bytes: list[Any] = []

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
        self._addresses.scratch()
        return bytes_at(self._addresses.address, self._kv_bytes, self._device).view(torch.int8)

    def _check(self) -> None:
        """Refuse a vLLM that allocates its KV cache in an unknown way."""
        if self._seen_bytes == [self._kv_bytes]:
            return
        seen = " and ".join(map(str, self._seen_bytes)) or "none"
        raise UsageError(
            "vllm.kv_contract",
            f"this vLLM's KV cache cannot be parked: one buffer of {self._kv_bytes} bytes was"
            f" expected, but it allocated {seen}; use a supported version of vLLM",
            expected_bytes=self._kv_bytes,
            seen_bytes=[str(each) for each in self._seen_bytes],
        )


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
