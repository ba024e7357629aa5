"""The server cannot see its engines' processes, or the kernel is older: the same promises hold.

Real containers do the same in `tests/deploy/test_lock_in_containers.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys

import pytest

from tests.helpers import auntil
from tests.lockserver import old_kernel
from tests.lockserver.engines import Engine, EngineProcess
from tests.lockserver.processes import ServerProcess

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def why_no_namespace() -> str | None:
    if shutil.which("unshare") is None:
        return "needs unshare (util-linux)"
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True)
    return None if tried.returncode == 0 else "this container may not make PID namespaces"


def on_a_kernel_without(lacks: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.lockserver.old_kernel", lacks)


IN_A_NAMESPACE = pytest.mark.skipif(why_no_namespace() is not None, reason=str(why_no_namespace()))
ON_AN_OLD_KERNEL = pytest.mark.skipif(
    old_kernel.why_not() is not None, reason=str(old_kernel.why_not())
)


def _world(name: str, server_under, holder_under, source: str, *marks):
    """The command that server and holder each run under, and the pidfd source the server then
    reports."""
    return pytest.param((server_under, holder_under, source), id=name, marks=marks)


NO_SO_PEERPIDFD, NO_PIDFDS = (on_a_kernel_without(lacks) for lacks in old_kernel.LACKS)
WORLDS = [
    _world("holder_in_a_namespace", (), NAMESPACE, "SO_PEERPIDFD", IN_A_NAMESPACE),
    _world("server_in_a_namespace", NAMESPACE, (), "SO_PEERPIDFD", IN_A_NAMESPACE),
    _world("each_in_its_own", NAMESPACE, NAMESPACE, "SO_PEERPIDFD", IN_A_NAMESPACE),
    _world("without_SO_PEERPIDFD", NO_SO_PEERPIDFD, (), "pidfd_open", ON_AN_OLD_KERNEL),
    _world("without_pidfds", NO_PIDFDS, (), "none", ON_AN_OLD_KERNEL),
    _world(
        "without_SO_PEERPIDFD_each_in_its_own",
        *((*NO_SO_PEERPIDFD, *NAMESPACE), NAMESPACE, "none"),
        *(IN_A_NAMESPACE, ON_AN_OLD_KERNEL),
    ),
]


@pytest.fixture
def world(pod_dir, request):
    """A server and a holder with two backends, each run where the test wants it."""
    server_under, holder_under, source = request.param
    server = ServerProcess(pod_dir, "--silent-ms", "1000")
    server.command = (*server_under, *server.command)
    server.start()
    try:
        with contextlib.closing(EngineProcess(pod_dir, "engine-0", under=holder_under)) as holder:
            assert holder.granted() == 1
            assert server.lock()["holder"]["pidfd_source"] == source
            yield server, holder
    finally:
        server.kill()  # unshare ignores SIGTERM, and its child dies with it


def standby_in(pod_dir: str, holder: EngineProcess, was_gone: list[bool]) -> Engine:
    engine = Engine(pod_dir, "engine-1")

    def granted(lock: str, incarnation: str, token: int) -> None:
        if incarnation == engine.incarnation:
            was_gone.append(holder.is_gone())

    engine.on_granted = granted
    return engine


@pytest.mark.parametrize("world", WORLDS, indirect=True)
def test_grant_follows_the_end_of_a_holder_in_another_pid_namespace_or_on_an_older_kernel(
    pod_dir, world
):
    """Goal: the fence needs no visible pid. Method: kill the holder's supervisor from outside (as
    PID 1 of a namespace it takes its tree with it); check the pidfds of the whole tree at the next
    grant."""
    _, holder = world

    async def scenario() -> None:
        was_gone: list[bool] = []
        async with standby_in(pod_dir, holder, was_gone) as standby:
            await standby.stand_by()
            holder.signal(signal.SIGKILL, tree=False)
            assert await standby.granted() == 2
            assert all(was_gone)

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, indirect=True)
def test_holder_in_another_pid_namespace_or_on_an_older_kernel_outlives_the_server(pod_dir, world):
    """Goal: recovery needs no visible pid either. Method: restart the server and read the messages;
    then stop a supervisor while its backends die, so that only its silence and the witness remain
    as evidence."""
    server, holder = world

    async def scenario() -> None:
        was_gone: list[bool] = []
        async with standby_in(pod_dir, holder, was_gone) as standby:
            await standby.stand_by()
            server.kill()
            await asyncio.to_thread(server.start)
            await auntil(lambda: server.lock()["state"] == "held", "the holder to be heard")
            await auntil(lambda: server.lock()["waiters"], "the standby to wait")
            assert server.lock()["holder"]["token"] == 1
            holder.signal(signal.SIGSTOP, tree=False)
            for pidfd in holder.pidfds[1:]:
                signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
            assert await standby.granted() == 2

    asyncio.run(scenario())
