"""The stand-in for the driver refuses what the real driver refuses: each refusal is a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers import open_fds
from tests.standin import build
from tests.standin.driver import (
    INVALID,
    OK,
    POSIX_FD,
    READ,
    STEP,
    WRITE,
    access,
    api,
    call,
    code,
    create,
    export,
    prop,
    reserve,
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of this test's own; what it opens, it closes."""
    build.use(monkeypatch)
    call("Init", 0)
    call("CtxSetCurrent", 0)  # as on a fresh thread, whatever ran before on this one
    before = open_fds()
    yield
    assert open_fds() == before


class Mapped:
    """`count` blocks of one step, side by side from the start of a range of `room` steps."""

    def __init__(self, count: int = 1, room: int = 4) -> None:
        self.size, self.room = count * STEP, room * STEP
        self.handles = [create() for _ in range(count)]
        self.at = reserve(self.room)
        for index, handle in enumerate(self.handles):
            call("MemMap", self.at + index * STEP, STEP, 0, handle, 0)

    def __enter__(self) -> Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        for index, handle in enumerate(self.handles):
            call("MemUnmap", self.at + index * STEP, STEP)
            call("MemRelease", handle)
        call("MemAddressFree", self.at, self.room)


# -- sizes and handles


def test_sizes_that_are_no_multiple_of_the_granularity_are_refused():
    """Memory and addresses alike, and nothing at all."""
    for size in (0, 1, STEP - 1, STEP + 4096):
        assert code("MemCreate", size, prop(), 0) == INVALID
        assert code("MemAddressReserve", size, 0, 0, 0) == INVALID


def test_handle_that_was_released_is_no_handle():
    """Release twice, and use after release: refused."""
    handle, at = create(), reserve()
    assert code("MemRelease", handle) == OK
    assert code("MemRelease", handle) == INVALID
    assert code("MemExportToShareableHandle", handle, POSIX_FD, 0) == INVALID
    assert code("MemMap", at, STEP, 0, handle, 0) == INVALID
    assert code("MemRelease", api.CUmemGenericAllocationHandle(7)) == INVALID
    call("MemAddressFree", at, STEP)


def test_memory_of_an_unknown_device_or_kind_is_refused():
    """A device that is not visible; another kind of handle than a descriptor."""
    assert code("MemCreate", STEP, prop(2), 0) == "CUDA_ERROR_INVALID_DEVICE"
    wrong = prop()
    wrong.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    assert code("MemCreate", STEP, wrong, 0) == INVALID
    assert code("MemCreate", STEP, prop(), 1) == INVALID


# -- descriptors


def test_only_memory_of_this_machine_is_imported(monkeypatch: pytest.MonkeyPatch):
    """A pipe, a file, a foreign memfd, no descriptor at all, another machine's memory."""
    reading, writing = os.pipe()
    memfd = os.memfd_create("standin")
    with tempfile.TemporaryFile() as file:
        for fd in (reading, writing, memfd, file.fileno(), 9999):
            assert code("MemImportFromShareableHandle", fd, POSIX_FD) == INVALID
    handle = create()
    mine = export(handle)
    monkeypatch.setenv("STANDIN_MACHINE", "another")
    assert code("MemImportFromShareableHandle", mine, POSIX_FD) == INVALID
    call("MemRelease", handle)
    for fd in (reading, writing, memfd, mine):
        os.close(fd)


def test_descriptor_imports_many_times_and_outlives_its_handle():
    """Export, release the handle, import twice: the same bytes, two handles of their own."""
    handle = create()
    fd = export(handle)
    call("MemRelease", handle)
    first, second = (call("MemImportFromShareableHandle", fd, POSIX_FD) for _ in range(2))
    os.close(fd)
    assert int(first) != int(second)
    at = reserve(2 * STEP)
    call("MemMap", at, STEP, 0, first, 0)
    call("MemMap", at + STEP, STEP, 0, second, 0)
    call("MemSetAccess", at, 2 * STEP, access(WRITE), 1)
    call("CtxSetCurrent", call("DevicePrimaryCtxRetain", 0))
    call("MemcpyHtoD", at, b"same", 4)
    found = bytearray(4)
    call("MemcpyDtoH", found, at + STEP, 4)
    assert found == b"same"
    call("MemUnmap", at, 2 * STEP)
    for imported in (first, second):
        call("MemRelease", imported)
    call("MemAddressFree", at, 2 * STEP)


# -- mapping


def test_partial_and_oversized_maps_are_refused():
    """A block is mapped whole, from its start, at a multiple of the granularity."""
    handle, at = create(2 * STEP), reserve(4 * STEP)
    for offset, size in ((0, STEP), (STEP, STEP), (0, 3 * STEP)):
        assert code("MemMap", at, size, offset, handle, 0) == INVALID
    assert code("MemMap", at + 4096, 2 * STEP, 0, handle, 0) == INVALID
    call("MemAddressFree", at, 4 * STEP)
    call("MemRelease", handle)


def test_maps_outside_a_reservation_are_refused():
    """Beyond its end, across its end, and where nothing was reserved."""
    handle, at = create(2 * STEP), reserve(2 * STEP)
    for place in (at + STEP, at + 2 * STEP, at - STEP, 0):
        assert code("MemMap", place, 2 * STEP, 0, handle, 0) == INVALID
    call("MemAddressFree", at, 2 * STEP)
    assert code("MemMap", at, 2 * STEP, 0, handle, 0) == INVALID
    call("MemRelease", handle)


def test_mapping_over_a_mapping_is_refused():
    """The same addresses twice, wholly or in part."""
    with Mapped(2) as mapped:
        big = create(2 * STEP)
        assert code("MemMap", mapped.at, STEP, 0, mapped.handles[1], 0) == INVALID
        assert code("MemMap", mapped.at + STEP, 2 * STEP, 0, big, 0) == INVALID
        assert code("MemMap", mapped.at + 2 * STEP, 2 * STEP, 0, big, 0) == OK
        call("MemUnmap", mapped.at + 2 * STEP, 2 * STEP)
        call("MemRelease", big)


def test_addresses_are_not_freed_under_a_mapping_nor_in_part_nor_twice():
    """Free while mapped, free half, free again: refused."""
    with Mapped(1, room=4) as mapped:
        assert code("MemAddressFree", mapped.at, mapped.room) == INVALID
    at = reserve(2 * STEP)
    assert code("MemAddressFree", at, STEP) == INVALID
    assert code("MemAddressFree", at, 2 * STEP) == OK
    assert code("MemAddressFree", at, 2 * STEP) == INVALID


def test_unmapping_is_whole():
    """Half a block, more than was mapped, what is not mapped: refused; several at once is fine."""
    handle, at = create(2 * STEP), reserve(4 * STEP)
    call("MemMap", at, 2 * STEP, 0, handle, 0)
    for start, size in ((at, STEP), (at + STEP, STEP), (at, 4 * STEP), (at + 2 * STEP, 2 * STEP)):
        assert code("MemUnmap", start, size) == INVALID
    again = create(2 * STEP)
    call("MemMap", at + 2 * STEP, 2 * STEP, 0, again, 0)
    assert code("MemUnmap", at, 4 * STEP) == OK
    assert code("MemUnmap", at, 2 * STEP) == INVALID
    for each in (handle, again):
        call("MemRelease", each)
    call("MemAddressFree", at, 4 * STEP)


# -- access


def test_access_is_set_on_whole_mappings_only():
    """Not on a part, not beyond, not where nothing is mapped, not for another device."""
    with Mapped(2) as mapped:
        half = STEP // 2
        for start, size in ((mapped.at, half), (mapped.at, 3 * STEP), (mapped.at + 2 * STEP, STEP)):
            assert code("MemSetAccess", start, size, access(READ), 1) == INVALID
        assert code("MemSetAccess", mapped.at, STEP, access(READ, 1), 1).endswith("INVALID_DEVICE")
        assert code("MemSetAccess", mapped.at, 2 * STEP, access(READ), 1) == OK
        assert code("MemSetAccess", mapped.at + STEP, STEP, access(WRITE), 1) == OK


def test_copies_need_a_context_and_reserved_addresses():
    """No context is current: refused; with one, host memory is no device memory."""
    with Mapped() as mapped:
        call("MemSetAccess", mapped.at, STEP, access(WRITE), 1)
        assert code("MemcpyHtoD", mapped.at, b"1234", 4) == "CUDA_ERROR_INVALID_CONTEXT"
        call("CtxSetCurrent", call("DevicePrimaryCtxRetain", 0))
        assert code("MemcpyHtoD", mapped.at, b"1234", 4) == OK
        assert code("MemcpyHtoD", mapped.at + mapped.room, b"1234", 4) == INVALID


# What a child does with `at`, one mapped step; each but the last has to end in SIGSEGV.
FAULTS = {
    "write_read_only": 'call("MemSetAccess", at, STEP, access(READ), 1); write()',
    "write_after_read_only": """for rights in (WRITE, READ):
        call("MemSetAccess", at, STEP, access(rights), 1); write()""",
    "read_without_access": "read()",
    "read_after_unmap": """call("MemSetAccess", at, STEP, access(READ), 1); read()
call("MemUnmap", at, STEP); read()""",
    "none": 'call("MemSetAccess", at, STEP, access(WRITE), 1); write(); read()',
}
CHILD = """
from tests.standin.driver import *
call("Init", 0)
call("CtxSetCurrent", call("DevicePrimaryCtxRetain", 0))
at, handle = reserve(), create()
call("MemMap", at, STEP, 0, handle, 0)
read = lambda: call("MemcpyDtoH", bytearray(4), at, 4)
write = lambda: call("MemcpyHtoD", at, b"1234", 4)
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_illegal_access_ends_the_process(fault: str):
    """Write what is read-only, read what has no access set or is not mapped any more: SIGSEGV."""
    program = f"{CHILD}\n{FAULTS[fault]}"
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == (0 if fault == "none" else -signal.SIGSEGV)


# -- failing on purpose


# -- how much there is


def used() -> int:
    import pynvml

    pynvml.nvmlInit()
    found = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(build.GPU_B)).used
    pynvml.nvmlShutdown()
    return int(found)


def test_memory_is_free_when_handles_descriptors_and_mappings_are_gone():
    """Let go one after the other: NVML sees it used until the last, here an exported descriptor."""
    handle, at = create(), reserve()
    fd = export(handle)
    imported = call("MemImportFromShareableHandle", fd, POSIX_FD)
    call("MemMap", at, STEP, 0, imported, 0)
    retained = call("MemRetainAllocationHandle", at)
    undo: list[tuple[Any, ...]] = [
        ("MemRelease", handle),
        ("MemRelease", imported),
        ("MemRelease", retained),
        ("MemUnmap", at, STEP),
    ]
    for words in undo:
        assert used() == STEP
        call(*words)
    assert used() == STEP
    os.close(fd)
    assert used() == 0
    call("MemAddressFree", at, STEP)


def test_out_of_memory_counts_what_every_process_holds(monkeypatch: pytest.MonkeyPatch):
    """Another process's block counts, and is free the moment that process is killed."""
    monkeypatch.setenv("STANDIN_MEMORY", str(3 * STEP))
    program = "from tests.standin.driver import *; call('Init', 0); h = create(2 * STEP)"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{program}; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        assert code("MemCreate", 2 * STEP, prop(), 0) == "CUDA_ERROR_OUT_OF_MEMORY"
        fits = create(STEP)
        other.kill()
    call("MemRelease", fits)
    call("MemRelease", create(3 * STEP))
    assert call("DeviceTotalMem", 0) == 3 * STEP


# -- which devices there are

MIG = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
MIGS = [f"MIG-bbbbbbb{n}-0000-0000-0000-000000000000" for n in range(2)]
PLAIN = [f"GPU-cccccc{n}{n}-0000-0000-0000-000000000000" for n in range(3)]
LIST = """
from tests.standin.driver import *
import json
if (code("Init", 0)) == OK:
    ids = [device_id(n)[:8] for n in range(call("DeviceGetCount"))]
    print(json.dumps(ids))
else:
    print("[]")
"""


def seen(devices: list[str], visible: str | None, **settings: object) -> list[str]:
    """The first eight digits of each device's UUID, in the order of a child's CUDA."""
    env = {**os.environ, **build.environment(DEVICES=",".join(devices), **settings)}
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    out = subprocess.run([sys.executable, "-c", LIST], env=env, check=True, stdout=subprocess.PIPE)
    found: list[str] = json.loads(out.stdout)
    return found


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["cccccc22", "cccccc11", "cccccc00"]),  # not NVML's order
        ("0,2", ["cccccc22", "cccccc00"]),
        ("1,7,0", ["cccccc11"]),  # nothing after a wrong one
        (PLAIN[0], ["cccccc00"]),
        ("GPU-cccccc1,GPU-cccccc0", ["cccccc11", "cccccc00"]),
        ("GPU-c", []),  # several begin so
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices_are_as_cuda_reads_them(visible: str | None, expected: list[str]):
    """Indices count in CUDA's order; UUIDs may be cut short while they are unique."""
    assert seen(PLAIN, visible) == expected


def test_process_sees_one_mig_instance_at_most():
    """A GPU in MIG mode shows its first instance; an instance can be chosen by its UUID."""
    machine = [f"{MIG}={'+'.join(MIGS)}"]
    assert seen(machine, None) == ["bbbbbbb0"]
    assert seen(machine, MIGS[1]) == ["bbbbbbb1"]
    assert seen(machine, ",".join(MIGS)) == ["bbbbbbb0"]
