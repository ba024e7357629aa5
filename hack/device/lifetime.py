"""What keeps memory of a device alive, and what it takes to hold it: parts of the device check."""

from __future__ import annotations

import os
import time
from typing import Any

from hack.device.part import GIB, NOISE_BYTES, Part, mib
from hack.device.remote import PeerError

MIB = 1 << 20
CLOSED_S = 2.0  # for the driver to tear down a device that the last process has closed


def device(part: Part) -> None:
    """Which device and driver is this, how is it set, what granularity has it?"""
    peer = part.peer()
    part.note(nvml=part.nvml.facts(), cuda=peer("facts"), start={"calls": peer.calls})


def context(part: Part) -> None:
    """Does it take a context to create, export, import and check memory; what does one cost?"""
    nvml, size = part.nvml, 64 * MIB
    base = nvml.settled()
    one = part.peer()
    opened = nvml.settled()
    had = {"open": one("state")}
    one("create", size_bytes=size)
    had["create_and_export"] = one("state")
    created = nvml.settled()
    one("lend")
    other = part.peer()
    both = nvml.settled()
    other("adopt", one.take_fds(), size_bytes=size)
    had["import"] = other("state")
    other("check")
    had["map_and_set_access"] = other("state")
    imported = nvml.settled()
    part.note(
        steps=had,
        used_by_open_mib=mib(opened - base),
        used_by_create_beyond_its_size_mib=mib(created - opened - size),
        used_by_import_and_check_mib=mib(imported - both),
    )
    needs = {step: bool(state["has_context"]) for step, state in had.items()}
    part.claim(server_needs_no_context=not any(needs.values()))
    for each in (other, one):
        each.close()
    base, began = nvml.settled(), time.monotonic()
    with_context = part.peer(context=True)
    part.note(
        process_with_context_ms=round((time.monotonic() - began) * 1e3),
        used_by_context_mib=mib(nvml.settled() - base),
    )
    with_context.close()
    part.note(left_behind_mib=mib(nvml.settled() - base))


def refcount(part: Part) -> None:
    """When is memory that several processes hold really free? (Decision 7's table)"""
    nvml, size = part.nvml, min(2 * GIB, part.bytes_max // 2)
    part.need(size)
    rows: dict[str, float] = {}
    kept: list[bool] = []
    freed: list[bool] = []
    base = nvml.settled()

    def row(step: str, is_held: bool) -> None:
        used = nvml.settled() - base
        rows[step] = mib(used)
        if is_held:
            kept.append(used >= size * 0.9)
        else:
            freed.append(used < NOISE_BYTES)

    for end in ("release", "SIGKILL"):
        owner, client = part.peer(), part.peer()
        owner("create", size_bytes=size)
        owner("lend")
        client("adopt", owner.take_fds(), size_bytes=size)
        client("map", writable=False)
        row(f"created, imported and mapped ({end})", is_held=True)
        owner("release") if end == "release" else owner.kill()
        row(f"the server lets go by {end}", is_held=True)
        if end == "release":
            client("release")
            row("the client keeps its mapping only", is_held=True)
            client("unmap")
        client.kill() if end == "SIGKILL" else client.close()
        owner.close()
        row(f"the client lets go by {end}", is_held=False)
        part.note(used_above_baseline_mib=rows)
    part.claim(memory_lives_while_anybody_holds_it=all(kept), last_holders_end_frees_it=all(freed))


def fd_alone(part: Part) -> None:
    """Does a descriptor alone keep memory alive, with the device open elsewhere and without?"""
    size = min(GIB, part.bytes_max)
    found: dict[str, Any] = {}
    for case in ("device_closed_by_all", "device_open_elsewhere"):
        if case == "device_open_elsewhere":
            part.nvml.settled()  # from here on this process keeps it open
        else:
            found["other_processes_with_the_device_open"] = _processes_with_device()
        owner = part.peer()
        owner("create", size_bytes=size)
        owner("map", writable=True)
        owner("write", byte=7)
        owner("lend")
        fds = owner.take_fds()  # now ours, who never opened CUDA
        owner.kill()
        time.sleep(CLOSED_S)
        newcomer = part.peer()
        try:
            newcomer("adopt", fds, size_bytes=size)
            newcomer("map", writable=False)
            found[case] = {"bytes": newcomer("read")}
        except PeerError as error:
            found[case] = {"lost": str(error)}
        newcomer.close()
        part.note(**found)
    part.note(persistence_mode=part.nvml.facts()["PersistenceMode"])
    part.claim(
        descriptor_alone_keeps_memory=found["device_open_elsewhere"].get("bytes") == [7],
        it_does_with_the_device_closed_by_all=found["device_closed_by_all"].get("bytes") == [7],
    )


def hand_back(part: Part) -> None:
    """Can a survivor hand on what it was given: the descriptor itself, or its import exported?"""
    size, found = 64 * MIB, {}
    for how in ("same_descriptor", "export_of_import", "export_of_retained_handle"):
        owner, survivor = part.peer(), part.peer()
        owner("create", size_bytes=size)
        owner("map", writable=True)
        owner("write", byte=7)
        owner("lend")
        survivor("adopt", owner.take_fds(), size_bytes=size)
        survivor("map", writable=False)
        owner.kill()
        fresh = part.peer()
        try:
            if how == "same_descriptor":
                survivor("lend")
            else:
                survivor("export", retained=how == "export_of_retained_handle")
            fresh("adopt", survivor.take_fds(), size_bytes=size)
            fresh("map", writable=False)
            found[how] = f"bytes {fresh('read')}"
        except PeerError as error:
            found[how] = f"refused: {error}"
        survivor.close()
        fresh.close()
        part.note(**found)
    part.claim(received_descriptor_can_be_handed_on=found["same_descriptor"] == "bytes [7]")


def _processes_with_device() -> int:
    """How many processes that can be seen have a file of the device open."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            files = [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
        except OSError:  # it ended, or is not ours
            continue
        count += any(file.startswith("/dev/nvidia") for file in files)
    return count
