"""Processes of a backend's tree without the witness, and what they could touch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from plumbing.service import procfs

DEVICES = ("/dev/nvidia", "/dev/dri")


def bare(supervisor: int) -> list[int]:
    """The processes under an engine's supervisor that do not hold a witness on descriptor 0."""
    return [pid for pid in procfs.descendants(supervisor) if not procfs.flock_held(pid, 0)]


def sockets_of(pids: Iterable[int]) -> set[str]:
    return {each for pid in pids for each in links_of(pid) if each.startswith("socket:")}


def reach_of(pid: int, foreign_sockets: set[str]) -> set[str]:
    """Everything that `pid` has of devices, of the memory service and of other processes: devices
    and memory (a memfd) that it has open or mapped, and shared ends of connections."""
    with open(f"/proc/{pid}/maps") as stream:
        mapped = {line.split(maxsplit=5)[5].strip() for line in stream if line.count(" ") > 5}
    found = {each for each in links_of(pid) | mapped if _is_memory(each)}
    return found | (links_of(pid) & foreign_sockets)


def links_of(pid: int) -> set[str]:
    folder, found = f"/proc/{pid}/fd", set()
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as this very listing is
            found.add(os.readlink(f"{folder}/{name}"))
    return found


def _is_memory(path: str) -> bool:
    return path.startswith(("/memfd:", *DEVICES))


def assert_witness_fences(supervisor: int, gms: Iterable[int], helpers: Iterable[str]) -> list[str]:
    """Every process of the tree that can reach the device holds the witness; returns the command
    lines of the others, each of which is one of `helpers`."""
    naked = bare(supervisor)
    fenced = [pid for pid in procfs.descendants(supervisor) if pid not in naked]
    assert fenced, "no process of the tree holds the witness"
    assert any(_is_memory(each) for pid in fenced for each in links_of(pid)), "nobody has memory"
    foreign = sockets_of([*fenced, *gms])
    lines = []
    for pid in naked:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            line = stream.read().replace(b"\0", b" ").decode(errors="replace")
        assert any(helper in line for helper in helpers), f"{line} holds no witness"
        assert not reach_of(pid, foreign), f"{line} reaches {reach_of(pid, foreign)}"
        lines.append(line)
    return lines
