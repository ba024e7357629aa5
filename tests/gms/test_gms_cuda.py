"""CUDA memory by itself, on the stand-in for the driver: what it refuses, and how it says so."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from gms.client import memory_for
from gms.vmm.cuda import CudaAllocation, CudaMemory
from gms.vmm.cuda_driver import FIXES
from plumbing.errors import UnderstudyError, UsageError
from tests.gms.kinds import stand_in_only
from tests.helpers import open_fds, run_command
from tests.standin import build

STEP = 2 << 20
GPU = build.GPU_A


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh machine; what a test opens, it closes, so that its memory is free again."""
    build.use(monkeypatch)
    build.call("Init", 0)
    build.call("CtxSetCurrent", 0)  # as on a fresh thread, whatever ran before on this one
    before = open_fds()
    yield
    if build.REAL_GPU is None:  # which opens files of its own when it sees fit
        assert open_fds() == before


@pytest.fixture
def memory() -> CudaMemory:
    return CudaMemory(GPU)


@stand_in_only
def test_device_is_found_by_its_uuid_whatever_its_number():
    """Both devices, by name: each serves its own memory; the other's is refused."""
    first, second = CudaMemory(build.GPU_A), CudaMemory(build.GPU_B)
    assert {first.driver.ordinal, second.driver.ordinal} == {0, 1}
    one, other = first.create(STEP, "t"), second.create(STEP, "t")
    for mine, device in ((one, build.GPU_A), (other, build.GPU_B)):
        assert device in os.readlink(f"/proc/self/fd/{mine.fileno()}")
        mine.release()


@stand_in_only
def test_device_that_is_not_visible_is_one_sentence():
    """Another UUID, or a MIG instance's: what CUDA shows instead, and what to look at."""
    for name in ("GPU-dddddddd-0000-0000-0000-000000000000", "MIG-dddd"):
        with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES") as caught:
            memory_for(name)
        assert caught.value.code == "gms.device_not_visible"
        assert len(caught.value.details["visible"]) == 2


@stand_in_only
def test_devices_without_shareable_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    """No virtual memory management: said at start, not at the first slab."""
    monkeypatch.setenv("STANDIN_NO_VMM", "1")
    with pytest.raises(UsageError, match=r"gms\.device_unsuitable"):
        CudaMemory(GPU)


def test_one_block_may_be_mapped_many_times_and_be_replaced(memory: CudaMemory):
    """What is written through one mapping is read through the next, under one set of rights; then
    other memory at the same addresses. So graphs are captured for memory to come."""
    block = memory.create(STEP, "scratch")
    reservation = memory.reserve(4 * STEP)
    address = reservation.address
    with pytest.raises(UnderstudyError, match=r"gms\.not_host_memory"):
        reservation.view(0, 1)
    reservation.map(0, [block] * 4, writable=True)
    reservation.write(3 * STEP + 5, b"seen")
    assert [reservation.read(at * STEP + 5, 4) for at in range(4)] == [b"seen"] * 4
    reservation.unmap()
    block.release()
    parts = [memory.create(2 * STEP, "kv"), memory.create(STEP, "kv")]
    reservation.map(0, parts, writable=True)
    reservation.write(2 * STEP - 2, b"used")
    assert (reservation.address, reservation.read(2 * STEP - 2, 4)) == (address, b"used")
    reservation.free()
    for part in parts:
        part.release()


@stand_in_only
@pytest.mark.parametrize("failing", ["cuMemMap:2:999", "cuMemSetAccess:1:999"])
def test_map_is_all_or_nothing(memory: CudaMemory, monkeypatch: pytest.MonkeyPatch, failing: str):
    """The second map, or setting access, fails: nothing is mapped, and it can be tried again."""
    slabs = [memory.create(STEP, name) for name in ("a", "b", "c")]
    reservation = memory.reserve(3 * STEP)
    reservation.map(0, slabs[:1], writable=True)
    monkeypatch.setenv("STANDIN_FAIL", failing)
    with pytest.raises(UnderstudyError, match="CUDA_ERROR_UNKNOWN"):
        reservation.map(STEP, slabs[1:], writable=True)
    assert reservation.mapped_bytes == STEP
    reservation.map(STEP, slabs[1:], writable=True)
    reservation.write(2 * STEP, b"x")
    reservation.free()
    for slab in slabs:
        slab.release()


@pytest.mark.parametrize("maps_less", [None, "0", "1"])  # as the driver is, or as told
def test_slab_of_another_size_is_refused_whether_or_not_less_can_be_mapped(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch, maps_less: str | None
):
    """It is larger or smaller than was said, by as little as a granule: refused when it is checked,
    by a driver that maps less than an allocation and by one that does not."""
    if maps_less is not None:
        if build.REAL_GPU is not None:
            pytest.skip("only the stand-in can be told")
        monkeypatch.setenv("STANDIN_PARTIAL_MAPS", maps_less)
    slab = memory.create(2 * STEP, "t")
    slab.check("t")
    for wrong in (STEP, 3 * STEP):
        adopted = memory.adopt(slab.export(writable=False), wrong)
        with pytest.raises(UnderstudyError, match=r"gms\.bad_slab"):
            adopted.check("t")
        adopted.release()
    too_large = memory.adopt(slab.export(writable=False), 3 * STEP)
    reservation = memory.reserve(3 * STEP)
    with pytest.raises(UnderstudyError, match=r"gms\.bad_slab"):
        reservation.map(0, [too_large], writable=False)
    reservation.free()
    too_large.release()
    good = memory.adopt(slab.export(writable=False), 2 * STEP)
    good.check("t")
    good.release()
    slab.release()


@stand_in_only
@pytest.mark.parametrize(
    ("failing", "code"),
    [
        ("cuMemCreate:1:2", "gms.device_full"),  # which the service waits for
        ("cuMemCreate:1:214", "gms.driver_failed"),
        ("cuMemCreate:1:999", "gms.driver_failed"),
        ("cuMemExportToShareableHandle:1:304", "gms.driver_failed"),  # the handle is given back
        ("cuMemMap:2:999", "gms.driver_failed"),  # no proof of a size, and no bad slab
    ],
)
def test_errors_carry_the_drivers_name_and_a_fix(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch, failing: str, code: str
):
    """Which call failed, the driver's own name for it, what to do about the usual; the next try
    succeeds, and nothing is left of the first."""
    monkeypatch.setenv("STANDIN_FAIL", failing)
    slabs: list[CudaAllocation] = []

    def make() -> None:
        slabs.append(memory.create(STEP, "t"))
        slabs[-1].check("t")

    with pytest.raises(UnderstudyError) as caught:
        make()
    assert caught.value.code == code
    name = caught.value.details["driver_error"]
    fix = f": {FIXES[name]}" if name in FIXES else ""
    assert caught.value.message == f"{failing.partition(':')[0]} failed with {name}{fix}"
    make()
    for slab in slabs:
        slab.release()


@stand_in_only
def test_no_context_is_made_unless_the_driver_wants_one(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
):
    """Create, export, adopt, check, release: none. Where the driver refuses: one, on any thread."""
    slab = memory.create(STEP, "t")
    memory.adopt(slab.export(writable=False), STEP).release()
    slab.check("t")
    assert memory.facts() == {
        "cuda_version": "13.0",
        "granularity_bytes": STEP,
        "has_context": False,
    }
    monkeypatch.setenv("STANDIN_NEEDS_CONTEXT", "1")
    monkeypatch.setenv("STANDIN_FAIL", "cuDevicePrimaryCtxRetain:2:999")  # one is enough
    made: list[CudaAllocation] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: made.append(memory.create(STEP, "t")))
        thread.start()
        thread.join()
    assert memory.facts()["has_context"]
    for each in (slab, *made):
        each.release()


@stand_in_only
def test_failed_initialisation_names_the_fix_and_whether_to_retry(directory: str):
    """cuInit fails in a fresh server: the error's name and its fix. No GPU is a mistake (exit
    code 2); a driver that is not ready yet is retried (1)."""
    expected = {
        802: (1, "fabric manager", "gms.driver_failed"),
        100: (2, "container has a GPU", "no_cuda"),
    }
    flags = ["--dir", directory, "--memory", "cuda", "--device", GPU]
    for error, (returncode, fix, code) in expected.items():
        done = run_command(
            [sys.executable, "-m", "gms.cli", "serve-device", *flags],
            env={**os.environ, "STANDIN_FAIL": f"cuInit:1:{error}"},
        )
        assert done.returncode == returncode
        assert fix in done.stderr
        assert code in done.stderr
