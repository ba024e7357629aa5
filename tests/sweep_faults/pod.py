"""The pod that a sweep disturbs: the product's own runner, with every process under the shim.

Owns the parts by their roles, and the judgement of a pod: is it whole, and if not, does its status
name a problem? Must not know why a call fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from lockserver import messages as lock_messages
from plumbing.errors import UnderstudyError
from plumbing.pod.observers import PeerWatch, ask
from plumbing.pod.paths import engine_sockets, lockserver_socket
from plumbing.service.procfs import children
from tests.sweep_faults.shim import Control, SweepError
from understudy.drill.clients import Target, send
from understudy.drill.outcomes import classify
from understudy.drill.prompts import all_prompts, learn_answers
from understudy.drill.records import Exchange, Outcome, Prompt
from understudy.drill.targets import kill_request
from understudy.http_get import get
from understudy.pod.ports import Ports, free_pod_ports
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.status.gather import gather
from understudy.status.view import PARKED
from understudy.up.models import ONE_THREAD

Document = Mapping[str, Any]

POLL_S = 0.1
WHOLE_S = 60.0  # a start on a busy machine
SILENCE_S = 10.0  # of a request; a whole pod answers in milliseconds
VISIT_S = 1.0  # to listen for events
SWITCHOVER_MS = 30_000
PAGES = ("live", "ready", "startup", "status", "metrics", "events")
# A sweep kills more often than anything else does; what it looks for is not back-off.
BACK_S = 0.5
NO_CRASH_LOOP = {"UNDERSTUDY_DEATHS_MAX": "1000"}  # one case after the other in the same engine

# The beginnings of sentences that say that the pod is not whole, and not why.
SAYS_NOT_WHY = ("no standby: ", "lock active is ")

# Parts of each process's command line, after the id of its engine (`-`: of none).
PROGRAMS = {
    "lockserver": ("- /", "bin/lockserver serve"),
    "gms": ("- /", "bin/gms serve"),
    "gms-server": ("- /", "gms.cli serve-device"),
}
ENGINE_PROGRAMS = {
    "supervisor": ("bin/engine run",),
    "model": ("backends.reference.main",),
}
ROLES = (
    *PROGRAMS,
    *(f"{which}-{name}" for which in ("active", "standby") for name in ENGINE_PROGRAMS),
)


@dataclass(frozen=True, slots=True)
class Standing:
    """A whole pod: who is active, who is in standby, and which processes and launches these are."""

    active: str
    standby: str
    token: int
    lives: Mapping[str, object]  # of each part: what changes if it is started again

    def program(self, role: str) -> tuple[str, ...]:
        """The parts of the command line of `role`."""
        which, _, name = role.partition("-")
        if which in ("active", "standby"):
            engine = self.active if which == "active" else self.standby
            return (f"{engine} /", *ENGINE_PROGRAMS[name])
        return PROGRAMS[role]

    def role(self, process: str) -> str | None:
        """The role of a process, by its engine and command line."""
        for role in ROLES:
            first, *parts = self.program(role)
            if process.startswith(first) and all(part in process for part in parts):
                return role
        return None


@dataclass
class Look:
    """One look at the pod. `missing`: why it is not whole; `named`: the problems that it names."""

    view: Document
    standing: Standing | None = None
    missing: str = ""
    named: list[str] = field(default_factory=list)


class SweptPod:
    """A running pod of two engines on the reference backend."""

    def __init__(self, directory: Path, model: Path, control: Control) -> None:
        self.directory = directory
        self.ports: Ports = free_pod_ports()
        directory.mkdir(mode=0o700)
        env = {**ONE_THREAD, **NO_CRASH_LOOP, **control.environment}
        local = LocalPod(directory, model, self.ports, env=env)
        # Calls fail in our programs; an init would be one of those that cannot be replaced.
        containers = [replace(each, init=(), pause_s=BACK_S) for each in local.containers()]
        self.runner = PodRunner(containers, directory / "log")
        self._target = Target("127.0.0.1", self.ports.service)
        self._prompts: list[Prompt] = []
        self._answers: dict[str, Exchange] = {}
        self.wrong: list[str] = []  # answers that no fault may cause

    async def start(self) -> Standing:
        """Start it, and learn its answers."""
        await self.runner.start()
        standing = await self.whole(WHOLE_S)
        model = (await get(f"http://127.0.0.1:{self.ports.service}/v1/models")).json()
        prompts = all_prompts(model["data"][0]["id"])[:2]
        self._prompts, self._answers = await learn_answers(self._target, prompts)
        return standing

    async def stop(self) -> None:
        """End all of it, without the patience of an operator."""
        self.runner.kill()
        await self.runner.stop()

    # ------------------------------------------------------------------ is it whole

    async def look(self) -> Look:
        """Ask every part."""
        view = await gather(self.directory)
        lock = (view["lockserver"].get("locks") or {}).get("active") or {}
        queued = {waiter.get("engine") for waiter in lock.get("waiters") or []}
        states = {part["engine"]["id"]: part["engine"]["state"] for part in _answering(view)}
        standbys = [name for name, state in states.items() if state == PARKED and name in queued]
        look = Look(view, named=_named(view))
        if self.runner.not_up():
            look.missing = f"not up: {', '.join(self.runner.not_up())}"
        elif view["state"] != "healthy" or not view["failover_ready"]:
            look.missing = "; ".join([view["state"], *view["problems"], *_in_between(view)])
        elif not standbys or view["active"] is None:
            look.missing = f"{states}, queued: {sorted(map(str, queued))}"
        elif missing := _kv_missing(view):
            look.missing = missing
        else:
            look.standing = Standing(view["active"], standbys[0], view["token"], self._lives(view))
        return look

    def _lives(self, view: Document) -> dict[str, object]:
        engines = [part["engine"] for part in _answering(view)]
        return {
            **self.runner.pids(),
            **{each["id"]: each["incarnation"] for each in engines},
            **{supervisor_of(each["id"]): each["pid"] for each in engines},
            "gms-server": [part.get("pid") for part in view["gms"]],
            "token": view["token"],
        }

    async def whole(self, deadline_s: float) -> Standing:
        """Wait until it is whole.

        Raises:
            SweepError: with what is missing.
        """
        look = await self.until_whole(deadline_s)
        if look.standing is None:
            raise SweepError(f"the pod was not whole within {deadline_s:g} s: {look.missing}")
        return look.standing

    async def until_whole(
        self,
        deadline_s: float,
        is_new: Callable[[Standing], bool] = lambda standing: True,
    ) -> Look:
        """The first look at which it is whole and `is_new`, or else the last one in time."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + deadline_s
        while True:
            look = await self.look()
            if look.standing is not None and not is_new(look.standing):
                look.standing, look.missing = None, "nothing has changed yet"
            if look.standing is not None:
                look.missing = await self.answers(look.standing)
                if not look.missing:
                    return look
                look.standing = None
            if loop.time() > end_s:
                return look
            await asyncio.sleep(POLL_S)

    async def answers(self, standing: Standing) -> str:
        """Send a request; the reason why it was not answered as it must be, or nothing."""
        prompt = self._prompts[0] if self._prompts else None
        if prompt is None:
            return ""
        exchange = await send(self._target, prompt, SILENCE_S)
        outcome = classify(exchange, self._answers)
        if outcome is Outcome.OK and exchange.token == standing.token:
            return ""
        said = f"a request under token {exchange.token}: {outcome.value} {exchange.detail}"
        if outcome is Outcome.WRONG:
            self.wrong.append(said)
        return said

    # ------------------------------------------------------------------ what happens to it

    async def kill_model(self, engine: str) -> None:
        """Through its control socket: such a death counts for no crash loop. The call that fails
        may be one that the supervisor makes for this request, which is sent once more then."""
        path = engine_sockets(self.directory).get(engine, "")
        try:
            await ask(path, engine_messages.CONTROL, kill_request("backend-model"))
        except UnderstudyError:
            await ask(path, engine_messages.CONTROL, kill_request("backend-model"))

    async def switch_over(self) -> None:
        """The call that fails may cost the pod its standby for a while."""
        path = lockserver_socket(str(self.directory))
        order = lock_messages.SwitchOverMsg("active", None, SWITCHOVER_MS)
        try:
            await ask(path, lock_messages.CATALOGUE, order, SWITCHOVER_MS / 1000)
        except UnderstudyError:
            await self.until_whole(WHOLE_S)
            await ask(path, lock_messages.CATALOGUE, order, SWITCHOVER_MS / 1000)

    def kill_container(self, name: str) -> None:
        self.kill(self.runner.pids()[name])

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def gms_server(self) -> int:
        """The process of the only device's server."""
        _, words = PROGRAMS["gms-server"]
        for pid in children(self.runner.pids()["gms"]):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if words in command:
                return pid
        raise SweepError("gms has no server")

    async def visit(self) -> None:
        """Ask for everything that can be asked for, once."""
        ports = (self.ports.lockserver, self.ports.gms, *self.ports.engines)
        pages = [f"http://127.0.0.1:{port}/{page}" for port in ports for page in PAGES]
        await asyncio.gather(*map(get, pages), self._watch())
        await asyncio.gather(*(send(self._target, each, SILENCE_S) for each in self._prompts))

    async def _watch(self) -> None:
        path = lockserver_socket(str(self.directory))
        heard = asyncio.Event()
        watch = PeerWatch(
            path, lock_messages.CATALOGUE, lock_messages.WatchMsg(), lambda message: heard.set()
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(heard.wait(), VISIT_S)
        await watch.close()


def _answering(view: Document) -> list[Document]:
    return [part for part in view["engines"] if part.get("engine")]


def _in_between(view: Document) -> list[str]:
    """The engines that are neither active nor in standby."""
    engines = [part["engine"] for part in _answering(view)]
    return [
        f"{each['id']} is in {each['state']}: {each.get('reason')}"
        for each in engines
        if each["state"] not in ("active", PARKED)
    ]


def _kv_servers(view: Document) -> list[Document]:
    return [part.get("kv") or {} for part in view["gms"]]


def _kv_of_active(view: Document) -> Document:
    """What the active engine says of its KV memory."""
    active = [each for each in _answering(view) if each["engine"]["id"] == view["active"]]
    return (active[0]["backend"].get("kv") if active else None) or {}


def _kv_missing(view: Document) -> str:
    """Why a KV server is not whole: it does not answer, or has not got back what is mapped."""
    is_lent = _kv_of_active(view).get("memory") == "gms"
    for kv in _kv_servers(view):
        holder = (kv.get("holder") or {}).get("engine")
        if "pid" not in kv:
            return f"no KV server: {kv.get('reason')}"
        if is_lent and (kv["state"], holder) != ("lent", view["active"]):
            return f"the KV memory is {kv['state']}, its last holder {holder}"
    return ""


def _named(view: Document) -> list[str]:
    """Every problem that status names, without what says only that the pod is not whole."""
    found = [each for each in view["problems"] if not each.startswith(SAYS_NOT_WHY)]
    for part in (view["lockserver"], *view["gms"], *_answering(view)):
        found += part.get("problems") or []
    for kv in _kv_servers(view):
        found += [text for text in (kv.get("reason"), kv.get("problem")) if text]
        found += [f"{each['engine']} waits: {each['message']}" for each in kv.get("waiting") or ()]
    for part in _answering(view):
        engine = part["engine"]
        if engine["state"] == "dead":
            found.append(f"{engine['id']} is dead: {engine.get('reason')}")
    return list(dict.fromkeys(map(str, found)))


def supervisor_of(engine: str) -> str:
    """The name of its supervisor among the parts."""
    return f"the supervisor of {engine}"
