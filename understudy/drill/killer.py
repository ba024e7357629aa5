"""The victims of a drill: how each is found, dies, and is known to work again.

A victim is a name and its processes. `KINDS` has a row for each part that is not an engine: how its
main process is found, and what it lacks until it works again. A part dies with all its descendants,
which are held by pidfd before. A process of an engine dies through the engine's control socket:
that works across PID namespaces, and a rehearsed death does not count as a crash loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from engine import messages as engine_messages
from engine.supervisor.tree import HELPERS
from gateway.messages import CONTROL as GATEWAY_CONTROL
from gateway.messages import ExpectDeathMsg
from gms.client import messages as gms_messages
from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.models import model_at, model_of
from plumbing.pod.observers import Answered, ask
from plumbing.pod.paths import WEIGHTS, engine_sockets, gateway_socket, gms_socket
from plumbing.service import init
from plumbing.service.clock import SystemClock
from plumbing.service.procfs import descendants, parent
from plumbing.text import duration
from plumbing.wire.peer import is_gone
from understudy.drill.observer import Observer, OldTree
from understudy.drill.records import Kill
from understudy.drill.targets import (
    GATEWAY,
    GMS,
    GMS_COPY,
    GMS_KEEPER,
    GMS_SUPERVISOR,
    LOCKSERVER,
    POOL,
    STOP,
    SUPERVISOR,
    kill_request,
    process_of,
)
from understudy.status.gateway_view import is_open
from understudy.status.gather import (
    Pids,
    PodPart,
    gateway_part,
    gather,
    lockserver_part,
    pids_of,
    pool_part,
    status_of,
)
from understudy.status.memory_view import Document, devices
from understudy.status.view import PARKED

WHOLE_POLL_S = 0.05
WHOLE_DEADLINE_S = 300.0  # a relaunch takes seconds; with vLLM on 2 cores, minutes
ANNOUNCED_S = 2.0  # a gateway answers within milliseconds
SAID_EVERY_S = 10.0  # most waits are shorter; longer ones are explained
POLL_S = 0.01
BACK_DEADLINE_S = 90.0  # a container restarts within seconds; its runner may back off
COMMITTED = "committed"
FIRST = 1  # pid 1 ignores SIGKILL and SIGSTOP from its own namespace
# The programs of a model's memory servers, and how the devices of host copies are named.
VERBS = {GMS: "serve-device", GMS_COPY: "serve-device", GMS_KEEPER: "keep-copy"}
COPIES = "OFFLOAD-"

clock = SystemClock()
Say = Callable[[str], None]
T = TypeVar("T")


def say_nothing(line: str) -> None:
    pass


async def wait_for(
    look: Callable[[], Awaitable[T | str]],
    deadline_s: float,
    code: str,
    what: str,
    say: Say = say_nothing,
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
    say: Say = say_nothing,
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


def service_of(lockserver: Mapping[str, Any]) -> str:
    """The address for the pod's requests, from the lock server's status; empty if unknown."""
    service = (lockserver.get("service") or {}).get("active") or {}
    return str(service.get("address") or "")


def standing(view: Document) -> dict[str, str]:
    """What the death of a part must not change: each engine's incarnation, and who is active."""
    engines = [part["engine"] for part in view["engines"] if "error" not in part]
    found = {str(each.get("id")): str(each.get("incarnation")) for each in engines}
    return {**found, "the lock": f"{view['active']} under token {view['token']}"}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What has changed, as sentences."""
    now = {name: after.get(name, "unreachable") for name in before}
    return [
        f"{name} is now {now[name]} instead of {was}"
        for name, was in before.items()
        if now[name] != was
    ]


# ------------------------------------------------------------------ processes of engines


async def kill_engine(directory: Path, kill: Kill, observer: Observer) -> None:
    """Kill or stop the process `kill.target` of `kill.engine`; returns right after it.

    Raises:
        UnderstudyError: the engine refused, or its supervisor must be stopped and is not visible
            here.
    """
    path = engine_sockets(directory)[str(kill.engine)]
    status = await ask(path, engine_messages.CONTROL, engine_messages.StatusMsg())
    document = _document(status)
    running = observer.incarnation_of(str(kill.engine))
    # In a pool the last incarnation may have ended long ago, as the pool wanted.
    said = (document.get("engine") or {}).get("incarnation")
    kill.incarnation = running if kill.model else said
    kill.killed_ms = clock.now_ms()
    kill.kept_blocks = int(kv_of(document).get("kept_blocks") or 0)
    observer.expect(kill, _old_tree(directory, kill, status))
    await strike(path, status.pid, kill)


async def strike(path: str, supervisor: int, kill: Kill) -> None:
    """Announce the death of the engine with the control socket `path`, kill or stop the target, and
    note when.

    The gateway must know that this death is ours: three of them would end a user's stream, which
    was in all these engines. Where no gateway answers, nothing is announced.

    Raises:
        UnderstudyError: as `kill_engine`.
    """
    death = ExpectDeathMsg(str(kill.engine), kill.old_token, model_of(kill.lock))
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


def _old_tree(directory: Path, kill: Kill, status: Answered) -> OldTree:
    """What must be gone before the next grant: processes, or the witness that they hold where they
    are in another PID namespace."""
    if status.pid == 0:
        return OldTree.by_witness(directory, str(kill.incarnation))
    backend = backend_processes(status.pid)
    # A supervisor survives the death of its backend, but not its own.
    is_own = process_of(kill.target) == SUPERVISOR
    return OldTree.of([status.pid, *backend] if is_own else backend)


def _document(status: Answered) -> dict[str, Any]:
    return getattr(status.message, "document", None) or {}


def backend_processes(supervisor: int) -> list[int]:
    """The processes under an engine's supervisor, without helpers, which never open a device: the
    fence does not wait for them."""
    return [
        pid
        for pid in descendants(supervisor)
        if not any(helper in word for word in _words(pid) for helper in HELPERS)
    ]


def _words(pid: int) -> list[str]:
    """The command line of `pid`; nothing if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    return []


def kv_of(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The KV cache in an engine's status document."""
    return (status.get("backend") or {}).get("kv") or {}


async def note_adoption(directory: Path, kill: Kill) -> str:
    """Note with what the cache of the engine that took over began. Returns why with less than was
    there, if so."""
    path = engine_sockets(directory).get(str(kill.new_engine))
    if path is None:
        return ""
    status = await status_of(PodPart(str(kill.new_engine), path, engine_messages.CONTROL))
    kv = kv_of(status)
    if kv and (status.get("lock") or {}).get("token") == kill.new_token:
        kill.adopted_blocks = int(kv.get("adopted_blocks") or 0)
        if kill.adopted_blocks < kill.kept_blocks:
            return str(kv.get("note") or "")
    return ""


# ------------------------------------------------------------------ parts


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a part is looked for. `model`: whose memory server, in a pool."""

    pids: Pids
    model: str = ""

    @property
    def memory_supervisor(self) -> int | None:
        servers = list(self.pids.gms.values())
        return parent(servers[0]) if servers else None


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part that can be killed: the pidfds of its processes, its own first. `memory`: the devices'
    documents, as they must be again, `pid`: the killed server's own in them; `models`: whose
    servers must answer again."""

    target: str
    pidfds: tuple[int, ...]
    device: str = ""
    memory: tuple[Document, ...] = ()
    pid: int = 0
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KillableKind:
    """How to find a part's main process, and what it lacks until it works again."""

    find: Callable[[Scene], int | None]
    missing: Callable[[Path, HeldPart], Awaitable[str | None]]


async def find_part(
    directory: Path,
    target: str,
    stack: ExitStack,
    *,
    number: int = 0,
    model: str = "",
    models: tuple[str, ...] = (),
) -> HeldPart | None:
    """Find and hold a part until `stack` is closed. In a pool of `models`: the memory server of
    `model`; None: it does not run now. Without models: that of the device `number`, modulo their
    count.

    Raises:
        UnderstudyError: `drill.no_memory`, nothing is committed; `drill.not_here`.
    """
    view, pids = await gather(directory), await pids_of(directory)
    scene, found = Scene(pids, model), committed_devices(view)
    memory: tuple[Document, ...] = ()
    if target == GMS and not models:
        if not found:
            raise UnderstudyError("drill.no_memory", "no memory service has committed weights")
        memory = (list(found.values())[number % len(found)],)
        device, own = str(memory[0]["device_uuid"]), int(memory[0].get("pid") or 0)
        pid, what = pids.gms.get(device), f"the server of {device}"
    else:
        pid, what, own = KINDS[target].find(scene), target, 0
        if pid is None and models:
            return None
        device = place_served(pid or 0, target, model) if target in VERBS else ""
        if target == GMS_SUPERVISOR:
            memory, model = () if models else tuple(found.values()), ""
    held = [stack.enter_context(hold(each, what)) for each in (pid, *descendants(pid or 0))]
    is_of_all = target in (GMS_SUPERVISOR, GMS, GMS_COPY)
    whose = (models if is_of_all else (model,)) if models else ()
    return HeldPart(target, tuple(held), device, memory, own, whose)


async def kill_part(victim: HeldPart, kill: Kill) -> None:
    """SIGKILL, and wait until all its processes are gone.

    Raises:
        WaitTimeoutError: `drill.no_part`.
    """
    kill.device = victim.device
    kill.killed_ms = clock.now_ms()
    signal.pidfd_send_signal(victim.pidfds[0], signal.SIGKILL)

    async def look() -> str | None:
        return None if all(map(is_gone, victim.pidfds)) else "check their state with `ps`"

    what = f"processes of {victim.target} did not end"
    await wait_for(look, BACK_DEADLINE_S, "drill.no_part", what)
    kill.gone_ms = clock.now_ms()


async def wait_back(
    directory: Path, victim: HeldPart, kill: Kill, say: Say = say_nothing, stretch: float = 1.0
) -> None:
    """Wait until the part works again with all that it had; records when.

    Raises:
        WaitTimeoutError: `drill.no_recovery` of memory, `drill.no_part`.
    """

    async def look() -> str | None:
        return await KINDS[victim.target].missing(directory, victim)

    code = "drill.no_recovery" if victim.memory else "drill.no_part"
    what = f"{kill.victim} did not come back"
    await wait_for(look, BACK_DEADLINE_S * stretch, code, what, say)
    kill.back_ms = clock.now_ms()


async def _no_gateway(directory: Path, victim: HeldPart) -> str | None:
    gateway = await status_of(gateway_part(directory))
    return None if gateway.get("accepting") else str(gateway.get("error") or "it does not accept")


async def _no_lockserver(directory: Path, victim: HeldPart) -> str | None:
    return (await status_of(lockserver_part(directory))).get("error")


async def _no_pool(directory: Path, victim: HeldPart) -> str | None:
    pool = await status_of(pool_part(directory))
    if pool.get("gateways") and not pool.get("recovering"):
        return None
    return str(pool.get("error") or "it is recovering")


# ------------------------------------------------------------------ memory servers


def _server(target: str) -> Callable[[Scene], int | None]:
    """Finds the process of this kind that serves a model, on its first device."""

    def find(scene: Scene) -> int | None:
        for pid in descendants(scene.memory_supervisor or 0):
            if place_served(pid, target, scene.model):
                return pid
        return None

    return find


def place_served(pid: int, target: str, model: str) -> str:
    """What of `model` this process of the memory service serves, if it is a `target`; else ""."""
    words = _words(pid)
    flag = "--place" if "--place" in words else "--device"
    places = [value for name, value in pairwise(words) if name == flag]
    place = next((each for each in places if model_at(each) == model), "")
    is_kind = target == GMS_KEEPER or place.startswith(COPIES) is (target == GMS_COPY)
    return place if is_kind and VERBS[target] in words else ""


def committed_devices(view: Document) -> dict[str, Document]:
    """The devices with committed weights, by name."""
    found = [device for part in view["gms"] for device in devices(part)]
    return {str(each["device_uuid"]): each for each in found if each.get("state") == COMMITTED}


def _readers_of(device: Document) -> frozenset[str]:
    """The readers of the committed epoch, as `engine-0-… rank 1`."""
    return frozenset(
        f"{session.get('incarnation')} rank {session.get('rank')}"
        for session in device.get("sessions") or ()
        if session.get("epoch") == device.get("epoch")
    )


async def _no_memory(directory: Path, victim: HeldPart) -> str | None:
    for was in victim.memory:
        now = await _memory_status(directory, str(was["device_uuid"]), str(was["tag"]))
        if (missing := _changed_memory(was, now, victim.pid)) is not None:
            return missing
    pids = await pids_of(directory)
    if not pids.gms:
        return "no memory server answers"
    for model in victim.models:
        target = GMS if victim.target == GMS_SUPERVISOR else victim.target
        pid = KINDS[target].find(Scene(pids, model))
        if pid is None:
            return f"the {target} server of {model} does not run"
        if target != GMS_KEEPER:  # it has no socket
            place = place_served(pid, target, model)
            document = await _memory_status(directory, place, WEIGHTS)
            if "error" in document:
                return str(document["error"])
    return None


def _changed_memory(was: Document, now: Document, killed: int) -> str | None:
    """What a device's server does not have yet of what its predecessor, the process `killed`, had;
    0: the successor may have the same pid."""
    if "error" in now:
        return str(now["error"])
    if killed and now.get("pid") == killed:
        return f"the killed server (pid {killed}) still answers"
    if now.get("state") != COMMITTED or now.get("epoch") != was.get("epoch"):
        return f"it is {now.get('state')}, with the epoch {now.get('epoch')}"
    away = sorted(_readers_of(was) - _readers_of(now))
    return f"not attached: {', '.join(away)}" if away else None


async def _memory_status(directory: Path, place: str, tag: str) -> Document:
    path = gms_socket(str(directory), place, tag)
    return await status_of(PodPart(place, path, gms_messages.CATALOGUE))


KINDS: Mapping[str, KillableKind] = {
    LOCKSERVER: KillableKind(lambda scene: scene.pids.lockserver, _no_lockserver),
    POOL: KillableKind(lambda scene: scene.pids.pool, _no_pool),
    GATEWAY: KillableKind(lambda scene: scene.pids.gateway, _no_gateway),
    GMS_SUPERVISOR: KillableKind(lambda scene: scene.memory_supervisor, _no_memory),
    **{target: KillableKind(_server(target), _no_memory) for target in VERBS},
}


# ------------------------------------------------------------------ who may be killed


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
    return parent(pid) == FIRST and init.__file__ in _words(FIRST)
