"""Kills parts that are not engines: the lock server, the memory service, a device's server, the
gateway or its child.

A crash without loss means that the part is replaced and has what it had before (a memory server:
the same epoch with the same readers), the same engines run, and the same one is active under the
same token. Also samples the physical memory of the weights, to detect a second copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gms.client import messages as gms_messages
from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.part.format import duration
from plumbing.part.paths import gms_socket
from plumbing.service import init
from plumbing.service.clock import SystemClock
from plumbing.service.procfs import children, descendants, inner_pid, parent
from plumbing.wire.peer import is_gone
from understudy.drill.records import (
    GATEWAY_CHILD,
    GATEWAYS,
    GMS_SUPERVISOR,
    LOCKSERVER,
    MemoryKill,
    PartKill,
)
from understudy.host import physical_bytes
from understudy.status.gather import Pids, PodPart, gateway_part, gather, pids_of, status_of
from understudy.status.memory_view import Document, devices

POLL_S = 0.01
RECOVERY_DEADLINE_S = 60.0  # a server starts in a second; its supervisor backs off up to 30 s
SAID_EVERY_S = 10.0
BACK_DEADLINE_S = 90.0  # a container restarts within seconds; its runner may back off
SAMPLE_S = 0.05  # a copy of the weights lasts as long as an engine maps it
COMMITTED = "committed"
FIRST = 1  # pid 1 ignores SIGKILL and SIGSTOP from its own namespace

clock = SystemClock()
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """What the death of a part must not change."""

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
        """The differences to `now`, as sentences."""
        changed = []
        for engine, before in self.incarnations.items():
            after = now.incarnations.get(engine)
            if after != before:
                changed.append(f"{engine} restarted ({before} is now {after or 'unreachable'})")
        if (self.active, self.token) != (now.active, now.token):
            changed.append(
                f"{now.active} is active under token {now.token} instead of {self.active} under"
                f" {self.token}"
            )
        return changed


def committed_devices(view: Document) -> dict[str, Document]:
    """The devices with committed weights, by name."""
    found = [device for part in view["gms"] for device in devices(part)]
    return {
        str(device["device_uuid"]): device for device in found if device.get("state") == COMMITTED
    }


async def kill_server(directory: Path, number: int) -> tuple[MemoryKill, Standing]:
    """Kill the server of the `number`-th device, modulo their count. Returns the state before.

    Raises:
        UnderstudyError: `drill.no_memory`, nothing is committed; `drill.not_here`.
    """
    view = await gather(directory)
    found = committed_devices(view)
    if not found:
        raise UnderstudyError("drill.no_memory", "no memory service has committed weights")
    name = list(found)[number % len(found)]
    device = found[name]
    with hold((await pids_of(directory)).gms.get(name), f"the server of {name}") as pidfd:
        killed_ms = clock.now_ms()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    kill = memory_of(name, device, killed_ms, pid=int(device.get("pid") or 0))
    return kill, Standing.of(view)


def memory_of(name: str, device: Document, killed_ms: float, pid: int) -> MemoryKill:
    """What the server of `device` has and its successor must have. `pid`: as it reports it; 0 where
    the successor may have the same."""
    epoch, tag = str(device.get("epoch")), str(device.get("tag"))
    return MemoryKill(name, tag, pid, epoch, readers_of(device), killed_ms)


@contextmanager
def hold(pid: int | None, what: str) -> Iterator[int]:
    """A pidfd of `pid`, a process that has just answered.

    Raises:
        UnderstudyError: `drill.not_here`, it is not visible here, or cannot be signalled.
    """
    is_below_init = bool(pid) and is_program_of_pid_1(pid or 0)
    try:
        # There is no process 0.
        pidfd = os.pidfd_open(0 if not pid or pid == FIRST or is_below_init else pid)
    except OSError as error:
        reason = "it is pid 1 here" if pid == FIRST else "its process is not visible"
        if is_below_init:
            reason = "its init ends everything in this container with it, this drill too"
        raise UnderstudyError(
            "drill.not_here",
            f"{what} cannot be killed from here: {reason}; run the drill in the node's PID "
            "namespace",
        ) from error
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def is_program_of_pid_1(pid: int) -> bool:
    """Whether `pid` is what our init, pid 1 of this very namespace, keeps running."""
    if parent(pid) != FIRST:
        return False
    try:
        with open(f"/proc/{FIRST}/cmdline", "rb") as stream:
            return os.fsencode(init.__file__) in stream.read().split(b"\0")
    except OSError:
        return False


async def wait_recovered(directory: Path, kill: MemoryKill, say: Say) -> None:
    """Wait until a new server has the same epoch with the same readers; records when.

    Raises:
        WaitTimeoutError: `drill.no_recovery`, with what is missing.
    """
    path = gms_socket(str(directory), kill.device, kill.tag)
    server = PodPart(kill.device, path, gms_messages.CATALOGUE)
    said_ms = kill.killed_ms
    while True:
        device = await status_of(server)
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
            say(f"waiting for {kill.device}, {duration(now_ms - kill.killed_ms)}: {missing}")
        await asyncio.sleep(POLL_S)


def readers_of(device: Document) -> frozenset[str]:
    """The readers of the committed epoch, as `engine-0-… rank 1`."""
    return frozenset(
        f"{session.get('incarnation')} rank {session.get('rank')}"
        for session in device.get("sessions") or ()
        if session.get("epoch") == device.get("epoch")
    )


def _missing(kill: MemoryKill, device: Mapping[str, Any]) -> str | None:
    """What is not as before yet, if anything."""
    if "error" in device:
        return str(device["error"])
    if kill.pid and device.get("pid") == kill.pid:
        return f"the killed server (pid {kill.pid}) still answers"
    if device.get("state") != COMMITTED:
        return f"it is {device.get('state')}"
    if device.get("epoch") != kill.epoch:
        return f"its epoch is {device.get('epoch')} instead of {kill.epoch}"
    away = sorted(kill.readers - readers_of(device))
    return f"not attached: {', '.join(away)}" if away else None


async def kill_part(directory: Path, target: str) -> tuple[PartKill, Standing, list[MemoryKill]]:
    """Kill `target` and wait until all its processes are gone. Returns the state before, and what
    the memory service had if that is the target.

    Raises:
        UnderstudyError: `drill.not_here`.
    """
    view, pids = await gather(directory), await pids_of(directory)
    first = _first_process(target, pids)
    child = _child_of(view["gateway"])
    if target == GATEWAY_CHILD:
        first = next((pid for pid in children(first or 0) if inner_pid(pid) == child), None)
    with ExitStack() as stack:
        first_fd = stack.enter_context(hold(first, target))
        held = [stack.enter_context(hold(pid, target)) for pid in descendants(first or 0)]
        kill = PartKill(target, clock.now_ms(), child=child)
        signal.pidfd_send_signal(first_fd, signal.SIGKILL)
        await until_gone(target, [first_fd, *held])
    kill.gone_ms = clock.now_ms()
    found = committed_devices(view) if target == GMS_SUPERVISOR else {}
    # In a new container, pids may be the same as before.
    memory = [memory_of(name, device, kill.killed_ms, pid=0) for name, device in found.items()]
    return kill, Standing.of(view), memory


async def wait_back(directory: Path, kill: PartKill, memory: list[MemoryKill]) -> None:
    """Wait until the part answers again with all that it had; records when.

    Raises:
        WaitTimeoutError: `drill.no_part`, `drill.no_recovery`.
    """
    while not await _is_back(directory, kill):
        if clock.now_ms() > kill.killed_ms + BACK_DEADLINE_S * 1000:
            raise WaitTimeoutError(
                "drill.no_part",
                f"{kill.target} did not come back within {BACK_DEADLINE_S:g} s; is there a service "
                "manager that restarts it?",
            )
        await asyncio.sleep(POLL_S)
    for device in memory:
        await wait_recovered(directory, device, lambda line: None)
    kill.back_ms = clock.now_ms()


async def _is_back(directory: Path, kill: PartKill) -> bool:
    """Whether the part answers again; a gateway must also accept, with another child."""
    if kill.target not in GATEWAYS:
        return _first_process(kill.target, await pids_of(directory)) is not None
    gateway = await status_of(gateway_part(directory))
    is_same = kill.target == GATEWAY_CHILD and _child_of(gateway) == kill.child
    return bool(gateway.get("accepting")) and not is_same


def _child_of(gateway: Document | None) -> int | None:
    """The gateway's serving child, by the pid that the gateway knows."""
    return ((gateway or {}).get("child") or {}).get("pid")


def _first_process(target: str, pids: Pids) -> int | None:
    """The part's main process, if it answers and is visible; a gateway's child is not known yet."""
    if target == LOCKSERVER:
        return pids.lockserver
    if target in GATEWAYS:
        return pids.gateway
    servers = list(pids.gms.values())
    return parent(servers[0]) if servers else None


async def until_gone(target: str, pidfds: list[int]) -> None:
    """Wait until all these processes have exited.

    Raises:
        WaitTimeoutError: `drill.no_part`.
    """
    end_ms = clock.now_ms() + BACK_DEADLINE_S * 1000
    while not all(is_gone(pidfd) for pidfd in pidfds):
        if clock.now_ms() > end_ms:
            raise WaitTimeoutError(
                "drill.no_part",
                f"processes of {target} are still alive {BACK_DEADLINE_S:g} s after the kill; "
                "check their state with `ps`",
            )
        await asyncio.sleep(POLL_S)


class PhysicalMemory:
    """Peak physical memory of the weights, sampled in a task from `watch` to `close`."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.samples = 0
        self._roots: Sequence[int] = ()
        self._task: asyncio.Task[None] | None = None

    def watch(self, roots: Sequence[int]) -> None:
        """From now on, sample the processes `roots` and their descendants."""
        self._roots = roots
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def sample(self) -> int:
        """The bytes now."""
        found = physical_bytes({pid for root in self._roots for pid in (root, *descendants(root))})
        self.peak_bytes = max(self.peak_bytes, found)
        self.samples += found > 0
        return found

    async def _run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)


def roots_of(pids: Pids) -> list[int]:
    """The supervisors of engines and memory service that are visible here."""
    supervisors = {parent(pid) for pid in pids.gms.values()}
    return [pid for pid in (*pids.engines.values(), *supervisors) if pid]
