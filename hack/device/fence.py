"""Of a takeover: a killed process writes no more.

A *fence* is what the lock server waits for before it grants: the witness is free, and the process
is gone. From then on a successor may use the memory that the dead process wrote to.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hack.device.death import is_free, is_readable
from hack.device.part import MIB, Part, Skipped
from hack.device.remote import NotOffered, Peer, PeerError

BUFFER_BYTES = 64 * MIB  # a round over it takes a GPU 30 µs
QUIET_S = 0.1  # between the two digests
ALIVE_S_MAX = 0.05  # how long a process writes before it is killed; drawn at random
POLL_S = 0.0002
WAIT_S = 10.0
RUN_S = 6.0  # what one kill may take at most, with a fresh process


def fence(part: Part) -> None:
    """Does a killed process that was writing to memory of the service write after the fence?"""
    size = min(BUFFER_BYTES, part.bytes_max // 64)
    owner, watcher = part.peer(context=True), part.peer(context=True)
    owner("create", size_bytes=size)
    owner("map", writable=True)
    watcher("adopt", owner.lend(), size_bytes=size)
    watcher("map", writable=False)
    seed = int.from_bytes(os.urandom(4), "big")
    draw = random.Random(seed)
    runs: list[dict[str, Any]] = []
    while len(runs) < part.kills_max and part.left_s() > RUN_S + 2:
        runs.append(_kill_writer(part, owner, watcher, size, draw.uniform(0, ALIVE_S_MAX)))
        part.note(**_figures(runs, seed))
    if not runs:
        raise Skipped("out of time")
    part.claim(no_write_follows_the_fence=all(run["is_quiet"] for run in runs))


def _kill_writer(
    part: Part, owner: Peer, watcher: Peer, size: int, alive_s: float
) -> dict[str, Any]:
    witness, stop = (Path(part.directory) / name for name in ("witness", "stop"))
    witness.write_bytes(b"")
    stop.unlink(missing_ok=True)
    owner("clear")
    victim = part.peer(context=True, witness=str(witness))
    victim("adopt", owner.lend(), size_bytes=size)
    victim("map", writable=True)
    writer = _start(victim)
    _until(lambda: _is_changing(owner), "write")
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(watcher, "follow", until=str(stop))
        try:
            time.sleep(alive_s)
            killed_s = time.monotonic()
            gone_s = _kill_and_wait(victim, witness)
            digests = [owner("digest")]
            time.sleep(QUIET_S)
            digests.append(owner("digest"))
        finally:
            stop.touch()
        last = following.result()
    is_late = last["before_s"] > gone_s
    return {
        "writer": writer,
        "fence_ms": (gone_s - killed_s) * 1e3,
        # How long before the fence the last change was seen; it may have been a little earlier.
        "quiet_before_ms": (gone_s - last["after_s"]) * 1e3,
        "reads": last["reads"],
        "is_quiet": digests[0] == digests[1] and not is_late,
    }


def _start(victim: Peer) -> str:
    try:
        victim("count", is_kernel=True)
    except NotOffered:
        victim("count", is_kernel=False)
        return "memsets"
    return "a kernel that never ends"


def _is_changing(owner: Peer) -> bool:
    return bool(owner("page") != owner("page"))


def _kill_and_wait(victim: Peer, witness: Path) -> float:
    """When the fence came."""
    pidfd = os.pidfd_open(victim.process.pid)
    try:
        victim.process.kill()
        _until(lambda: is_free(witness) and is_readable(pidfd), "end")
        return time.monotonic()
    finally:
        os.close(pidfd)
        victim.kill()


def _until(predicate: Any, what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not predicate():
        if time.monotonic() > end:
            raise PeerError(f"the process did not {what} in {WAIT_S:.0f} s")
        time.sleep(POLL_S)


def _figures(runs: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    def spread(name: str) -> dict[str, float]:
        values = [run[name] for run in runs]
        return {
            "min": round(min(values), 3),
            "median": round(statistics.median(values), 3),
            "max": round(max(values), 3),
        }

    return {
        "kills": len(runs),
        "writer": runs[0]["writer"],
        "seed": seed,
        "with_a_write_after_the_fence": sum(not run["is_quiet"] for run in runs),
        "from_sigkill_to_fence_ms": spread("fence_ms"),
        "last_change_seen_before_the_fence_ms": spread("quiet_before_ms"),
        "reads_by_the_watcher": spread("reads"),
    }
