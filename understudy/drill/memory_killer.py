"""Kills a device's server of the memory service, and looks whether anybody but it has noticed.

Owns what a crash without loss means, seen from outside: the same engines run as before, the same
one serves under the same token, and the fresh server has the same epoch with the same readers. The
kill is a plain SIGKILL by a pidfd: unlike an engine's, a server's death has nothing to rehearse.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gms.client import messages as gms_messages
from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.service.clock import SystemClock
from understudy.drill.records import MemoryKill
from understudy.status.gather import gather, pids_of, status_of
from understudy.status.memory_view import Document, devices

POLL_S = 0.01
RECOVERY_DEADLINE_S = 60.0  # a server starts in a second; its supervisor backs off to 30 s
SAID_EVERY_S = 10.0
COMMITTED = "committed"
FIRST = 1  # of a PID namespace: the kernel keeps SIGKILL and SIGSTOP of its own processes from it

clock = SystemClock()
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """What the death of a memory server must not change."""

    active: str | None
    token: int | None
    incarnations: Mapping[str, str]

    @classmethod
    def of(cls, view: Document) -> Standing:
        engines = [part["engine"] for part in view["engines"] if "error" not in part]
        return cls(
            view["active"],
            view["token"],
            {str(each.get("id")): str(each.get("incarnation")) for each in engines},
        )

    def changes(self, now: Standing) -> list[str]:
        """What is otherwise now, as sentences."""
        changed = []
        for engine, before in self.incarnations.items():
            after = now.incarnations.get(engine)
            if after != before:
                changed.append(f"{engine} was {before} and is {after or 'silent'}: it restarted")
        if (self.active, self.token) != (now.active, now.token):
            changed.append(
                f"{self.active} served under token {self.token}, and now {now.active} under"
                f" {now.token}"
            )
        return changed


def committed_devices(view: Document) -> dict[str, Document]:
    """The devices with committed weights, by name."""
    found = [device for part in view["gms"] for device in devices(part)]
    return {
        str(device["device_uuid"]): device for device in found if device.get("state") == COMMITTED
    }


async def kill_server(directory: Path, number: int) -> tuple[MemoryKill, Standing]:
    """Kill the server of the `number`-th device, round and round; what was true before it.

    Raises:
        UnderstudyError: `drill.no_memory`, nothing is committed; `drill.not_here`.
    """
    view = await gather(directory)
    found = committed_devices(view)
    if not found:
        raise UnderstudyError("drill.no_memory", "no memory service has anything committed")
    name = list(found)[number % len(found)]
    device = found[name]
    with hold((await pids_of(directory)).gms.get(name), f"the server of {name}") as pidfd:
        killed_ms = clock.now_ms()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    kill = memory_of(name, device, killed_ms, pid=int(device.get("pid") or 0))
    return kill, Standing.of(view)


def memory_of(name: str, device: Document, killed_ms: float, pid: int) -> MemoryKill:
    """What the server of `device` has, which its successor must have again. `pid` is what it says
    of itself; 0 where the successor may well say the same."""
    epoch, tag = str(device.get("epoch")), str(device.get("tag"))
    return MemoryKill(name, tag, pid, epoch, readers_of(device), killed_ms)


@contextmanager
def hold(pid: int | None, what: str) -> Iterator[int]:
    """A pidfd of `pid`, a process that answered a moment ago.

    Raises:
        UnderstudyError: `drill.not_here`, it cannot be seen from here, or is deaf to us.
    """
    try:
        pidfd = os.pidfd_open(pid if pid and pid != FIRST else 0)  # there is no process 0
    except OSError as error:
        reason = "it is pid 1 here" if pid == FIRST else "its process is not visible"
        raise UnderstudyError(
            "drill.not_here",
            f"{what} cannot be killed from here: {reason}; drill it from the node's PID namespace",
        ) from error
    try:
        yield pidfd
    finally:
        os.close(pidfd)


async def wait_recovered(directory: Path, kill: MemoryKill, say: Say) -> None:
    """Until a fresh server has the same epoch with the same readers; notes when that was.

    Raises:
        WaitTimeoutError: `drill.no_recovery`, with what is missing.
    """
    path = str(directory / f"gms_{kill.device}_{kill.tag}.sock")
    said_ms = kill.killed_ms
    while True:
        device = await status_of(kill.device, path, gms_messages.CATALOGUE, gms_messages.Status())
        missing = _missing(kill, device)
        now_ms = clock.now_ms()
        if missing is None:
            kill.recovered_ms = now_ms
            return
        if now_ms > kill.killed_ms + RECOVERY_DEADLINE_S * 1000:
            raise WaitTimeoutError(
                "drill.no_recovery",
                f"{kill.device} had not recovered after {RECOVERY_DEADLINE_S:g} s: {missing}",
            )
        if now_ms > said_ms + SAID_EVERY_S * 1000:
            said_ms = now_ms
            say(f"waiting for {kill.device}, {(now_ms - kill.killed_ms) / 1000:.0f} s: {missing}")
        await asyncio.sleep(POLL_S)


def readers_of(device: Document) -> frozenset[str]:
    """Who is attached to what is committed, as `engine-0-… rank 1`."""
    return frozenset(
        f"{session.get('incarnation')} rank {session.get('rank')}"
        for session in device.get("sessions") or ()
        if session.get("epoch") == device.get("epoch")
    )


def _missing(kill: MemoryKill, device: Mapping[str, Any]) -> str | None:
    """What is not yet as before, if anything."""
    if "error" in device:
        return str(device["error"])
    if kill.pid and device.get("pid") == kill.pid:
        return f"the killed server (pid {kill.pid}) still answers"
    if device.get("state") != COMMITTED:
        return f"it is {device.get('state')}"
    if device.get("epoch") != kill.epoch:
        return f"it has epoch {device.get('epoch')} and had {kill.epoch}"
    away = sorted(kill.readers - readers_of(device))
    return f"{', '.join(away)} is not attached" if away else None
