"""The KV cache's addresses on host memory: what is behind them when, and what touching them does.

What must end a process is done by a child. Everything is the kernel's answer, nothing is faked.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from engine.backends.kv_range import KvRange
from engine.backends.process_memory import Room
from gms.vmm.host import HUGE_BYTES, HostMemory
from tests.engine.pod import ROOT
from tests.helpers import until

MIB = 1 << 20
SIZE = 8 * MIB


def has(free_bytes: int) -> Callable[[], Room]:
    return lambda: Room(free_bytes, 1 << 40, "a test")


@pytest.fixture
def addresses() -> Iterator[KvRange]:
    found = KvRange("HOST-0", SIZE, has(1 << 40))
    yield found
    found.free()
    found.free()


def touch(addresses: KvRange, byte: int = 7) -> None:
    ctypes.memset(addresses.address, byte, SIZE)


def content(addresses: KvRange) -> set[int]:
    return set(ctypes.string_at(addresses.address, SIZE))


def test_standby_holds_no_memory_and_wakes_at_the_same_address(addresses: KvRange):
    """Scratch, park, take, park, take, each touched all over: what the kernel counts as resident
    is nothing when parked, and what comes back is zero."""
    at = addresses.address
    assert addresses.resident_bytes() == 0
    addresses.scratch()
    for _ in range(2):
        touch(addresses)
        assert addresses.resident_bytes() >= SIZE
        addresses.park()
        assert (addresses.address, addresses.resident_bytes()) == (at, 0)
        addresses.take(0)
        assert addresses.resident_bytes() < SIZE
        assert content(addresses) == {0}


def test_pool_is_filled_while_it_is_borrowed_and_not_after(addresses: KvRange):
    """A page of each huge page comes by itself; parked, the addresses are as closed as before,
    and nothing fills them."""
    slab = HostMemory().create(SIZE, "pool")
    for _ in range(3):
        addresses.borrow([slab], is_new=True)
        addresses.park()
    assert addresses.resident_bytes() == 0
    addresses.borrow([slab], is_new=False)
    least_bytes = SIZE // HUGE_BYTES * mmap.PAGESIZE
    until(lambda: addresses.resident_bytes() >= least_bytes, "a page of each huge page")
    addresses.park()
    slab.release()


# What a child does with `r`, of one MiB; each but the last has to end in SIGSEGV.
TOUCHES = {
    "reads_before_scratch": "read()",
    "writes_before_scratch": "write()",
    "reads_when_parked": "r.scratch(); write(); r.park(); read()",
    "writes_when_parked_again": "r.scratch(); r.park(); r.take(0); write(); r.park(); write()",
    "runs_over_the_end": "r.take(0); write(1 << 20)",
    "runs_over_the_start": "r.take(0); write(-1)",
    "none": "r.scratch(); write(); r.park(); r.take(0); write(); read(); r.park()",
}
CHILD = """
import ctypes
from engine.backends.process_memory import Room
from engine.backends.kv_range import KvRange
r = KvRange("HOST-0", 1 << 20, lambda: Room(1 << 40, 1 << 40, "a test"))
read = lambda at=0: ctypes.string_at(r.address + at, 1)
write = lambda at=0: ctypes.memset(r.address + at, 1, 1)
"""


@pytest.mark.parametrize("touch", TOUCHES)
def test_touching_what_is_not_there_ends_the_process(touch: str):
    """A standby that uses its KV cache has a bug, which must not become memory: SIGSEGV."""
    program = f"{CHILD}\n{TOUCHES[touch]}"
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT)
    assert done.returncode == (0 if touch == "none" else -signal.SIGSEGV)
