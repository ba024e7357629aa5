"""The victims of a drill: how each is found, dies, and is known to work again.

A victim is a name and its processes. A part that is not an engine dies with all its descendants,
which are held by pidfd before. A process of an engine dies through the engine's control socket:
that works across PID namespaces, and a rehearsed death does not count as a crash loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from engine import messages as engine_messages
from engine.supervisor.tree import HELPERS
from gateway.messages import CONTROL as GATEWAY_CONTROL
from gateway.messages import ExpectDeathMsg
from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.observers import ask
from plumbing.pod.paths import engine_sockets, gateway_socket
from plumbing.service import init
from plumbing.service.clock import SystemClock
from plumbing.service.procfs import descendants, parent
from plumbing.text import duration
from plumbing.wire.peer import is_gone
from understudy.drill.observer import Observer, OldTree
from understudy.drill.records import Kill
from understudy.drill.targets import (
    GATEWAY,
    GMS_SUPERVISOR,
    LOCKSERVER,
    POD,
    POOL,
    STOP,
    SUPERVISOR,
    kill_request,
    process_of,
)
from understudy.host import read
from understudy.status.gather import (
    SINGLE,
    PodPart,
    gather,
    memory_parts,
    part_of,
    pids_of,
    status_of,
)
from understudy.status.view import PARKED, is_open, memory_faults

WHOLE_POLL_S = 0.05
WHOLE_DEADLINE_S = 300.0  # a relaunch takes seconds; with vLLM on 2 cores, minutes
ANNOUNCED_S = 2.0  # a gateway answers within milliseconds
SAID_EVERY_S = 10.0  # most waits are shorter; longer ones are explained
POLL_S = 0.01
BACK_DEADLINE_S = 90.0  # a container restarts within seconds; its runner may back off
FIRST = 1  # pid 1 ignores SIGKILL and SIGSTOP from its own namespace
COPIES = "OFFLOAD-"  # the places of host copies, which a server of their own serves

clock = SystemClock()
Say = Callable[[str], None]
T = TypeVar("T")


async def wait_for(
    look: Callable[[], Awaitable[T | str]],
    deadline_s: float,
    code: str,
    what: str,
    say: Say = lambda line: None,
    poll_s: float = POLL_S,
) -> T:
    """Poll until `look` returns something else than the reason why to wait on.

    Raises:
        WaitTimeoutError: `code`, with `what` was not so in time, and the last reason.
    """
    began_ms = said_ms = clock.now_ms()
    while True:
        found = await look()
        if not isinstance(found, str):
            return found
        now_ms = clock.now_ms()
        if now_ms > began_ms + deadline_s * 1000:
            raise WaitTimeoutError(code, f"{what} within {deadline_s:g} s: {found}")
        if now_ms > said_ms + SAID_EVERY_S * 1000:
            said_ms = now_ms
            say(f"waiting, {duration(now_ms - began_ms)}: {found}")
        await asyncio.sleep(poll_s)


# ------------------------------------------------------------------ a pod that is ready


@dataclass(frozen=True, slots=True)
class Whole:
    """A pod with redundancy: the active engine, its token and address, and the standbys."""

    engine: str
    token: int
    service: str
    standbys: tuple[str, ...]


async def wait_whole(
    directory: Path,
    say: Say = lambda line: None,
    deadline_s: float = WHOLE_DEADLINE_S,
    poll_s: float = WHOLE_POLL_S,
) -> Whole:
    """Poll until one engine is active, a standby is queued and requests can come in; `say` reports
    what is missing.

    Raises:
        WaitTimeoutError: `drill.not_whole`, with what is missing.
    """

    async def look() -> Whole | str:
        view = await gather(directory)
        missing = "; ".join(view["problems"]) or "no standby is queued for the lock"
        return whole_of(view) or f"it is {view['state']}, {missing}"

    what = "the pod was not ready for a failover"
    return await wait_for(look, deadline_s, "drill.not_whole", what, say, poll_s)


def whole_of(view: dict[str, Any]) -> Whole | None:
    """The pod of this view; None unless it is ready for a failover, or if facts are missing."""
    lock = (view["lockserver"].get("locks") or {}).get("active") or {}
    queued = {waiter.get("engine") for waiter in lock.get("waiters") or []}
    engines = [engine.get("engine") or {} for engine in view["engines"]]
    parked = [str(each.get("id")) for each in engines if each.get("state") == PARKED]
    ready = tuple(name for name in parked if name in queued)
    service, gateway = service_of(view["lockserver"]), view["gateway"]
    is_serving = view["active"] is not None and view["token"] is not None and is_open(gateway)
    if is_serving and view["failover_ready"] and ready and service:
        return Whole(view["active"], view["token"], service, ready)
    return None


def service_of(document: Mapping[str, Any]) -> str:
    """The address for requests, from the status of the lock server or of a front; empty if
    unknown."""
    service = document.get("service") or {}
    return str((service.get("active") or service).get("address") or "")


# ------------------------------------------------------------------ processes of engines


async def kill_engine(directory: Path, kill: Kill, observer: Observer) -> None:
    """Kill or stop the process `kill.target` of `kill.engine`; returns right after it.

    Raises:
        UnderstudyError: the engine refused, or its supervisor must be stopped and is not visible
            here.
    """
    path = engine_sockets(directory)[str(kill.engine)]
    status = await ask(path, engine_messages.CONTROL, engine_messages.StatusMsg())
    document = getattr(status.message, "document", None) or {}
    running = observer.incarnation_of(str(kill.engine))
    # In a pool the last incarnation may have ended long ago, as the pool wanted.
    said = (document.get("engine") or {}).get("incarnation")
    kill.incarnation = running if kill.model else said
    kill.killed_ms = clock.now_ms()
    kill.kept_blocks = int(_kv_of(document).get("kept_blocks") or 0)
    if status.pid == 0:  # in another PID namespace: the witness that its processes hold must do
        tree = OldTree.by_witness(directory, kill.incarnation)
    else:
        # A supervisor survives the death of its backend, but not its own.
        own = [status.pid] if process_of(kill.target) == SUPERVISOR else []
        tree = OldTree.of([*own, *backend_processes(status.pid)])
    observer.expect(kill, tree)
    await strike(path, status.pid, kill)


async def strike(path: str, supervisor: int, kill: Kill) -> None:
    """Announce the death of the engine with the control socket `path`, kill or stop the target, and
    note when.

    The gateway must know that this death is ours: three of them would end a user's stream, which
    was in all these engines. Where no gateway answers, nothing is announced.

    Raises:
        UnderstudyError: as `kill_engine`.
    """
    death = ExpectDeathMsg(str(kill.engine), kill.old_token, kill.model)
    with contextlib.suppress(UnderstudyError):
        await ask(gateway_socket(os.path.dirname(path)), GATEWAY_CONTROL, death, ANNOUNCED_S)
    process = process_of(kill.target)
    if process == SUPERVISOR and STOP in kill.target:
        # Not through its control socket: a process that hangs does not reply.
        with hold(supervisor, f"the supervisor of {kill.engine}") as pidfd:
            kill.killed_ms = clock.now_ms()
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        return
    try:
        answered = await ask(path, engine_messages.CONTROL, kill_request(kill.target))
    except UnreachableError as error:
        # The supervisor may die before it replies; the time of the request stands.
        if process != SUPERVISOR:
            raise UnderstudyError(
                "drill.kill_failed", f"{kill.engine} did not kill {kill.target}: {error.message}"
            ) from error
    else:
        if isinstance(answered.message, engine_messages.KillingMsg):
            kill.killed_ms = answered.message.mono_ms


def backend_processes(supervisor: int) -> list[int]:
    """The processes under an engine's supervisor, without helpers, which never open a device: the
    fence does not wait for them."""
    return [
        pid
        for pid in descendants(supervisor)
        if not any(helper in read(f"/proc/{pid}/cmdline") for helper in HELPERS)
    ]


def _kv_of(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The KV cache in an engine's status document."""
    return (status.get("backend") or {}).get("kv") or {}


async def note_adoption(directory: Path, kill: Kill) -> str:
    """Note with what the cache of the engine that took over began. Returns why with less than was
    there, if so."""
    path = engine_sockets(directory).get(str(kill.new_engine))
    if path is None:
        return ""
    status = await status_of(PodPart(str(kill.new_engine), path, engine_messages.CONTROL))
    kv = _kv_of(status)
    if kv and (status.get("lock") or {}).get("token") == kill.new_token:
        kill.adopted_blocks = int(kv.get("adopted_blocks") or 0)
        if kill.adopted_blocks < kill.kept_blocks:
            return str(kv.get("note") or "")
    return ""


# ------------------------------------------------------------------ parts


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part that can be killed: the pidfds of its processes, its own first. `device`: one of those
    of a memory server; `epochs`: the committed ones that must survive it."""

    target: str
    pidfds: tuple[int, ...]
    device: str = ""
    epochs: frozenset[tuple[str, str]] = frozenset()


async def find_part(
    directory: Path, target: str, stack: ExitStack, *, number: int = 0, is_pool: bool = False
) -> HeldPart:
    """Find a part, and hold it until `stack` is closed: of memory servers that with this number,
    modulo their count.

    Raises:
        UnderstudyError: `drill.not_here`.
    """
    device, pid = "", None
    if target in SINGLE:
        pid = (await pids_of([part_of(directory, target)])).get(target)
    else:
        places = (await pids_of(memory_parts(directory))).items()
        servers = {pid: place for place, pid in places if not place.startswith(COPIES)}
        if servers:
            pid, device = [*servers.items()][number % len(servers)]
        if target == GMS_SUPERVISOR:
            pid, device = parent(pid or 0), ""
    held = [stack.enter_context(hold(each, target)) for each in (pid, *descendants(pid or 0))]
    epochs = frozenset[tuple[str, str]]()
    if target not in SINGLE and not is_pool:  # there, models come and go
        epochs = epochs_of((await gather(directory))["gms"])
    return HeldPart(target, tuple(held), device, epochs)


def epochs_of(devices: Iterable[Mapping[str, Any]]) -> frozenset[tuple[str, str]]:
    """The committed epochs, each by its device."""
    committed = (each for each in devices if each.get("state") == "committed")
    return frozenset((str(each["device_uuid"]), str(each.get("epoch"))) for each in committed)


async def kill_part(victim: HeldPart, kill: Kill) -> None:
    """SIGKILL, of a whole pod to each process, and wait until all its processes are gone.

    Raises:
        WaitTimeoutError: `drill.no_part`.
    """
    kill.device = victim.device
    kill.killed_ms = clock.now_ms()
    signal_all(victim.pidfds if victim.target == POD else victim.pidfds[:1], signal.SIGKILL)

    async def look() -> str | None:
        return None if all(map(is_gone, victim.pidfds)) else "check their state with `ps`"

    what = f"processes of {victim.target} did not end"
    await wait_for(look, BACK_DEADLINE_S, "drill.no_part", what)
    kill.gone_ms = clock.now_ms()


def signal_all(pidfds: Iterable[int], number: int) -> None:
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):  # it died of the one before
            signal.pidfd_send_signal(pidfd, number)


async def wait_back(
    directory: Path, victim: HeldPart, kill: Kill, say: Say = lambda line: None
) -> None:
    """Wait until the part works again with all that it had; records when.

    Raises:
        WaitTimeoutError: `drill.no_part`.
    """
    look = partial(missing_of, directory, victim)
    what = f"{kill.victim} did not come back"
    await wait_for(look, BACK_DEADLINE_S, "drill.no_part", what, say)
    kill.back_ms = clock.now_ms()


async def missing_of(directory: Path, victim: HeldPart) -> str | None:
    """What a killed part, all of whose processes are gone, lacks until it works again."""
    if victim.target in SINGLE:
        said = await status_of(part_of(directory, victim.target))
        is_back = {
            LOCKSERVER: "error" not in said,
            GATEWAY: said.get("accepting"),
            POOL: said.get("gateways") and not said.get("recovering"),
        }
        return None if is_back[victim.target] else str(said.get("error") or "it is not ready")
    devices = (await gather(directory))["gms"]
    faults = [fault for each in devices for fault in memory_faults(each, {})]
    faults += [f"the epoch of {place} is lost" for place, _ in victim.epochs - epochs_of(devices)]
    return next(iter(faults), None)


# ------------------------------------------------------------------ who may be killed


@contextmanager
def hold(pid: int | None, what: str) -> Iterator[int]:
    """A pidfd of `pid`, a process that has just answered.

    Raises:
        UnderstudyError: `drill.not_here`, it is not visible here, or cannot be signalled.
    """
    reason = "it is pid 1 here" if pid == FIRST else "its process is not visible"
    # What our init, pid 1 of this very namespace, keeps running.
    if pid and parent(pid) == FIRST and init.__file__ in read(f"/proc/{FIRST}/cmdline"):
        pid, reason = 0, "its init ends everything in this container with it, this drill too"
    try:
        pidfd = os.pidfd_open(0 if not pid or pid == FIRST else pid)  # there is no process 0
    except OSError as error:
        raise UnderstudyError(
            "drill.not_here",
            f"{what} cannot be killed from here: {reason}; run the drill in the node's PID "
            "namespace",
        ) from error
    try:
        yield pidfd
    finally:
        os.close(pidfd)
