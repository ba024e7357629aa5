"""The KV cache's addresses on host memory: what is behind them when, and what touching them does.

What must end a process is done by a child. Everything is the kernel's answer, nothing is faked.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from engine.backends.process_memory import RESERVE_BYTES, Room
from engine.backends.vllm.worker.kv_host import HostRange
from gms.vmm.host import HUGE_BYTES, HostMemory
from plumbing.errors import WaitTimeoutError
from tests.engine.pod import ROOT
from tests.helpers import until

MIB = 1 << 20
SIZE = 8 * MIB


def has(free_bytes: int) -> Callable[[], Room]:
    return lambda: Room(free_bytes, 1 << 40, "a test")


@pytest.fixture
def addresses() -> Iterator[HostRange]:
    found = HostRange(SIZE, read=has(1 << 40))
    yield found
    found.free()
    found.free()


def touch(addresses: HostRange, byte: int = 7) -> None:
    ctypes.memset(addresses.address, byte, SIZE)


def content(addresses: HostRange) -> set[int]:
    return set(ctypes.string_at(addresses.address, SIZE))


def test_standby_holds_no_memory_and_wakes_at_the_same_address(addresses: HostRange):
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


def test_pool_is_filled_while_it_is_borrowed_and_not_after(addresses: HostRange):
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


def test_size_is_what_was_asked_for_to_the_byte():
    """A size that is no multiple of a page: the last byte is there, and the number is kept."""
    odd = HostRange(SIZE + 5, read=has(1 << 40))
    odd.take(0)
    ctypes.memset(odd.address + SIZE + 4, 1, 1)
    assert odd.size_bytes == SIZE + 5
    odd.free()


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
from engine.backends.vllm.worker.kv_host import HostRange
r = HostRange(1 << 20, read=lambda: Room(1 << 40, 1 << 40, "a test"))
read = lambda at=0: ctypes.string_at(r.address + at, 1)
write = lambda at=0: ctypes.memset(r.address + at, 1, 1)
"""


@pytest.mark.parametrize("touch", TOUCHES)
def test_touching_what_is_not_there_ends_the_process(touch: str):
    """A standby that uses its KV cache has a bug, which must not become memory: SIGSEGV."""
    program = f"{CHILD}\n{TOUCHES[touch]}"
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT)
    assert done.returncode == (0 if touch == "none" else -signal.SIGSEGV)


def protection_of(address: int) -> str:
    """What the kernel lets us do at `address`."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            where, rights = line.split()[:2]
            start, end = (int(number, 16) for number in where.split("-"))
            if start <= address < end:
                return rights
    return ""


def test_machine_without_room_is_a_sentence_and_still_parked():
    """Needed, free and how long: and the addresses are as closed as before; more than one rank
    needs as many times the room."""
    addresses = HostRange(SIZE, ranks=2, read=has(SIZE + RESERVE_BYTES))
    sentence = r"needs 16\.0 MiB and 72\.0 MiB are free \(64\.0 MiB are reserved\); waited 0 s"
    with pytest.raises(WaitTimeoutError, match=sentence) as caught:
        addresses.take(0)
    assert caught.value.code == "engine.kv_memory_busy"
    assert caught.value.details == {"needed_bytes": 2 * SIZE, "free_bytes": SIZE + RESERVE_BYTES}
    assert protection_of(addresses.address) == "---p"
    addresses.free()


def test_memory_that_comes_free_is_taken():
    """A dying process gives its memory back while we wait: the third look finds it."""
    looks = itertools.chain([0, 0], itertools.repeat(1 << 40))
    addresses = HostRange(SIZE, read=lambda: Room(next(looks), 1 << 40, "a test"))
    addresses.take(30)
    assert protection_of(addresses.address) == "rw-p"
    addresses.free()


def limited(limit: int, body: str) -> str:
    """What a child prints that has `limit` set to what it uses now and a MiB."""
    use = {resource.RLIMIT_AS: "VmSize", resource.RLIMIT_DATA: "VmData"}[limit]
    program = f"""
    import resource
    from plumbing.errors import UnderstudyError
    used = [line for line in open("/proc/self/status") if line.startswith("{use}")][0].split()[1]
    def limit(more):
        most = int(used) * 1024 + more
        resource.setrlimit({limit}, (most, resource.RLIM_INFINITY))
    limit(1 << 20)
    """
    done = subprocess.run(
        [sys.executable, "-c", CHILD + textwrap.dedent(program) + textwrap.dedent(body)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return done.stdout


def test_kernel_that_does_not_overcommit_is_asked_again_until_the_deadline():
    """A limit of the kernel's in place of a machine's: refused, closed as before, and taken once
    the limit is lifted."""
    said = limited(
        resource.RLIMIT_DATA,
        """
        looks = []
        def look():
            looks.append(1)
            if len(looks) == 3:
                limit(1 << 30)
            return Room(1 << 40, 1 << 40, "a test")
        r = HostRange(64 << 20, read=look)
        try:
            r.take(0)
        except UnderstudyError as error:
            print(error.code)
        r.take(30)
        write()
        print(len(looks))
        """,
    )
    assert said.split() == ["engine.kv_memory_busy", "3"]


def test_too_few_addresses_are_a_sentence():
    """`ulimit -v`: it is named, and what to look at."""
    said = limited(
        resource.RLIMIT_AS,
        """
        try:
            HostRange(64 << 30)
        except UnderstudyError as error:
            print(error)
        """,
    )
    assert "engine.kv_addresses" in said
    assert "ulimit -v" in said
