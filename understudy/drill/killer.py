"""Waits until the pod is ready for a failover, and kills a process of the active engine.

A pod is ready when one engine is active and holds the lock, and another one is in standby and waits
in the lock server's queue. Kills go through the engine's control socket: that works across PID
namespaces, and a rehearsed death does not count as a crash loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from engine.supervisor.tree import HELPERS
from gateway.messages import CONTROL as GATEWAY_CONTROL
from gateway.messages import ExpectDeathMsg
from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.part.format import duration
from plumbing.part.models import model_of
from plumbing.part.paths import engine_sockets, gateway_socket
from plumbing.part.peers import Answered, ask
from plumbing.service.clock import SystemClock
from plumbing.service.procfs import descendants
from understudy.drill.kept import kv_of
from understudy.drill.observer import Observer, OldTree
from understudy.drill.part_killer import hold
from understudy.drill.records import STOP, SUPERVISOR, EngineKill, asked_of_engine
from understudy.status.gateway_view import is_open
from understudy.status.gather import gather
from understudy.status.view import PARKED

WHOLE_POLL_S = 0.05
WHOLE_DEADLINE_S = 300.0  # a relaunch takes seconds; with vLLM on 2 cores, minutes

ANNOUNCED_S = 2.0  # a gateway answers within milliseconds
WHOLE_SAID_EVERY_S = 10.0  # most relaunches take less; longer waits are explained

clock = SystemClock()


@dataclass(frozen=True, slots=True)
class Whole:
    """A pod with redundancy: the active engine, its token and address, and the standbys.

    `is_direct`: engines answer clients themselves, without a gateway."""

    engine: str
    token: int
    service: str
    standbys: tuple[str, ...]
    is_direct: bool = True


async def wait_whole(
    directory: Path,
    say: Callable[[str], None] = lambda line: None,
    deadline_s: float = WHOLE_DEADLINE_S,
    poll_s: float = WHOLE_POLL_S,
) -> Whole:
    """Poll until one engine is active, a standby is queued and requests can come in; `say` reports
    what is missing.

    Raises:
        WaitTimeoutError: `drill.not_whole`, with what is missing.
    """
    began_ms = said_ms = clock.now_ms()
    end_ms = began_ms + deadline_s * 1000
    while True:
        view = await gather(directory)
        if (whole := whole_of(view)) is not None:
            return whole
        missing = "; ".join(view["problems"]) or "no standby is queued for the lock"
        if clock.now_ms() > end_ms:
            raise WaitTimeoutError(
                "drill.not_whole",
                f"the pod was not ready for a failover within {deadline_s:g} s: it is "
                f"{view['state']}, {missing}",
            )
        if clock.now_ms() - said_ms > WHOLE_SAID_EVERY_S * 1000:
            said_ms = clock.now_ms()
            say(f"waiting for a standby, {duration(said_ms - began_ms)}: {missing}")
        await asyncio.sleep(poll_s)


def whole_of(view: dict[str, Any]) -> Whole | None:
    """The pod of this view, if one engine is active, a standby is queued and requests can come in.
    None also if a document lacks what says so."""
    lock = (view["lockserver"].get("locks") or {}).get("active") or {}
    queued = {waiter.get("engine") for waiter in lock.get("waiters") or []}
    engines = [engine.get("engine") or {} for engine in view["engines"]]
    parked = [str(each.get("id")) for each in engines if each.get("state") == PARKED]
    ready = tuple(name for name in parked if name in queued)
    service, gateway = service_of(view), view["gateway"]
    is_serving = view["active"] is not None and view["token"] is not None and is_open(gateway)
    if is_serving and view["failover_ready"] and ready and service:
        return Whole(view["active"], view["token"], service, ready, gateway is None)
    return None


def service_of(view: dict[str, Any]) -> str:
    """The address that requests of the pod go to, as the lock server says; empty if it does not."""
    service = (view["lockserver"].get("service") or {}).get("active") or {}
    return str(service.get("address") or "")


async def kill_active(directory: Path, target: str, whole: Whole, observer: Observer) -> EngineKill:
    """Kill `target` of the active engine; returns right after the kill.

    Raises:
        UnderstudyError: the engine refused, or its supervisor must be stopped and is not visible
            here.
    """
    path = engine_sockets(directory)[whole.engine]
    status = await ask(path, engine_messages.CONTROL, engine_messages.StatusMsg())
    kill = EngineKill(target, whole.engine, whole.token, killed_ms=clock.now_ms())
    kill.incarnation = _engine_of(status).get("incarnation")
    kill.kept_blocks = int(kv_of(_document(status)).get("kept_blocks") or 0)
    observer.expect(kill, _old_tree(directory, target, status))
    await strike(path, target, status.pid, kill)
    return kill


async def announce(directory: str, kill: EngineKill) -> None:
    """Tell the gateway that this death is ours: three of them would end a user's stream, which was
    in all these engines. Where no gateway answers, nothing is announced."""
    death = ExpectDeathMsg(kill.engine, kill.old_token, model_of(kill.lock))
    with contextlib.suppress(UnderstudyError):
        await ask(gateway_socket(directory), GATEWAY_CONTROL, death, ANNOUNCED_S)


async def strike(path: str, target: str, supervisor: int, kill: EngineKill) -> None:
    """Announce the death of the engine with the control socket `path`, kill or stop `target`, and
    note when.

    Raises:
        UnderstudyError: as `kill_active`.
    """
    await announce(os.path.dirname(path), kill)
    if target == STOP + SUPERVISOR:
        # Not through its control socket: a process that hangs does not reply.
        with hold(supervisor, f"the supervisor of {kill.engine}") as pidfd:
            kill.killed_ms = clock.now_ms()
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        return
    try:
        answered = await ask(path, engine_messages.CONTROL, asked_of_engine(target))
    except UnreachableError as error:
        # The supervisor may die before it replies; the time of the request stands.
        if target != SUPERVISOR:
            raise UnderstudyError(
                "drill.kill_failed", f"{kill.engine} did not kill {target}: {error.message}"
            ) from error
    else:
        if isinstance(answered.message, engine_messages.KillingMsg):
            kill.killed_ms = answered.message.mono_ms


def _old_tree(directory: Path, target: str, status: Answered) -> OldTree:
    """What must be gone before the next grant: processes, or the witness that they hold where they
    are in another PID namespace."""
    if status.pid == 0:
        return OldTree.by_witness(directory, str(_engine_of(status).get("incarnation")))
    backend = backend_processes(status.pid)
    # A supervisor survives the death of its backend, but not its own.
    is_own = target.removeprefix(STOP) == SUPERVISOR
    return OldTree.of([status.pid, *backend] if is_own else backend)


def _engine_of(status: Answered) -> dict[str, Any]:
    return _document(status).get("engine") or {}


def _document(status: Answered) -> dict[str, Any]:
    return getattr(status.message, "document", None) or {}


def backend_processes(supervisor: int) -> list[int]:
    """The processes under an engine's supervisor, without helpers, which never open a device: the
    fence does not wait for them."""
    return [pid for pid in descendants(supervisor) if not _is_helper(pid)]


def _is_helper(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read().decode(errors="replace")
    except OSError:
        return False  # it has exited; its pidfd will show that
    return any(helper in line for helper in HELPERS)
