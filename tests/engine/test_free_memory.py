"""The second fence: what counts as free, and waiting for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.backends.process_memory import Room, has_room_for, keep_trying, read_room
from gms.vmm.host import HostMemory
from plumbing.errors import WaitTimeoutError

MIB = 1 << 20


def machine(root: Path, total_mib: int, available_mib: int, cgroup: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    lines = f"MemTotal: {total_mib * 1024} kB\nMemAvailable: {available_mib * 1024} kB\n"
    (root / "proc/meminfo").write_text(lines)
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)


def test_tightest_group_above_us_counts_in_version_2(tmp_path: Path):
    """Goal: a parent's limit binds, and inactive cache is free. Method: two nested groups."""
    root = machine(tmp_path, 1000, 900, "0::/pod/box\n")
    pod = root / "sys/fs/cgroup/pod"
    group(
        pod,
        memory__max=str(500 * MIB),
        memory__current=str(450 * MIB),
        memory__stat=f"anon 1\ninactive_file {30 * MIB}\n",
    )
    group(pod / "box", memory__max="max", memory__current="5", memory__stat="")
    room = read_room(str(root))
    assert (room.free_bytes, room.limit_bytes) == (80 * MIB, 500 * MIB)
    assert "/pod" in room.limited_by


def test_wait_ends_when_another_gives_memory_back():
    """Goal: a wait for a dying process, whose deadline's error names both numbers. Method: an
    attempt that succeeds the third time; one that never does."""
    looks = iter([0, 0, None])
    keep_trying(lambda: next(looks), 100 * MIB, 30.0)
    assert next(looks, "none left") == "none left"
    with pytest.raises(WaitTimeoutError, match=r"needs 100.0 MiB and 5.0 MiB are free") as caught:
        keep_trying(lambda: 5 * MIB, 100 * MIB, 0.0)
    assert caught.value.code == "engine.kv_memory_busy"


@pytest.mark.parametrize(
    ("touched_mib", "free_mib", "has_room"),
    [(0, 68, True), (0, 67, False), (3, 65, True), (3, 64, False), (4, 0, True)],
)
def test_shared_memory_is_filled_if_what_is_missing_of_it_is_free(touched_mib, free_mib, has_room):
    """Slabs of 1 and 3 MiB, of which some pages are there; 64 MiB are reserved."""
    slabs = [HostMemory().create(each * MIB, "slab") for each in (1, 3)]
    for slab in slabs:
        os.pwrite(slab.fileno(), b"x" * min(slab.size_bytes, touched_mib * MIB), 0)
        touched_mib -= min(slab.size_bytes // MIB, touched_mib)
    room = Room(free_mib * MIB, 1 << 40, "a test")
    assert has_room_for([slab.fileno() for slab in slabs], lambda: room) is has_room
    for slab in slabs:
        slab.release()
