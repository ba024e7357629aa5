"""Goal: the lock's evidence crosses real containers: server and holder see no pid of each other's.

Method: each is PID 1 of a container of its own (podman and runc, over a throw-away copy of this
root: no image is needed); they share a directory and nothing else. Kills come from outside.
`test_containers` does the same with a whole pod, from the image.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from plumbing.service import procfs
from plumbing.wire.fds import OwnedFd
from tests.deploy.image import PODMAN
from tests.deploy.podman_pod import LIMITS, pid_namespace
from tests.helpers import auntil, free_port, until
from tests.lockserver.engines import Engine, is_readable
from tests.lockserver.processes import ServerProcess

ROOT = Path(__file__).resolve().parent.parent.parent
DIRTY_MIB = 256  # in each of two backends: time for who believes in connections to be wrong
RUN = (*PODMAN, "run", "--rm", "--network=host", *LIMITS)
DEADLINE_S = 90.0

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("podman", "runc"))),
        reason="needs root, podman and runc",
    ),
]


class Container:
    """One command as PID 1; `pids` are its processes as they are called outside."""

    def __init__(self, directory: str, *command: str) -> None:
        self._ids = tempfile.mkdtemp(prefix="container-")
        flags = [f"--cidfile={self._ids}/id", f"--volume={directory}:{directory}"]
        flags += [f"--volume={ROOT}:{ROOT}:ro", f"--env=PYTHONPATH={ROOT}", f"--workdir={ROOT}"]
        flags += ["--rootfs", "/:O"]
        self._process = subprocess.Popen(
            [*RUN, *flags, sys.executable, *command], stdout=subprocess.PIPE
        )
        self.id = until(self._id, "the container to be made", DEADLINE_S)
        self.pid = until(self._pid, "its PID 1", DEADLINE_S)
        self.pidfds: list[OwnedFd] = []

    def _id(self) -> str:
        assert self._process.poll() is None, "podman could not run it"
        with contextlib.suppress(FileNotFoundError):
            return Path(self._ids, "id").read_text()
        return ""

    def _pid(self) -> int:
        command = [*PODMAN, "container", "inspect", "--format={{.State.Pid}}", self.id]
        return int(subprocess.run(command, capture_output=True, text=True).stdout or 0)

    def watch(self) -> None:
        """From now on `is_gone` speaks of all the processes that are in it."""
        for pid in (self.pid, *procfs.descendants(self.pid)):
            self.pidfds.append(OwnedFd(os.pidfd_open(pid)))

    def is_gone(self) -> bool:
        return all(is_readable(pidfd.fileno()) for pidfd in self.pidfds)

    def line(self) -> dict:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.kill()
        subprocess.run([*PODMAN, "rm", "--force", "--time=0", self.id], capture_output=True)
        assert self._process.stdout is not None
        self._process.stdout.close()
        for pidfd in self.pidfds:
            pidfd.close()
        shutil.rmtree(self._ids)


@pytest.fixture
def directory() -> Iterator[str]:
    """In memory, as a pod has it, and short: a socket is in it."""
    tried = subprocess.run([*RUN, "--rootfs", "/:O", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"podman cannot run a container here: {tried.stderr.strip()[-200:]}")
    made = tempfile.mkdtemp(prefix="understudy-lock-", dir="/dev/shm")
    yield made
    shutil.rmtree(made)


def serve(directory: str) -> Container:
    port = str(free_port())
    command = ("-m", "lockserver.cli", "serve", "--dir", directory, "--http-port", port)
    return Container(directory, *command)


def test_lock_between_containers_outlives_its_server_and_follows_the_whole_holder(directory):
    """A holder of much memory; the server's container is killed and made again: the same token.
    Then PID 1 of the holder's is killed: at the next grant none of its processes lives."""
    server = ServerProcess(directory)  # asked only: what serves is in the containers

    async def scenario(first: Container, holder: Container, stack: contextlib.ExitStack) -> None:
        async with Engine(directory, "engine-1") as standby:
            standby.launch()
            standby.want("active")
            await auntil(lambda: standby.heard, "the news of who is active")
            found = server.lock()["holder"]
            assert (found["token"], found["pidfd_source"]) == (1, "SO_PEERPIDFD")
            namespaces = {pid_namespace(pid) for pid in (1, first.pid, holder.pid)}
            assert len(namespaces) == 3
            await asyncio.to_thread(first.kill)
            second = await asyncio.to_thread(serve, directory)
            stack.callback(second.close)
            await auntil(lambda: standby.connects == 2, "the standby to be back", DEADLINE_S)
            await auntil(lambda: server.lock()["state"] == "held", "the holder to be heard")
            assert server.lock()["holder"]["token"] == 1
            await _follows(standby, holder)

    with contextlib.ExitStack() as stack:
        first = serve(directory)
        stack.callback(first.close)
        until(lambda: os.path.exists(f"{directory}/lockserver.sock"), "the server", DEADLINE_S)
        module = ("-m", "tests.lockserver.engines")
        holder = Container(directory, *module, directory, "engine-0", str(DIRTY_MIB), "none")
        stack.callback(holder.close)
        incarnation = holder.line()["incarnation"]
        while (heard := holder.line())["who"] != incarnation:
            pass
        assert heard["token"] == 1
        holder.watch()
        assert len(holder.pidfds) == 3
        asyncio.run(scenario(first, holder, stack))


async def _follows(standby: Engine, holder: Container) -> None:
    was_gone: list[bool] = []

    def granted(lock: str, incarnation: str, token: int) -> None:
        if incarnation == standby.incarnation:
            was_gone.append(holder.is_gone())

    standby.on_granted = granted
    assert not holder.is_gone()
    os.kill(holder.pid, signal.SIGKILL)
    assert await standby.granted() == 2
    assert was_gone[0]
