"""One contract for both kinds of memory: allocations, ranges of addresses, and what is refused.

On CUDA through the stand-in for the driver; what only its driver does is in `test_gms_cuda.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gms.client import memory_for
from gms.vmm.host import HostMemory
from gms.vmm.interface import DeviceMemory
from plumbing.errors import UnderstudyError
from plumbing.wire.fds import OwnedFd
from tests.helpers import open_fds
from tests.standin import build


@pytest.fixture
def memory(kind: str, device: str) -> Iterator[DeviceMemory]:
    """What a test opens, it closes."""
    if kind == "cuda":
        build.call("Init", 0)
        build.call("CtxSetCurrent", 0)  # as on a fresh thread, whatever ran before on this one
    found = memory_for(device)
    assert found.kind == kind, "never the other one"
    before = open_fds()
    yield found
    if kind == "host" or build.REAL_GPU is None:  # whose driver opens files when it sees fit
        assert open_fds() == before


def test_memory_is_mapped_side_by_side_all_or_none_at_addresses_that_stay(memory: DeviceMemory):
    """Bytes across the border of two slabs; what does not fit or follow maps nothing; read-only in
    place; unmapped, and mapped again at the same addresses; each undo is harmless to repeat."""
    step = memory.granularity_bytes
    first, second = memory.create(step, "a"), memory.create(2 * step, "b")
    reservation = memory.reserve(4 * step)
    address = reservation.address
    with pytest.raises(AssertionError, match="do not follow"):
        reservation.map(step, [first], writable=True)
    reservation.map(0, [first], writable=True)
    with pytest.raises(AssertionError, match="as a whole"):
        reservation.map(step, [second], writable=False)
    with pytest.raises(AssertionError, match="do not follow"):
        reservation.map(step, [second, second], writable=True)
    with pytest.raises(AssertionError, match="not mapped"):
        reservation.read(step, 1)
    reservation.map(step, [second], writable=True)
    reservation.write(step - 2, memoryview(b"..span")[2:])
    reservation.write(0, b"")
    for offset, size in ((-1, 1), (3 * step, 1)):
        with pytest.raises(AssertionError, match="not mapped"):
            reservation.read(offset, size)
    reservation.make_read_only()
    assert (reservation.read(step - 2, 4), reservation.read(0, 0)) == (b"span", b"")
    reservation.unmap()
    reservation.unmap()
    reservation.map(0, [first, second], writable=False)
    assert (reservation.address, reservation.read(step - 2, 4)) == (address, b"span")
    for undo in (reservation.free, first.release, second.release):
        undo()
        undo()


def test_memory_is_cleared_where_it_is_mapped(memory: DeviceMemory):
    """Bytes all over two slabs of three: zero afterwards; nothing to clear is no error."""
    step = memory.granularity_bytes
    allocation, reservation = memory.create(2 * step, "t"), memory.reserve(3 * step)
    reservation.clear()
    reservation.map(0, [allocation], writable=True)
    reservation.write(0, b"x" * 2 * step)
    reservation.clear()
    assert reservation.read(0, 2 * step) == bytes(2 * step)
    reservation.free()
    allocation.release()


def test_what_is_no_slab_is_refused_and_closed(memory: DeviceMemory):
    """A pipe, host memory of another size: `gms.bad_slab`, and nothing stays open."""
    step = memory.granularity_bytes
    reading, writing = os.pipe()
    os.close(writing)
    small = HostMemory().create(HostMemory.granularity_bytes, "small")
    for fd in (OwnedFd(reading), small.export(writable=False)):
        with pytest.raises(UnderstudyError, match=r"gms\.bad_slab"):
            memory.adopt(fd, 2 * step)
    small.release()


def test_sealed_memory_is_lent_to_readers_only(memory: DeviceMemory):
    """A writable export of sealed memory is our own fault; no descriptor is inherited."""
    slab = memory.create(memory.granularity_bytes, "t")
    slab.export(writable=True).close()
    slab.seal()
    with pytest.raises(AssertionError):
        slab.export(writable=True)
    with slab.export(writable=False) as lent:
        assert not os.get_inheritable(lent.fileno())
    assert not os.get_inheritable(slab.fileno())
    slab.release()
