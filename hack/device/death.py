"""A process that holds device memory is killed: every sign of its death, timed from the SIGKILL."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hack.device.part import GIB, NOISE_BYTES, SPARE_BYTES, Part, Skipped, mib
from hack.device.remote import NotOffered, Peer, PeerError
from understudy.wire.fds import OwnedFd

SIZES_GIB = (1, 20, 40, 80)
WATCH_S = 30.0
PROBE_S = 0.0005  # between two looks at the witness
POLL_S = 0.001  # between two looks at memory in use
LATE_MS = 50.0  # after the witness: what a look through NVML may cost, and not what freeing does
SPIN_S = 20.0  # how long the kernel would run that is running when the SIGKILL comes


def death(part: Part) -> None:
    """SIGKILL: when are EOF, the witness, the pidfd and the memory there, by size; and for whom?"""
    runs: list[dict[str, Any]] = []
    sizes = [gib for gib in SIZES_GIB if part.fits(gib * GIB)]
    if not sizes:
        raise Skipped("not even 1 GiB may be taken of this device")
    # Whose memory it is; whether a kernel runs; whether somebody waits for the memory meanwhile.
    kinds = [(own, busy, False) for own in (True, False) for busy in (False, True)]
    plan = [(gib, *kind) for kind in kinds for gib in sizes]
    plan += [(gib, True, True, True) for gib in sizes if gib > SPARE_BYTES // GIB]
    for gib, is_own, is_busy, has_waiter in plan:
        run: dict[str, Any] = {
            "gib": gib,
            "own": is_own,
            "mid_kernel": is_busy,
            "waited_for": has_waiter,
        }
        if part.left_s() < 12:
            part.note(cut_short="out of time")
            break
        try:
            run |= _one(part, gib, is_own=is_own, is_busy=is_busy, has_waiter=has_waiter)
        except NotOffered as error:
            run["skipped"] = str(error)
        except PeerError as error:
            run["failed"] = str(error)
        runs.append(run)
        part.note(runs=runs)
    timed = [run["ms"] for run in runs if "ms" in run]
    part.claim(
        memory_is_free_when_the_witness_is=all(
            ms["witness"] >= ms["memory_free"] - LATE_MS for ms in timed if "memory_free" in ms
        ),
        every_sign_comes=bool(timed)
        and all({"eof", "witness", "pidfd"} <= ms.keys() for ms in timed),
        memory_comes_back=any("memory_free" in ms for ms in timed),
    )


def _one(part: Part, gib: int, *, is_own: bool, is_busy: bool, has_waiter: bool) -> dict[str, Any]:
    witness = Path(part.directory) / f"witness-{time.monotonic_ns()}"
    witness.touch()
    with contextlib.ExitStack() as stack:
        owner = None if is_own else part.peer()
        if owner:
            stack.callback(owner.close)
            owner("create", size_bytes=GIB, count=gib)
        before = part.nvml.settled()
        victim = part.peer(context=True, witness=str(witness))
        stack.callback(victim.close)
        if owner:
            owner("lend")
            victim("adopt", owner.take_fds(), size_bytes=GIB)
        else:
            victim("create", size_bytes=GIB, count=gib)
        victim("map", writable=is_own)
        late, theirs = socket.socketpair()
        stack.callback(late.close)
        victim("keep_high", [OwnedFd(theirs.detach())])
        held = part.nvml.settled() - before
        waiter = _waiter(part, stack, gib) if has_waiter else None
        if is_busy:
            victim("spin", seconds=SPIN_S)
        seen = _kill(part, victim, late, str(witness), before if is_own and not waiter else None)
        out: dict[str, Any] = {"held_mib": mib(held)}
        if waiter:
            answer = waiter.answer(WATCH_S + 10)
            if answer["at"]:
                seen["waiter_has_it"] = answer.pop("at")
            out["waiter"] = answer
        began = seen.pop("killed")
        order = sorted(seen, key=lambda sign: seen[sign])
        return out | {"ms": {sign: round((seen[sign] - began) * 1e3, 2) for sign in order}}


def _waiter(part: Part, stack: contextlib.ExitStack, gib: int) -> Peer:
    """A process that wants as much as the victim has, where there is not so much free."""
    waiter = part.peer()
    stack.callback(waiter.close)
    spare = part.nvml.free() - max(SPARE_BYTES, gib * GIB // 2)
    if spare >= GIB:
        waiter("create", size_bytes=GIB, count=spare // GIB)
    waiter.send("create_when_free", size_bytes=GIB, count=gib, timeout_s=WATCH_S)
    return waiter


def _kill(
    part: Part, victim: Peer, late: socket.socket, witness: str, base: int | None
) -> dict[str, float]:
    """Watch for every sign, then SIGKILL; the instant of each, on the monotonic clock.

    `base`: memory in use without the victim; None leaves NVML alone, which might queue behind
    somebody who waits for memory inside the driver.
    """
    seen: dict[str, float] = {}
    end = time.monotonic() + min(WATCH_S, max(5.0, part.left_s() - 5))

    def signs() -> None:
        pidfd = os.pidfd_open(victim.process.pid)
        names = {victim.fileno(): "eof", late.fileno(): "eof_of_highest_descriptor", pidfd: "pidfd"}
        poll = select.poll()
        for fd in names:
            poll.register(fd, select.POLLIN | select.POLLRDHUP)
        while names and time.monotonic() < end:
            for fd, _ in poll.poll(100):
                seen[names.pop(fd)] = time.monotonic()
                poll.unregister(fd)
        os.close(pidfd)

    def lock() -> None:
        with open(witness, "rb") as file:
            while time.monotonic() < end:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    seen["witness"] = time.monotonic()
                    return
                time.sleep(PROBE_S)

    def memory() -> None:
        while base is not None and time.monotonic() < end:
            if part.nvml.used() <= base + NOISE_BYTES:
                seen["memory_free"] = time.monotonic()
                return
            time.sleep(POLL_S)

    watchers: list[Callable[[], None]] = [signs, lock, memory]
    threads = [threading.Thread(target=watch, daemon=True) for watch in watchers]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # so that all of them are watching, and a kernel runs
    seen["killed"] = time.monotonic()
    victim.process.kill()
    for thread in threads:
        thread.join(max(0.1, end - time.monotonic() + 1))
    victim.process.wait(20)
    return seen
