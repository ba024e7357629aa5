"""Finds the active engine, waits until the pod is whole, and has a process killed.

Owns the question "may the next kill be made?": one engine is active, holds the lock under a token,
and another waits in standby in the lock server's queue. Killing goes through the engine's control
socket, so that it works across PID namespaces and a rehearsed death is not taken for a crash loop.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine import messages as engine_messages
from engine.supervisor.tree import HELPERS
from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.part.paths import engine_sockets
from plumbing.part.peers import Answered, ask
from plumbing.service.clock import SystemClock
from plumbing.service.procfs import descendants
from understudy.drill.observer import Observer, OldTree
from understudy.drill.part_killer import hold
from understudy.drill.records import STOP, SUPERVISOR, EngineKill, asked_of_engine
from understudy.status.gather import gather
from understudy.status.view import PARKED

WHOLE_POLL_S = 0.05
WHOLE_DEADLINE_S = (
    300.0  # a relaunched engine attaches in seconds; a real one on 2 cores in minutes
)

WHOLE_SAID_EVERY_S = 10.0  # a relaunch is over before that; who waits longer wants to know why

clock = SystemClock()


@dataclass(frozen=True, slots=True)
class Whole:
    """A pod with redundancy: who serves, under which token, at which address, who waits."""

    engine: str
    token: int
    service: str
    standbys: tuple[str, ...]


async def wait_whole(
    directory: Path,
    say: Callable[[str], None] = lambda line: None,
    deadline_s: float = WHOLE_DEADLINE_S,
) -> Whole:
    """Poll until one engine serves and another is parked in the queue; `say` what is missing.

    Raises:
        WaitTimeoutError: `drill.not_whole`, with what is missing.
    """
    began_ms = said_ms = clock.now_ms()
    end_ms = began_ms + deadline_s * 1000
    while True:
        view = await gather(directory)
        lock = (view["lockserver"].get("locks") or {}).get("active") or {}
        queued = {waiter.get("engine") for waiter in lock.get("waiters") or []}
        parked = [
            engine["engine"]["id"]
            for engine in view["engines"]
            if (engine.get("engine") or {}).get("state") == PARKED
        ]
        ready = tuple(name for name in parked if name in queued)
        if view["active"] is not None and view["failover_ready"] and ready:
            service = (view["lockserver"].get("service") or {}).get("active") or {}
            return Whole(view["active"], view["token"], str(service.get("address")), ready)
        if clock.now_ms() > end_ms:
            said = (
                "; ".join(view["problems"])
                or f"standby {parked}, queued {sorted(map(str, queued))}"
            )
            raise WaitTimeoutError(
                "drill.not_whole",
                f"the pod was not whole within {deadline_s:g} s: it is {view['state']}, {said}",
            )
        if clock.now_ms() - said_ms > WHOLE_SAID_EVERY_S * 1000:
            said_ms = clock.now_ms()
            missing = "; ".join(view["problems"]) or "no engine stands by in the lock's queue"
            say(f"waiting for the pod to be whole, {(said_ms - began_ms) / 1000:.0f} s: {missing}")
        await asyncio.sleep(WHOLE_POLL_S)


async def kill_active(directory: Path, target: str, whole: Whole, observer: Observer) -> EngineKill:
    """Kill `target` of the active engine; returns as soon as the kill was made.

    Raises:
        UnderstudyError: the engine would not do it, or its supervisor is to be stopped and cannot
            be seen from here.
    """
    path = engine_sockets(directory)[whole.engine]
    status = await ask(path, engine_messages.CONTROL, engine_messages.StatusMsg())
    kill = EngineKill(target, whole.engine, whole.token, killed_ms=clock.now_ms())
    observer.expect(kill, _old_tree(directory, target, status))
    if target == STOP + SUPERVISOR:
        # It cannot be asked to: it would answer, and a process that hangs answers nobody.
        with hold(status.pid, f"the supervisor of {whole.engine}") as pidfd:
            kill.killed_ms = clock.now_ms()
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        return kill
    try:
        answered = await ask(path, engine_messages.CONTROL, asked_of_engine(target))
    except UnreachableError as error:
        # A supervisor that ends at once may take its answer with it: the moment before stands.
        if target != SUPERVISOR:
            raise UnderstudyError(
                "drill.kill_failed", f"{whole.engine} did not kill {target}: {error.message}"
            ) from error
    else:
        if isinstance(answered.message, engine_messages.KillingMsg):
            kill.killed_ms = answered.message.mono_ms
    return kill


def _old_tree(directory: Path, target: str, status: Answered) -> OldTree:
    """What must have ended before the next grant: processes, or where these are in another PID
    namespace, the witness that they hold."""
    if status.pid == 0:
        document = getattr(status.message, "document", None) or {}
        incarnation = (document.get("engine") or {}).get("incarnation")
        return OldTree.by_witness(directory, str(incarnation))
    backend = backend_processes(status.pid)
    # A supervisor outlives its backend's death, and must not outlive its own.
    is_own = target.removeprefix(STOP) == SUPERVISOR
    return OldTree.of([status.pid, *backend] if is_own else backend)


def backend_processes(supervisor: int) -> list[int]:
    """What runs under an engine's supervisor, without the helpers that never open a device: nobody
    waits for those, and their life proves nothing."""
    return [pid for pid in descendants(supervisor) if not _is_helper(pid)]


def _is_helper(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read().decode(errors="replace")
    except OSError:
        return False  # it has ended, which its pidfd will say
    return any(helper in line for helper in HELPERS)
