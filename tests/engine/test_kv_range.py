"""The addresses of a KV cache, on host memory and on a GPU: scratch, parked, taken, borrowed.

On the host everything is the kernel's answer, nothing is faked. The GPU is the stand-in for the
driver, whose device addresses are addresses of this process, so that what lies behind them can be
read and written here; a fault is a SIGSEGV, where a GPU ends the context. What must end a process
is done by a child.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.backends import kv_range
from engine.backends.kv_range import KvRange
from engine.backends.process_memory import Room
from gms.vmm.cuda import CudaMemory
from gms.vmm.host import HUGE_BYTES, HostMemory
from gms.vmm.interface import release_all
from plumbing.errors import InvariantError, UnderstudyError, WaitTimeoutError
from tests.engine.pod import ROOT
from tests.helpers import open_fds, until
from tests.standin import build

STEP = 2 << 20  # the granularity
SIZE = 5 * STEP + 100  # no multiple of anything

HOST = "HOST-0"
GPU = pytest.param(
    build.GPU_A,
    marks=pytest.mark.skipif(
        build.REAL_GPU is not None, reason="addresses of a real GPU cannot be touched from here"
    ),
)
on_each = pytest.mark.parametrize("device", [HOST, GPU])
on_gpu = pytest.mark.parametrize("device", [GPU])


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh machine, small blocks, and nothing left of them in the end."""
    build.use(monkeypatch)
    monkeypatch.setattr(kv_range, "SCRATCH_BYTES_MAX", 2 * STEP)
    monkeypatch.setattr(CudaMemory, "allocation_bytes_max", 4 * STEP)
    build.call("Init", 0)
    build.call("CtxSetCurrent", 0)
    before = open_fds()
    yield
    assert used() == 0
    assert open_fds() == before


def used() -> int:
    """The device's memory in use, as everybody on the machine sees it."""
    import pynvml

    pynvml.nvmlInit()
    found = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(build.GPU_A)).used
    pynvml.nvmlShutdown()
    return int(found)


def free() -> Room:
    total = int(os.environ.get("STANDIN_MEMORY", 80 << 30))
    return Room(total - used(), total, "a test")


def plenty() -> Room:
    return Room(1 << 40, 1 << 40, "a test")


@pytest.fixture
def addresses(machine: None, device: str) -> Iterator[KvRange]:
    found = KvRange(device, SIZE, plenty if device == HOST else free)
    yield found
    found.free()
    found.free()


def fill(addresses: KvRange, byte: int) -> None:
    ctypes.memset(addresses.address, byte, SIZE)


def content(addresses: KvRange) -> set[int]:
    return set(ctypes.string_at(addresses.address, SIZE))


@on_gpu
def test_scratch_is_one_block_behind_every_address(addresses: KvRange):
    """Every byte can be touched, for the memory of one block: what is written in one part is read
    in the next."""
    addresses.scratch()
    assert used() == 2 * STEP
    assert content(addresses) == {0}
    fill(addresses, 1)
    ctypes.memset(addresses.address + 3, 9, 1)
    seen = [ctypes.string_at(addresses.address + at * STEP + 3, 1) for at in range(6)]
    assert seen == [b"\x09", b"\x01"] * 3  # as blocks of two steps repeat


@on_each
def test_standby_holds_nothing_and_wakes_zeroed_at_the_same_address(
    addresses: KvRange, device: str
):
    """Scratch, park, take, park, take: nothing is used when parked, on a GPU exactly the KV cache
    when taken, and no byte of before is left."""
    at = addresses.address
    assert addresses.resident_bytes() == 0
    addresses.scratch()
    for _ in range(2):
        fill(addresses, 7)
        assert addresses.resident_bytes() >= SIZE
        addresses.park()
        addresses.park()
        assert used() == addresses.resident_bytes() == 0
        addresses.take(0)
        assert (used() == addresses.resident_bytes() == 6 * STEP) == (device != HOST)
        assert content(addresses) == {0}
    assert addresses.address == at


@pytest.mark.parametrize("device", [HOST])
def test_pool_is_filled_while_it_is_borrowed_and_not_after(addresses: KvRange):
    """A page of each huge page comes by itself; parked, the addresses are as closed as before,
    and nothing fills them."""
    slab = HostMemory().create(addresses.pool_bytes, "pool")
    for _ in range(3):
        addresses.borrow([slab], is_new=True)
        addresses.park()
    assert addresses.resident_bytes() == 0
    addresses.borrow([slab], is_new=False)
    least_bytes = SIZE // HUGE_BYTES * mmap.PAGESIZE
    until(lambda: addresses.resident_bytes() >= least_bytes, "a page of each huge page")
    addresses.park()
    slab.release()


@on_each
def test_borrowed_memory_is_mapped_as_it_is_and_stays_its_owners(addresses: KvRange, device: str):
    """A new pool is zeroed, and what one wake writes the next one reads; between them nothing is
    behind the addresses, and the owner has its memory. A part of a pool is refused."""
    memory = HostMemory() if device == HOST else CudaMemory(build.GPU_A)
    slabs = [memory.create(size, "slab") for size in (4 * STEP, addresses.pool_bytes - 4 * STEP)]
    owned = used()
    assert owned == (0 if device == HOST else addresses.pool_bytes)
    addresses.scratch()
    addresses.park()
    addresses.borrow(slabs, is_new=True)
    assert content(addresses) == {0}
    fill(addresses, 7)
    addresses.park()
    assert (addresses.resident_bytes(), used()) == (0, owned)
    addresses.borrow(slabs, is_new=False)
    assert content(addresses) == {7}
    addresses.park()
    with pytest.raises(InvariantError, match="a pool of"):
        addresses.borrow(slabs[:1], is_new=False)
    assert addresses.resident_bytes() == 0
    release_all(slabs)


# What a child does with `r`; each but the last has to end in SIGSEGV.
TOUCHES = {
    "reads_before_scratch": "read()",
    "writes_before_scratch": "write()",
    "reads_when_parked": "r.scratch(); write(); r.park(); read()",
    "writes_when_parked_again": "r.scratch(); r.park(); r.take(0); write(); r.park(); write()",
    "none": "r.scratch(); write(); r.park(); r.take(0); write(); read(); r.park()",
}
ON_THE_HOST = {
    "runs_over_the_end": f"r.take(0); write({6 * STEP})",
    "runs_over_the_start": "r.take(0); write(-1)",
}
CHILD = f"""
import ctypes, sys
from engine.backends.process_memory import Room
from engine.backends.kv_range import KvRange
r = KvRange(sys.argv[1], {SIZE}, lambda: Room(1 << 40, 1 << 40, "a test"))
read = lambda at=0: ctypes.string_at(r.address + at, 1)
write = lambda at=0: ctypes.memset(r.address + at, 1, 1)
"""


@on_each
@pytest.mark.parametrize("touch", [*TOUCHES, *ON_THE_HOST])
def test_touching_what_is_not_there_ends_the_process(device: str, touch: str):
    """A standby that uses its KV cache has a bug, which must not become memory: a fault."""
    if touch in ON_THE_HOST and device != HOST:
        pytest.skip("what lies beside a GPU's range is the driver's")
    program = f"{CHILD}\n{(TOUCHES | ON_THE_HOST)[touch]}"
    done = subprocess.run([sys.executable, "-c", program, device], check=False, cwd=ROOT)
    assert done.returncode == (0 if touch == "none" else -signal.SIGSEGV)


def other(size_bytes: int) -> subprocess.Popen[bytes]:
    """Another process that holds so much of the device."""
    program = (
        f"from tests.standin import build; build.call('Init', 0); import pynvml;"
        f"from gms.vmm.cuda import CudaMemory;"
        f"m = CudaMemory({build.GPU_A!r}).create({size_bytes}, 'other');"
        "print(flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


@on_gpu
def test_full_device_is_a_sentence_and_still_parked(
    addresses: KvRange, monkeypatch: pytest.MonkeyPatch
):
    """Another process has what we need: needed, free, how long; what we had got of it is given
    back, and it can be tried again."""
    monkeypatch.setenv("STANDIN_MEMORY", str(8 * STEP))
    with other(3 * STEP) as process:
        with pytest.raises(
            WaitTimeoutError, match=r"needs 12\.0 MiB and 10\.0 MiB are free"
        ) as caught:
            addresses.take(0)
        assert caught.value.code == "engine.kv_memory_busy"
        assert caught.value.details == {"needed_bytes": 6 * STEP, "free_bytes": 5 * STEP}
        assert (used(), addresses.resident_bytes()) == (3 * STEP, 0)
        process.kill()
    addresses.take(0)
    assert content(addresses) == {0}


FAILURES = ("cuMemCreate:2", "cuMemMap:1", "cuMemMap:2", "cuMemSetAccess:1", "cuMemsetD32_v2:1")


@on_gpu
@pytest.mark.parametrize("step", FAILURES)
def test_driver_that_fails_half_way_leaves_it_parked(
    addresses: KvRange, monkeypatch: pytest.MonkeyPatch, step: str
):
    """Each call of the wake fails once: nothing is held, and the next try works."""
    monkeypatch.setenv("STANDIN_FAIL", f"{step}:999")
    with pytest.raises(UnderstudyError, match=r"gms\.driver_failed"):
        addresses.take(0)
    monkeypatch.delenv("STANDIN_FAIL")
    assert used() == addresses.resident_bytes() == 0
    addresses.take(0)
    assert content(addresses) == {0}


# ---------------------------------------------------------------------- a self-test's part


@on_gpu
def test_scratch_memory_keeps_apart_what_a_self_test_uses(device: str):
    """Two layers, whose first blocks would lie at the same place of a block of memory: the block is
    made larger, and what is written in one is not seen in the other."""
    used = [(0, 100), (4 * STEP, 4 * STEP + 100)]
    addresses = KvRange(device, SIZE, free, used=used)
    try:
        assert addresses.can_test
        addresses.scratch()
        for start, _ in used:
            ctypes.memset(addresses.address + start, 1 + start // STEP, 100)
        for start, _ in used:
            assert set(ctypes.string_at(addresses.address + start, 100)) == {1 + start // STEP}
        addresses.park()
        addresses.scratch()
        assert content(addresses) == {0}
    finally:
        addresses.free()


@pytest.mark.parametrize(
    ("used", "fits"),
    [
        ([(0, 10)], 20),
        ([(0, 10), (20, 30)], 30),
        ([(0, 10), (20, 30), (40, 50)], 30),  # modulo 20 to 28 two of them meet
        ([(15, 25), (30, 35)], 20),  # one wraps around
        ([(0, 50)], None),
    ],
)
def test_the_smallest_size_modulo_which_all_parts_are_apart(
    used: list[tuple[int, int]], fits: int | None
):
    assert kv_range.fitting(used, 20, 40, 2) == fits
    if fits is not None:
        places = [byte % fits for start, end in used for byte in range(start, end)]
        assert len(set(places)) == len(places)
