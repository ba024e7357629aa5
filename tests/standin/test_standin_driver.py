"""The stand-in for the driver refuses what the real driver refuses: each refusal is a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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


def refused(*calls: tuple[Any, ...]) -> None:
    """Each of them, a call's name and its arguments, is the caller's mistake."""
    for name, *args in calls:
        assert code(name, *args) == INVALID, (name, args)


def test_sizes_handles_and_descriptors_are_checked(monkeypatch: pytest.MonkeyPatch):
    """No multiple of the granularity, a released handle, another device or kind of handle, what is
    no memory of this machine; an import outlives the handle, twice, with the same bytes."""
    for size in (0, 1, STEP - 1, STEP + 4096):
        refused(("MemCreate", size, prop(), 0), ("MemAddressReserve", size, 0, 0, 0))
    wrong = prop()
    wrong.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    refused(("MemCreate", STEP, wrong, 0), ("MemCreate", STEP, prop(), 1))
    assert code("MemCreate", STEP, prop(2), 0) == "CUDA_ERROR_INVALID_DEVICE"
    handle, at, memfd = create(), reserve(2 * STEP), os.memfd_create("standin")
    mine = export(handle)
    call("MemRelease", handle)
    refused(
        ("MemRelease", handle),
        ("MemExportToShareableHandle", handle, POSIX_FD, 0),
        ("MemMap", at, STEP, 0, handle, 0),
        *(("MemImportFromShareableHandle", fd, POSIX_FD) for fd in (memfd, 9999)),
    )
    both = [call("MemImportFromShareableHandle", mine, POSIX_FD) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setenv("STANDIN_MACHINE", "another")
        refused(("MemImportFromShareableHandle", mine, POSIX_FD))
    for fd in (mine, memfd):
        os.close(fd)
    for index, imported in enumerate(both):
        call("MemMap", at + index * STEP, STEP, 0, imported, 0)
    call("MemSetAccess", at, 2 * STEP, access(WRITE), 1)
    assert code("MemcpyHtoD", at, b"same", 4) == "CUDA_ERROR_INVALID_CONTEXT"
    call("CtxSetCurrent", call("DevicePrimaryCtxRetain", 0))
    call("MemcpyHtoD", at, b"same", 4)
    found = bytearray(4)
    call("MemcpyDtoH", found, at + STEP, 4)
    assert found == b"same"
    call("MemUnmap", at, 2 * STEP)
    for imported in both:
        call("MemRelease", imported)
    call("MemAddressFree", at, 2 * STEP)


def test_a_block_is_mapped_and_unmapped_whole_where_there_is_room():
    """In part, too long, askew, outside the reservation, over another; freed under a mapping, in
    part or twice; access in part, beyond, or for another device."""
    with Mapped(2) as mapped:
        at, end, big = mapped.at, mapped.at + 2 * STEP, create(2 * STEP)
        refused(
            *(("MemMap", end, size, first, big, 0) for first, size in ((0, STEP), (STEP, STEP))),
            *(("MemMap", place, 2 * STEP, 0, big, 0) for place in (at, at + STEP, end + 4096)),
            *(("MemMap", place, 2 * STEP, 0, big, 0) for place in (at + mapped.room, at - STEP, 0)),
            ("MemMap", end, 3 * STEP, 0, big, 0),
            ("MemAddressFree", at, mapped.room),
            *(("MemUnmap", first, size) for first, size in ((at, STEP // 2), (end, STEP))),
            *(("MemSetAccess", at, size, access(READ), 1) for size in (STEP // 2, 3 * STEP)),
            ("MemSetAccess", end, STEP, access(READ), 1),
        )
        assert code("MemSetAccess", at, STEP, access(READ, 1), 1).endswith("INVALID_DEVICE")
        assert code("MemSetAccess", at, 2 * STEP, access(READ), 1) == OK
        call("MemMap", end, 2 * STEP, 0, big, 0)
        refused(("MemUnmap", end, STEP), ("MemUnmap", at, 5 * STEP))
        call("MemUnmap", end, 2 * STEP)
        call("MemRelease", big)
    free = reserve(2 * STEP)
    refused(("MemAddressFree", free, STEP))
    call("MemAddressFree", free, 2 * STEP)
    refused(("MemAddressFree", free, 2 * STEP))


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


MACHINE_OF_MIGS = [f"{MIG}={'+'.join(MIGS)}"]


@pytest.mark.parametrize(
    ("machine", "visible", "expected"),
    [
        (PLAIN, None, ["cccccc22", "cccccc11", "cccccc00"]),  # not NVML's order
        (PLAIN, "1,7,0", ["cccccc11"]),  # nothing after a wrong one
        (PLAIN, "GPU-cccccc1,GPU-cccccc0", ["cccccc11", "cccccc00"]),
        (PLAIN, "GPU-c", []),  # several begin so
        (PLAIN, "", []),
        (MACHINE_OF_MIGS, None, ["bbbbbbb0"]),
        (MACHINE_OF_MIGS, ",".join(MIGS[::-1]), ["bbbbbbb1"]),
    ],
)
def test_visible_devices_are_as_cuda_reads_them(
    machine: list[str], visible: str | None, expected: list[str]
):
    """Indices count in CUDA's order; UUIDs may be cut short while they are unique; a process sees
    one MIG instance at most."""
    assert seen(machine, visible) == expected
