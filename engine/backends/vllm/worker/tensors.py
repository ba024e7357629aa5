"""Tensors over bare addresses, such as the memory service's.

Converts addresses to tensors, and tensors to layouts. A tensor made here keeps nothing alive: its
memory stays mapped while the process lives. Surprising: on the host, a tensor over read-only memory
looks writable to torch; a write to it kills the process.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from gms.client import TensorRecord


class Layout(NamedTuple):
    """Where a tensor lies in its storage; equal for two names of one tensor."""

    storage: int  # the address of the storage
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
        )

    @property
    def nbytes(self) -> int:
        """From the first element's first byte to the last one's end, gaps included."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return (sum((n - 1) * step for n, step in steps) + 1) * int(self.dtype.itemsize)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`, as in manifests."""
    return str(dtype).removeprefix("torch.")


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """`nbytes` bytes of `device` at `address`, as a tensor of uint8."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)
    return torch.as_tensor(_OnDevice(address, nbytes), device=device)


def tensor_at(address: int, record: TensorRecord, device: torch.device) -> torch.Tensor:
    """The tensor that `record` describes, with its first byte at `address` of `device`."""
    flat = bytes_at(address, record.nbytes, device).view(getattr(torch, record.dtype))
    if record.strides is None:
        return flat.view(record.shape)
    return flat.as_strided(record.shape, record.strides)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of `tensor` in its storage, gaps included, as a view of uint8."""
    first = tensor.storage_offset() * tensor.dtype.itemsize
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), first, (Layout.of(tensor).nbytes,), (1,))


class _OnDevice:
    """Lets torch make a tensor without a copy (CUDA array interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
