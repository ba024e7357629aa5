"""Processes that hold a witness without belonging to its tree, or that the server cannot see: in
another PID namespace, or on an older kernel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest

from lockserver import witness
from tests.helpers import NAMESPACE, auntil, can_unshare
from tests.lockserver import old_kernel
from tests.lockserver.engines import Engine, EngineProcess
from tests.lockserver.processes import ServerProcess

STRAY = """
import fcntl, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_SH)
print("in", flush=True)
signal.pause()
"""
LATE = """
import sys
from lockserver.witness import join
sys.stdin.readline()
join(sys.argv[1])
print("opened the device", flush=True)
"""


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, **pipes)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.slow
async def test_witness_held_by_a_stray_process_blocks_the_grant_and_names_it(
    pod_dir, start_server, start_engine
):
    """Goal: every process that holds the witness counts, and operators are shown which one to kill.
    Method: a stray process takes the lock on the witness; the holder dies; then the stray does."""
    server = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    stray = run(STRAY, os.path.join(pod_dir, witness.name_of(holder.incarnation)))
    assert stray.stdout.readline() == "in\n"

    try:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            holder.signal(signal.SIGKILL, tree=True)
            await auntil(holder.is_gone, "the end of the holder")
            await auntil(lambda: "lock.waiting_evidence" in server.log(), "the event")
            lock = server.lock()
            assert lock["state"] == "releasing"
            assert [each["pid"] for each in lock["waiting_for"]] == [stray.pid]
            assert f"pid {stray.pid}" in lock["problem"]
            assert standby.token() == 0
            end(stray)
            assert await standby.granted() == 2
    finally:
        end(stray)


@pytest.mark.parametrize("is_granted", [False, True], ids=["sealed", "removed"])
async def test_process_that_locks_the_witness_late_ends_before_it_opens_the_device(
    pod_dir, start_server, start_engine, is_granted
):
    """Goal: a witness found free stays free. Method: a rank that is still starting when its tree is
    killed opens its witness once the lock is free, or once the next engine has it."""
    server = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    path = os.path.join(pod_dir, witness.name_of(holder.incarnation))
    late = run(LATE, path)

    try:
        async with Engine(pod_dir, "engine-1") as standby:
            holder.signal(signal.SIGKILL, tree=True)
            await auntil(lambda: server.lock()["state"] == "free", "the lock to be free")
            standby.launch()
            if is_granted:
                standby.want("active")
                assert await standby.granted() == 2
                await auntil(lambda: not os.path.exists(path), "the old witness to be removed")
            out, err = await asyncio.to_thread(late.communicate, "go\n")
            assert out == ""
            assert late.returncode != 0
            assert ("witness.replaced" if is_granted else "witness.sealed") in err
            standby.want("active")
            assert await standby.granted() == 2
    finally:
        end(late)


def on_a_kernel_without(lacks: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.lockserver.old_kernel", lacks)


IN_A_NAMESPACE = pytest.mark.skipif(not can_unshare(), reason="no PID namespaces are allowed")
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

    def granted(incarnation: str, token: int) -> None:
        if incarnation == engine.incarnation:
            was_gone.append(holder.is_gone())

    engine.on_granted = granted
    return engine


@pytest.mark.parametrize("world", WORLDS, indirect=True)
async def test_grant_follows_the_end_of_a_holder_in_another_pid_namespace_or_on_an_older_kernel(
    pod_dir, world
):
    """Goal: the fence needs no visible pid. Method: kill the holder's supervisor from outside (as
    PID 1 of a namespace it takes its tree with it); check the pidfds of the whole tree at the next
    grant."""
    _, holder = world
    was_gone: list[bool] = []
    async with standby_in(pod_dir, holder, was_gone) as standby:
        await standby.stand_by()
        holder.signal(signal.SIGKILL, tree=False)
        assert await standby.granted() == 2
        assert all(was_gone)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, indirect=True)
async def test_holder_in_another_pid_namespace_or_on_an_older_kernel_outlives_the_server(
    pod_dir, world
):
    """Goal: recovery needs no visible pid either. Method: restart the server and read the messages;
    then stop a supervisor while its backends die, so that only its silence and the witness remain
    as evidence."""
    server, holder = world
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
