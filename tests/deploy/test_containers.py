"""Goal: the image is what the manifests expect, and the fence holds between real containers.

Method: the CPU image, built on a base made on the spot, run with podman as the rendered manifests
say: each container with its own PID namespace and read-only root, as the pod's user, with nothing
in common but the volumes and the network. Kills come from outside.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.container_image import why_not
from tests.deploy.podman_pod import PodmanPod, pid_namespace
from tests.e2e.pods import CLIENTS, grants_in, load_on
from tests.e2e.processes import Processes, kill
from tests.helpers import POLL_S, on_loop_of
from understudy.drill.clients import Target
from understudy.drill.killer import Whole, wait_whole
from understudy.drill.run import Drill, DrillPlan
from understudy.status.gather import gather

WHOLE_DEADLINE_S = 90.0
KILLED = 137  # a shell's and podman's code for SIGKILL
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


class Home:
    """A pod of containers, on one event loop. A test leaves it whole, or fails those after it."""

    def __init__(self, image: str) -> None:
        self.pod = PodmanPod(image)
        self._loop = asyncio.Runner()
        self._drill: Drill | None = None
        self._target: Target | None = None

    def run(self, scenario: Callable[[Home], Awaitable[None]]) -> None:
        async def use() -> None:
            try:
                await asyncio.wait_for(scenario(self), 2 * WHOLE_DEADLINE_S)
            except BaseException:
                for name in self.pod.names:
                    print(await self.pod.logs(name))
                raise

        self._loop.run(use())

    def start(self) -> None:
        self._loop.run(self._start())

    async def _start(self) -> None:
        await self.pod.start()
        self._drill = Drill(self.pod.directory, DrillPlan(), lambda line: None)
        await self.whole()
        self._target = await self._drill.prepare()

    def close(self) -> None:
        try:
            assert self._loop.run(self.pod.close()) == []
        finally:
            self._loop.close()

    async def whole(self) -> Whole:
        return await wait_whole(self.pod.directory, deadline_s=WHOLE_DEADLINE_S)

    def load(self):
        assert self._target is not None
        assert self._drill is not None
        return load_on(self._target, self._drill)


of_containers = on_loop_of("home", "home", Home.run)


@pytest.fixture(scope="module")
def home(image: str) -> Iterator[Home]:
    found = Home(image)
    try:
        found.start()
        yield found
    finally:
        found.close()


@of_containers
async def test_containers_share_their_volumes_and_no_processes(home: Home):
    """What makes the next tests mean something."""
    pids = [await home.pod.pid(name) for name in home.pod.names]
    namespaces = {pid_namespace(pid) for pid in pids}
    assert len(namespaces) == len(home.pod.names) == 5
    assert pid_namespace(1) not in namespaces
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(r"^Uid:\t10001\t10001\t10001\t10001$", status, re.MULTILINE)
        assert re.search(r"^NSpid:\t\d+\t1$", status, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
    lock = (await gather(home.pod.directory))["lockserver"]["locks"]["active"]
    assert lock["holder"]["evidence"] == "pidfd+witness"
    assert lock["holder"]["pidfd_source"] == "SO_PEERPIDFD"


@of_containers
async def test_killed_container_is_gone_before_the_next_is_granted_and_comes_back_as_standby(
    home: Home,
):
    """Goal: no process of the engine lives at the grant. Method: SIGKILL to PID 1 of the active
    engine under load; pidfds of everything that was in its container say who lived at the grant: at
    most init, which does not hold the witness, so it can reach no device."""
    pod, before = home.pod, await home.whole()
    (standby,) = before.standbys
    pid = await pod.pid(before.engine)
    with Processes(await pod.processes(before.engine)) as old:
        assert pid in old.alive()
        assert len(old.alive()) == 3  # and the supervisor, and its backend
        async with home.load() as load, grants_in(pod.directory, old) as grants:
            await load.answers()
            kill(pid)
            token = await load.newer(before.token)
            await load.answers()
            assert [(each.engine, each.token) for each in grants.made] == [(standby, token)]
            assert grants.made[0].alive <= {pid}
            assert await pod.ended(before.engine) == KILLED
            await pod.restart(before.engine)
            after = await home.whole()
            await load.answers()
        assert (after.engine, after.token) == (standby, token)
        assert after.standbys == (before.engine,)
        assert not load.refused()
        assert len(load.lost()) <= CLIENTS
        assert load.tokens() == {before.token, token}
        assert len(grants.made) == 1


@of_containers
async def test_stopped_container_drains_and_nothing_is_lost(home: Home):
    """Goal: a kubelet's SIGTERM to PID 1 is a switchover. Method: podman stop under load."""
    pod, before = home.pod, await home.whole()
    async with home.load() as load:
        await load.answers()
        assert await pod.stop(before.engine) == 0
        token = await load.newer(before.token)
        await pod.restart(before.engine)
        after = await home.whole()
        await load.answers()
        assert (after.engine, after.token) == (*before.standbys, token)
        assert not load.lost()
        assert not load.connections_refused()
        # Accepted in the moment in which the drain began: told to come again.
        assert len(load.refused()) <= CLIENTS


@pytest.mark.parametrize("sidecar", ["lockserver", "gms"])
@of_containers
async def test_killed_sidecar_costs_nothing(home: Home, sidecar: str):
    """Goal: its successor is handed what it had by other containers. Method: SIGKILL to its PID 1
    under load; the same holder under the same token, the same epoch, and weights loaded once."""
    pod, before = home.pod, await home.whole()
    memory = await committed(pod)
    async with home.load() as load:
        await load.answers()
        kill(await pod.pid(sidecar))
        await pod.restart(sidecar)
        assert await home.whole() == before
        await load.answers()
        load.lost_nothing(before.token)
    found = await committed(pod)
    assert found["epoch"] == memory["epoch"]
    assert found["commits_total"] == (0 if sidecar == "gms" else memory["commits_total"])


async def committed(pod: PodmanPod):
    """The memory server's status, once it has weights."""
    async with asyncio.timeout(WHOLE_DEADLINE_S):
        while True:
            (found,) = (await gather(pod.directory))["gms"]
            if found.get("epoch"):
                return found
            await asyncio.sleep(POLL_S)
