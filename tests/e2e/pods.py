"""A pod of real processes for tests: the product's own runner, clients and verdict.

Owns what several tests share: one pod (starting one takes seconds), its processes by pid, and
clients that stream requests to it. Every load is judged when it ends: a wrong token or a hung
request fails the test, whatever else it checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockserver.client import messages as lock_messages
from plumbing.pod.observers import PeerWatch
from plumbing.pod.paths import LOCKSERVER_SOCKET
from plumbing.service.procfs import children, descendants, is_spent
from plumbing.wire.messages import Message
from tests.e2e.processes import Processes, continue_all
from tests.helpers import POLL_S, auntil, on_loop_of, until
from understudy.drill.clients import Target, stream_without_pause
from understudy.drill.killer import WHOLE_POLL_S, Whole, backend_processes, wait_whole
from understudy.drill.outcomes import classify
from understudy.drill.records import End, Exchange, Outcome
from understudy.drill.run import Drill, DrillPlan
from understudy.pod.ports import free_pod_ports
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.status.gather import engine_parts, gather, memory_parts, part_of, status_of
from understudy.up.models import ONE_THREAD, make_random_model

WHOLE_DEADLINE_S = 60.0
GRACE_S = 20.0  # a failing test must not wait the forty seconds that users' requests get
CLIENTS = 3
ANSWERS_S = 120.0  # vLLM's kernels may be interpreted, on a busy machine
# Of the deadline: whoever takes minutes to start is asked less often, since every look at a whole
# pod takes time from what it waits for.
POLL_SHARE = 1 / 1200

# The pod runs as users run it: Python's development mode would cost it memory and time.
AS_USERS_RUN_IT = {**ONE_THREAD, "PYTHONDEVMODE": "", "PYTHONWARNINGS": ""}
ENVIRONMENT = {**os.environ, **AS_USERS_RUN_IT}
BIN = Path(sys.executable).parent
UNDERSTUDY = str(BIN / "understudy")


class Pod:
    """A running pod; everything here is about processes that this object has started."""

    def __init__(
        self,
        local: LocalPod,
        whole_deadline_s: float = WHOLE_DEADLINE_S,
        *,
        starts_in_order: bool = True,
        has_inits: bool = False,
    ) -> None:
        """`starts_in_order`: engine-0 is up, and active, before engine-1 starts. `has_inits`: as
        users run it. Without inits, processes that a test stops stay."""
        self.local = local
        self._whole_deadline_s = whole_deadline_s
        self._whole_poll_s = max(WHOLE_POLL_S, whole_deadline_s * POLL_SHARE)
        self.directory = local.directory
        containers = [
            replace(each, grace_s=GRACE_S, starts_in_order=starts_in_order)
            for each in local.containers()
        ]
        if not has_inits:
            containers = [replace(each, init=()) for each in containers]
        self.runner = PodRunner(containers, self.directory / "log")
        self._drill = Drill(self.directory, DrillPlan(), lambda line: None)
        self._target: Target | None = None

    async def start(self) -> None:
        await self.runner.start()
        await self.whole()
        self._target = await self._drill.prepare()

    # ------------------------------------------------------------------ reading its state

    async def whole(self) -> Whole:
        """Wait until one engine serves and another is parked in the queue."""
        return await wait_whole(
            self.directory, deadline_s=self._whole_deadline_s, poll_s=self._whole_poll_s
        )

    async def whole_after(self, token: int) -> Whole:
        """Wait until the pod is complete again under a newer grant than `token`."""
        async with asyncio.timeout(self._whole_deadline_s):
            whole = await self.whole()
            while whole.token <= token:
                whole = await self.whole()
        return whole

    # Each asks only the part that it is about: another one may be stopped, and the whole view waits
    # seconds for that.

    async def view(self) -> dict[str, Any]:
        return await gather(self.directory)

    async def engine(self, name: str) -> Mapping[str, Any]:
        """The engine's status document; without its keys while it does not answer."""
        found = [part for part in engine_parts(self.directory) if part.name == name]
        return await status_of(found[0]) if found else {}

    async def lock(self) -> Mapping[str, Any]:
        """The status of `active` from the lock server; {} while it does not answer."""
        document = await status_of(part_of(self.directory, "lockserver"))
        return document.get("locks", {}).get("active", {})

    def pid(self, container: str) -> int:
        return self.runner.pids()[container]

    def tree(self, container: str) -> list[int]:
        """The container's first process and everything under it."""
        pid = self.pid(container)
        return [pid, *descendants(pid)]

    async def engines(self) -> list[dict[str, Any]]:
        """Every engine's document, once all answer; one that a test added left a socket."""
        async with asyncio.timeout(self._whole_deadline_s):
            while True:
                parts = (await self.view())["engines"]
                found = [part["engine"] for part in parts if part.get("engine")]
                if len(found) >= len(self.local.ports.engines):
                    return found

    async def incarnations(self) -> list[str]:
        return [each["incarnation"] for each in await self.engines()]

    async def engine_tree(self, name: str) -> list[int]:
        """The backend's processes, registered or not, of the engine `name`."""
        return backend_processes((await self.engine(name))["engine"]["pid"])

    def gms_server(self) -> int:
        """The process that serves the weights of the only device."""
        below = children(self.pid("gms"))
        (weights,) = [pid for pid in below if b"serve-device" in _command_line(pid)]
        return weights

    async def memory(self, device: str = "HOST-0") -> Mapping[str, Any]:
        """The status of the server of `device`; {} while it does not answer."""
        parts = [part for part in memory_parts(self.directory) if part.name == device]
        document = await status_of(parts[0]) if parts else {}
        return document if "device_uuid" in document else {}

    async def recovered(self, old: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait until another server has what the one in the status `old` had, readers included."""
        async with asyncio.timeout(self._whole_deadline_s):
            while True:
                new = await self.memory(old["device_uuid"])
                is_back = new.get("epoch") == old["epoch"] and new["pid"] != old["pid"]
                if is_back and _readers(new) == _readers(old):
                    return new
                await asyncio.sleep(POLL_S)

    def processes(self) -> list[int]:
        """Every process of the pod."""
        return [pid for container in self.runner.pids() for pid in self.tree(container)]

    async def restarted(self, container: str, before: int) -> None:
        """Wait until the runner has started `container` once more than `before` times."""

        def is_back() -> bool:
            is_counted = self.runner.restarts()[container] == before + 1
            return is_counted and container in self.runner.pids()

        await auntil(is_back, f"the restart of {container}")

    # ------------------------------------------------------------------ using it

    def grants(self, old: Processes) -> AbstractAsyncContextManager[Grants]:
        """Listen to the lock server; at each grant, check which processes of `old` are alive."""
        return grants_in(self.directory, old)

    def load(self, clients: int = CLIENTS) -> AbstractAsyncContextManager[Load]:
        """Clients that stream without pause until the block ends, and are judged then."""
        assert self._target is not None
        return load_on(self._target, self._drill, clients)


@asynccontextmanager
async def grants_in(directory: Path, old: Processes) -> AsyncIterator[Grants]:
    """Listen to the lock server in `directory`; at each grant, check which processes of `old` are
    alive."""
    grants = Grants(old)
    path = str(directory / LOCKSERVER_SOCKET)
    watch = PeerWatch(path, lock_messages.CATALOGUE, lock_messages.WatchMsg(), grants.heard)
    try:
        await auntil(lambda: grants.is_listening, "the lock server to take an observer")
        yield grants
    finally:
        await watch.close()


@asynccontextmanager
async def load_on(target: Target, drill: Drill, clients: int = CLIENTS) -> AsyncIterator[Load]:
    """Clients that send `target` the requests `drill` has learnt, until the block ends; judged
    then."""
    load = Load(drill.records.expected)
    stopping = asyncio.Event()
    tasks = [
        asyncio.create_task(
            stream_without_pause(target, drill.prompts, number, load.exchanges.append, stopping)
        )
        for number in range(clients)
    ]
    try:
        yield load
        stopping.set()
        await asyncio.gather(*tasks)
        load.check()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Load:
    """The results of the clients of one load so far."""

    def __init__(self, expected: dict[str, Exchange]) -> None:
        self.exchanges: list[Exchange] = []
        self._expected = expected

    def of(self, *outcomes: Outcome) -> list[Exchange]:
        return [each for each in self.exchanges if classify(each, self._expected) in outcomes]

    async def answers(self, count: int = 12) -> None:
        """Wait until this many more requests have been answered in full."""
        goal, what = len(self.of(Outcome.OK)) + count, f"{count} more answers"
        await auntil(lambda: len(self.of(Outcome.OK)) >= goal, what, ANSWERS_S)

    async def newer(self, token: int) -> int:
        """Wait until a request was answered under a newer grant than `token`; returns that
        grant."""

        def newest() -> int:
            return max((each or 0 for each in self.tokens()), default=0)

        await auntil(lambda: newest() > token, f"an answer under more than {token}")
        return newest()

    def tokens(self) -> set[int | None]:
        """The grants under which any request was answered."""
        return {each.token for each in self.exchanges if each.chunks}

    def refused(self) -> list[Exchange]:
        """Connections that the kernel refused, and requests that were told to retry later."""
        return self.of(Outcome.REFUSED)

    def connections_refused(self) -> list[Exchange]:
        return [each for each in self.exchanges if each.end is End.REFUSED]

    def lost(self) -> list[Exchange]:
        return self.of(Outcome.LOST, Outcome.BROKEN)

    def lost_nothing(self, *tokens: int) -> None:
        """Nothing was lost or refused so far, and the answers came under each of these grants, if
        any is given, and no other."""
        failed = [*self.lost(), *self.refused()]
        assert not failed, failed
        assert not tokens or self.tokens() == {*tokens}, self.tokens()

    def check(self) -> None:
        """What no fault may ever cause."""
        assert not self.of(Outcome.WRONG, Outcome.HUNG)


@dataclass(frozen=True, slots=True)
class Grant:
    """A grant of `active`, and the old holder's processes that were alive when it was received."""

    engine: str
    token: int
    alive: frozenset[int]


class Grants:
    """Every grant of `active` that the lock server makes, in order.

    A holder that is confirmed after a restart is reported again, under the same token: that is no
    grant.
    """

    def __init__(self, old: Processes) -> None:
        self.made: list[Grant] = []
        self._newest: int | None = None
        self._old = old

    @property
    def is_listening(self) -> bool:
        return self._newest is not None

    def heard(self, message: Message) -> None:
        if isinstance(message, lock_messages.StatusReplyMsg) and self._newest is None:
            self._newest = message.document["token"]
        elif isinstance(message, lock_messages.GrantedMsg) and message.lock == "active":
            assert self._newest is not None  # an observer is sent the state before any event
            if message.token > self._newest:
                self._newest = message.token
                alive = frozenset(pid for pid in self._old.alive() if not is_spent(pid))
                self.made.append(Grant(message.engine, message.token, alive))


class PodHome:
    """One pod that tests use in turn, on an event loop that runs only while one of them does.

    A failing test may leave it in any state, so the next one gets a new pod.
    """

    def __init__(
        self,
        base: Path,
        model: Path,
        whole_deadline_s: float = WHOLE_DEADLINE_S,
        *,
        starts_in_order: bool = True,
        has_inits: bool = False,
        env: Mapping[str, str] | None = None,
        **differences: Any,
    ) -> None:
        """`differences`: of its `LocalPod`."""
        self._base, self._model = base, model
        self._differences = {"env": {**AS_USERS_RUN_IT, **(env or {})}, **differences}
        self._make = partial(
            Pod,
            whole_deadline_s=whole_deadline_s,
            starts_in_order=starts_in_order,
            has_inits=has_inits,
        )
        self._loop = asyncio.Runner()
        self._pod: Pod | None = None
        self._started = 0

    def run(self, scenario: Callable[[Pod], Awaitable[None]]) -> None:
        """Run `scenario` on a complete pod."""
        self._loop.run(self._use(scenario))

    def close(self) -> None:
        try:
            self._loop.run(self._stop())
        finally:
            self._loop.close()

    async def _use(self, scenario: Callable[[Pod], Awaitable[None]]) -> None:
        try:
            if self._pod is None:
                await self._start()
            assert self._pod is not None
            await self._pod.whole()
            await scenario(self._pod)
        except BaseException:
            await self._stop()
            raise

    async def _start(self) -> None:
        self._started += 1
        directory = self._base / f"pod{self._started}"
        directory.mkdir(mode=0o700)
        local = LocalPod(directory, self._model, free_pod_ports(), **self._differences)
        self._pod = self._make(local)
        await self._pod.start()

    async def _stop(self) -> None:
        pod, self._pod = self._pod, None
        if pod is not None:
            continue_all(pod.processes())
            await pod.runner.stop()


in_pod = on_loop_of("home", "pod", PodHome.run)  # a test of a complete pod


def _command_line(pid: int) -> bytes:
    """Empty for a process that has ended meanwhile."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _readers(device: Mapping[str, Any]) -> set[tuple[str, int]]:
    return {(each["incarnation"], each["rank"]) for each in device["sessions"]}


def make_model(directory: Path, shape: Sequence[str] = ()) -> Path:
    return asyncio.run(make_random_model(directory, shape))


def home_with(**how: Any) -> Any:
    """A fixture: a pod with a model of its own, which every test of a module leaves complete."""

    @pytest.fixture(scope="module")
    def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodHome]:
        base = tmp_path_factory.mktemp("pod")
        with contextlib.closing(PodHome(base, make_model(base / "model"), **how)) as found:
            yield found

    return home


@contextmanager
def running_pod(
    directory: Path, output: Path, flags: list[str], deadline_s: float = 120.0
) -> Iterator[subprocess.Popen[bytes]]:
    """`understudy up` once it has printed where to send requests; killed if it is still running."""
    said = output.read_text
    with (
        output.open("w") as file,
        subprocess.Popen(
            [UNDERSTUDY, "up", f"--dir={directory}", *flags],
            stdout=file,
            stderr=file,
            env=ENVIRONMENT,
        ) as up,
    ):
        try:
            until(lambda: "curl http" in said() or up.poll() is not None, "its address", deadline_s)
            assert up.poll() is None, said()
            yield up
        finally:
            up.kill()
    assert "Traceback" not in said()
