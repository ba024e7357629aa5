"""Shared memory in huge pages: what is said of them is what the kernel counts.

Whether a kernel has any left is not ours to say, so nothing here requires a number of them.
"""

from __future__ import annotations

import pytest

from gms.vmm import host as huge_pages
from gms.vmm.host import HostMemory, HostReservation

MIB = 1 << 20
HUGE = huge_pages.HUGE_BYTES
PAGE = HostMemory.granularity_bytes


def mapped(address: int) -> dict[str, int]:
    """What the kernel says of the mapping there, in bytes."""
    found: dict[str, int] = {}
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if "-" in name.partition(" ")[0]:
                start = int(name.partition("-")[0], 16)
            elif start == address and rest.endswith("kB\n"):
                found[name] = int(rest.split()[0]) * 1024
    return found


@pytest.fixture
def reservation() -> HostReservation:
    return HostMemory().reserve(8 * MIB)


def test_filled_memory_keeps_its_content_and_is_in_huge_pages(reservation: HostReservation):
    """Bytes before and after: the same; as many bytes in huge pages as `fill` says, for this
    mapping and for one that another process would make; the rest of an odd size is left out."""
    memory = HostMemory()
    allocation = memory.create(6 * MIB + PAGE, "t")
    reservation.map(0, [allocation], writable=True)
    reservation.write(3 * MIB, b"kept")
    huge_bytes = huge_pages.fill(reservation.address, allocation.size_bytes)
    assert huge_bytes in range(0, 6 * MIB + 1, HUGE)
    assert mapped(reservation.address)["ShmemPmdMapped"] == huge_bytes
    assert reservation.read(3 * MIB, 5) == b"kept\0"
    again = memory.reserve(8 * MIB)
    again.map(0, [allocation], writable=False)
    assert again.read(3 * MIB, 4) == b"kept"
    for at in range(0, 6 * MIB, HUGE):  # any of them may have been refused
        again.read(at, 1)
    assert mapped(again.address)["ShmemPmdMapped"] == huge_bytes
    for each in (reservation, again):
        each.free()
    allocation.release()


def test_filling_beside_a_user_ends_when_it_is_stopped(reservation: HostReservation):
    """Stopped at once: it has ended before the memory goes, whatever it had done by then, and what
    is written meanwhile is there."""
    allocation = HostMemory().create(8 * MIB, "t")
    reservation.map(0, [allocation], writable=True)
    done: list[int] = []
    filling = huge_pages.Filling(reservation.address, 8 * MIB, done.append, after_s=0.0)
    reservation.write(0, b"x" * 8 * MIB)
    filling.stop()
    assert reservation.read(0, 8 * MIB) == b"x" * 8 * MIB
    assert [huge_bytes in range(0, 8 * MIB + 1, HUGE) for huge_bytes in done] == [True]
    reservation.free()
    allocation.release()
