"""What the driver does with memory and mappings: parts of the device check."""

from __future__ import annotations

import os
import time

from hack.device.part import GIB, MIB, NOISE_BYTES, Part, Skipped, mib
from hack.device.remote import PeerError

SIZE = 64 * MIB
OURS, THEIRS = 7, 9  # bytes that the owner wrote, and that an importer tries to write
CLOSED = 7  # times the settling time: until a device is torn down after its last close


def device(part: Part) -> None:
    """Which device and driver is this, and how are they set?"""
    part.note(**part.nvml.facts(), cuda=part.peer()("open", context=False))


def read_only(part: Part) -> None:
    """Is read-only honoured on an import, also set on a live mapping; what does a write do?"""
    owner, cases = part.peer(), {}
    owner("create", size_bytes=SIZE)
    owner("map", writable=True)
    for rights in ("mapped_read_only", "made_read_only_in_place", "made_writable_again"):
        for how in ("copy", "memset"):
            owner("write", byte=OURS)
            importer = part.peer(context=True)  # its write may kill it
            importer("adopt", owner.lend(), size_bytes=SIZE)
            importer("map", writable=rights == "made_read_only_in_place")
            if rights != "mapped_read_only":
                importer("set_access", writable=rights == "made_writable_again")
            cases[f"{rights}, {how}"] = {
                "read_before": importer("read"),
                "write": importer.attempt("write", byte=THEIRS, how=how),
                "read_after": importer.attempt("read"),
                "owner_reads": owner("read"),
                "owner_writes": owner.attempt("write", byte=OURS),
            }
            part.note(**cases)
    forbidden = [found for name, found in cases.items() if not name.startswith("made_writable")]
    part.claim(
        write_through_read_only_is_refused=all(f["write"] != "ok" for f in forbidden),
        refused_write_changes_nothing=all(f["owner_reads"] == [OURS] for f in forbidden),
        read_only_in_place_can_be_read=all(f["read_before"] == [OURS] for f in forbidden),
        fault_spares_other_processes=all(f["owner_writes"] == "ok" for f in forbidden),
    )


def descriptors(part: Part) -> None:
    """Does a descriptor alone keep memory, even of a closed device; can an import be exported?"""
    found: dict[str, str] = {}
    # The first of these before anything opens NVML, which opens the device.
    for case in ("fd_with_device_closed", "fd_with_device_open", "fd_of_survivor", "import_again"):
        if case == "fd_with_device_closed":
            part.note(other_processes_with_the_device_open=_processes_with_device())
        elif case == "fd_with_device_open":
            part.note(persistence_mode=part.nvml.facts()["PersistenceMode"])
        owner = part.peer()
        owner("create", size_bytes=SIZE)
        owner("map", writable=True)
        owner("write", byte=OURS)
        fds = owner.lend()  # ours now, and this process never opens CUDA
        try:
            if case in ("fd_of_survivor", "import_again"):
                survivor = part.peer()
                survivor("adopt", fds, size_bytes=SIZE)
                owner.kill()
                fds = survivor.lend("export" if case == "import_again" else "lend")
            owner.kill()
            time.sleep(CLOSED * part.still_s)
            newcomer = part.peer()
            newcomer("adopt", fds, size_bytes=SIZE)
            newcomer("map", writable=False)
            found[case] = f"bytes {newcomer('read')}"
        except PeerError as error:
            found[case] = f"lost: {error}"
        part.peers.close()
        part.note(**found)
    kept = {case: how == f"bytes {[OURS]}" for case, how in found.items()}
    part.claim(
        descriptor_alone_keeps_memory=kept["fd_with_device_open"],
        it_does_while_nobody_has_the_device_open=kept["fd_with_device_closed"],
        survivor_can_hand_back_what_it_was_given=kept["fd_of_survivor"],
    )


def refcount(part: Part) -> None:
    """When (the table of Decision 7) is memory that two processes hold really free?"""
    size = min(2 * GIB, part.bytes_max)
    if not part.fits(size):
        raise Skipped(f"there are not {size // MIB} MiB to spare")
    base, used = part.nvml.settled(), {}
    for end in ("release", "SIGKILL"):
        server, client = part.peer(), part.peer()
        server("create", size_bytes=size)
        client("adopt", server.lend(), size_bytes=size)
        client("map", writable=False)
        used[f"{end}: shared"] = part.nvml.settled() - base
        server("release") if end == "release" else server.kill()
        used[f"{end}: the server let go"] = part.nvml.settled() - base
        if end == "release":
            client("release")
            used[f"{end}: a mapping is left"] = part.nvml.settled() - base
        client("unmap") if end == "release" else client.kill()
        used[f"{end}: nobody has it"] = part.nvml.settled() - base
    part.note(**{step: mib(size_bytes) for step, size_bytes in used.items()})
    part.claim(
        memory_lives_while_anybody_holds_it=all(
            u >= size * 0.9 for step, u in used.items() if "nobody" not in step
        ),
        last_reference_frees_it=all(u < NOISE_BYTES for s, u in used.items() if "nobody" in s),
    )


def _processes_with_device() -> int:
    """How many visible processes have a file of the device open."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            files = [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
        except OSError:  # it ended, or is not ours
            continue
        count += any(file.startswith("/dev/nvidia") for file in files)
    return count
