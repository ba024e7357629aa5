"""Kills a process that holds device memory, and times every sign of its death from the SIGKILL."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hack.device.part import GIB, NOISE_BYTES, Part, Skipped, mib
from hack.device.remote import Peer, PeerError

SIZES_GIB = (1, 20, 40, 80)
WATCH_S = 30.0
POLL_S = 0.0005
SPIN_S = 20.0  # how long the running GPU kernel would take without the SIGKILL
LATE_MS = 20.0  # after the witness, besides two NVML reads: too little for a failover to notice


def death(part: Part) -> None:
    """SIGKILL: when are EOF, the witness, the pidfd and the memory there, by size?"""
    sizes = [gib for gib in SIZES_GIB if part.fits(gib * GIB)]
    if not sizes:
        raise Skipped("this device has less than 1 GiB to spare")
    runs: list[dict[str, Any]] = []
    plan = [(gib, own, busy) for own in (True, False) for busy in (False, True) for gib in sizes]
    for gib, is_own, is_busy in plan:
        run: dict[str, Any] = {"gib": gib, "own": is_own, "mid_kernel": is_busy}
        if part.left_s() < 12:
            run["skipped"] = "out of time"
        else:
            try:
                run |= _one(part, gib, is_own=is_own, is_busy=is_busy)
            except PeerError as error:
                run["skipped"] = str(error)
            part.peers.close()
        runs.append(run)
        part.note(runs=runs)
    timed = [run for run in runs if "ms" in run]
    part.claim(
        every_sign_of_death_comes=bool(timed)
        and all(
            {"eof", "witness", "pidfd", *(["memory_free"] if run["own"] else [])} <= {*run["ms"]}
            for run in timed
        ),
        memory_is_free_when_the_witness_is=all(
            run["ms"].get("memory_free", 0.0) - run["ms"].get("witness", 0.0)
            <= LATE_MS + 2 * run["nvml_look_ms"]
            for run in timed
        ),
    )


def _one(part: Part, gib: int, *, is_own: bool, is_busy: bool) -> dict[str, Any]:
    """Kill one process with its own memory, or with an import of another process's."""
    witness = Path(part.directory) / "witness"
    witness.write_bytes(b"")
    owner = None if is_own else part.peer()
    if owner:
        owner("create", size_bytes=GIB, count=gib)
    before = part.nvml.settled()
    victim = part.peer(context=True, witness=str(witness))
    if owner:
        victim("adopt", owner.lend(), size_bytes=GIB)
    else:
        victim("create", size_bytes=GIB, count=gib)
    victim("map", writable=is_own)
    held = part.nvml.settled() - before
    if is_busy:
        victim("spin", seconds=SPIN_S)
    began = time.monotonic()
    part.nvml.used()
    look_ms = round((time.monotonic() - began) * 1e3, 2)
    seen = _kill(part, victim, witness, before if is_own else None)
    return {"held_mib": mib(held), "nvml_look_ms": look_ms, "ms": seen}


def _kill(part: Part, victim: Peer, witness: Path, base: int | None) -> dict[str, float]:
    """SIGKILL it while threads watch for each sign; milliseconds until each, in order.

    `base`: memory in use without it; None if its death frees none.
    """
    end = time.monotonic() + min(WATCH_S, part.left_s() - 5)
    seen: dict[str, float] = {}
    pidfd = os.pidfd_open(victim.process.pid)

    def watch(sign: str, has_come: Callable[[], bool]) -> None:
        while not has_come():
            if time.monotonic() > end:
                return
            time.sleep(POLL_S)
        seen[sign] = time.monotonic()

    signs: dict[str, Callable[[], bool]] = {
        "eof": lambda: is_readable(victim.fileno()),
        "pidfd": lambda: is_readable(pidfd),
        "witness": lambda: is_free(witness),
    }
    if base is not None:
        signs["memory_free"] = lambda: part.nvml.used() <= base + NOISE_BYTES
    threads = [threading.Thread(target=watch, args=each) for each in signs.items()]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # until all are watching, and the GPU kernel runs
    killed = time.monotonic()
    victim.process.kill()
    for thread in threads:
        thread.join()
    os.close(pidfd)
    order = sorted(seen, key=lambda sign: seen[sign])
    return {sign: round((seen[sign] - killed) * 1e3, 2) for sign in order}


def is_free(witness: Path) -> bool:
    """Whether no process holds its lock."""
    with contextlib.suppress(BlockingIOError), open(witness, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def is_readable(fd: int) -> bool:
    """Of a pidfd: whether its process is gone."""
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLRDHUP)
    return bool(poll.poll(0))
