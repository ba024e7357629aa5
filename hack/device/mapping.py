"""Mappings of device memory: rights, sizes, costs: parts of the device check."""

from __future__ import annotations

from typing import Any

from hack.device.part import GIB, Part, Skipped
from hack.device.remote import NotOffered, Peer

MIB = 1 << 20
OURS, THEIRS = 7, 9  # what the owner wrote, what an importer tries to

# Bytes of one handle, and how many: from the smallest that there is to above our own limit.
HANDLES = ((2, 250), (64, 64), (256, 32), (1024, 12), (2048, 6), (4096, 3))


def read_only(part: Part) -> None:
    """Is read-only honoured on an import, also set on a live mapping; what does a write do?"""
    size = 64 * MIB
    owner = part.peer()
    owner("create", size_bytes=size)
    owner("map", writable=True)
    cases: dict[str, Any] = {}
    for case in ("mapped_read_only", "made_read_only_in_place", "made_writable_again"):
        for how in ("copy", "memset", "kernel"):
            owner("write", byte=OURS)
            cases[f"{case}, {how}"] = _write_through_import(part, owner, size, case, how)
            part.note(cases=cases)
            if part.left_s() < 10:
                raise Skipped("out of time")

    def holds(case: str, key: str, wanted: Any) -> bool:
        asked = [c for name, c in cases.items() if name.startswith(case)]
        return all(c[key] == wanted for c in asked if not c["write"].startswith("skipped"))

    refused = all(
        not found["write"].startswith("ok")
        for name, found in cases.items()
        if not name.startswith("made_writable")
    )
    owner("set_access", writable=False)
    part.note(creator_made_read_only_in_place=owner.attempt("write", byte=THEIRS))
    part.claim(
        write_through_read_only_faults=refused,
        write_through_read_only_changes_nothing=holds("mapped_read_only", "owner_reads", [OURS])
        and holds("made_read_only_in_place", "owner_reads", [OURS]),
        read_only_in_place_keeps_addresses_readable=holds(
            "made_read_only_in_place", "read_before", [OURS]
        ),
        fault_of_one_process_spares_the_others=holds("", "owner_writes", "ok"),
    )


def _write_through_import(
    part: Part, owner: Peer, size: int, case: str, how: str
) -> dict[str, Any]:
    """A fresh process imports, has its rights set, and tries to write: it may not survive it."""
    owner("lend")
    importer = part.peer(context=True)
    importer("adopt", owner.take_fds(), size_bytes=size)
    importer("map", writable=case == "made_read_only_in_place")
    if case != "mapped_read_only":
        importer("set_access", writable=case == "made_writable_again")
    xids = part.nvml.watch_xids()
    found = {
        "read_before": importer("read"),
        "write": importer.attempt("write", byte=THEIRS, how=how),
    }
    found |= {
        "xids": xids(),
        "read_after": importer.attempt("read"),
        "owner_reads": owner("read"),
        "owner_writes": owner.attempt("write", byte=OURS),
    }
    importer.close()
    return found


def whole_maps(part: Part) -> None:
    """Does the driver refuse part of a block, more than it, an offset, and what is no memory?"""
    size, owner = 64 * MIB, part.peer()
    owner("create", size_bytes=size)
    found = {
        "half": owner.attempt("map_part", size_bytes=size // 2, offset_bytes=0),
        "second_half": owner.attempt("map_part", size_bytes=size // 2, offset_bytes=size // 2),
        "twice_its_size": owner.attempt("map_part", size_bytes=2 * size, offset_bytes=0),
    }
    for wrong in (size // 2, 2 * size):  # as the service would be lied to
        liar = part.peer()
        owner("lend")
        liar("adopt", owner.take_fds(), size_bytes=wrong)
        found[f"said_to_be_{wrong // MIB}_mib"] = liar.attempt("check")
        liar.close()
    for what in ("memfd", "pipe", "null_device"):
        found[what] = part.peer().attempt("adopt_foreign", what=what, size_bytes=size)
    part.note(**found)
    both = part.peer()
    both("create", size_bytes=2 * MIB, count=2)
    both("map", writable=True)
    part.note(unmapping_two_at_once=both.attempt("unmap_at_once"))
    part.claim(
        wrong_sizes_are_refused=all(
            found[case] != "ok" for case in ("half", "second_half", "twice_its_size")
        ),
        lies_are_bad_slabs=all(
            "gms.bad_slab" in found[case]
            for case in found
            if case not in ("half", "second_half", "twice_its_size")
        ),
    )


def costs(part: Part) -> None:
    """What do create, export, map, set access, import and release cost, by size of a handle?"""
    for size_mib, most in HANDLES:
        size = size_mib * MIB
        count = min(most, part.allocations_max, part.bytes_max // size)
        if not count or not part.fits(count * size):
            part.note(**{f"{size_mib}_mib": "skipped: more than may be taken of this device"})
            continue
        part.note(**{f"{size_mib}_mib": {"handles": count, **_costs_of(part, size, count)}})


def _costs_of(part: Part, size: int, count: int) -> dict[str, Any]:
    """What each driver call took, step by step, for `count` handles of `size` bytes."""
    owner, reader = part.peer(), part.peer()
    for peer in (owner, reader):  # the first calls of a process load things
        peer("create", size_bytes=2 * MIB)
        peer("map", writable=True)
        peer("unmap")
        peer("release")
    steps: dict[str, Any] = {}

    def note(step: str, peer: Peer) -> None:
        steps[step] = {call: _per_gib(took, size) for call, took in peer.calls.items()}

    owner("create", size_bytes=size, count=count)
    note("create", owner)
    owner("map", writable=True, each=True)
    note("map_each", owner)
    owner("lend")
    reader("adopt", owner.take_fds(), size_bytes=size)
    note("import", reader)
    reader("map", writable=False)
    note("map_in_one_range", reader)
    reader("unmap")
    note("unmap", reader)
    reader("release")
    note("release_import", reader)
    owner("unmap")
    owner("release")
    note("release_last", owner)
    for peer in (owner, reader):
        peer.close()
    return steps


def _per_gib(took: dict[str, float], size: int) -> dict[str, float]:
    per_gib = round(took["sum_ms"] / (took["n"] * size / GIB), 3)
    return {"median_us": took["median_us"], "max_us": took["max_us"], "ms_per_gib": per_gib}


def alias(part: Part) -> None:
    """Can one block fill a large range; and real memory take its place, under a captured graph?"""
    span = min(16 * GIB, part.bytes_max)
    part.need(span)
    found = part.peer()("alias", span_bytes=span, piece_bytes=64 * MIB)
    part.note(span_gib=span / GIB, **found)
    part.claim(one_block_can_be_mapped_many_times=found["is_one_memory"])


def speed(part: Part) -> None:
    """Is imported memory read as fast as a process's own? (copies inside the device, no kernels)"""
    size = min(4 * GIB, part.bytes_max // 4)
    part.need(3 * size)
    owner, reader = part.peer(), part.peer(context=True)
    owner("create", size_bytes=size)
    owner("lend")
    reader("adopt", owner.take_fds(), size_bytes=size)
    reader("map", writable=False)
    try:
        found = reader("copy_speed", repeats=20)
    except NotOffered as error:
        raise Skipped(str(error)) from error
    part.note(**found)
    part.claim(imported_is_read_as_fast=found["imported_gb_per_s"] > 0.9 * found["own_gb_per_s"])
