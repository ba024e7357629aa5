"""Foreign processes and files at an engine's witness: they may delay a grant, never cause one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from lockserver import witness
from plumbing.wire.fds import OwnedFd
from tests.helpers import auntil
from tests.lockserver.engines import Engine, is_readable

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
# A supervisor that forks without exec: its child inherits its connection, and outlives it.
FORKING = """
import os, signal, sys
from tests.lockserver.by_hand import Hand
hand = Hand(sys.argv[1], "engine-0", fate="outlives_parent")
client = hand.connect()
client.notify(hand.want())
assert hand.granted(client) == 1
child = os.fork()
if child:
    print(child, hand.backend.pid, flush=True)
signal.pause()
"""


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, **pipes)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_witness_held_by_a_stray_process_blocks_the_grant_and_names_it(
    pod_dir, start_server, start_engine
):
    """Goal: every process that holds the witness counts, and operators are shown which one to kill.
    Method: a stray process takes the lock on the witness; the holder dies; then the stray does."""
    server = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    stray = run(STRAY, os.path.join(pod_dir, witness.name_of(holder.incarnation)))
    assert stray.stdout.readline() == "in\n"

    async def scenario() -> None:
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

    try:
        asyncio.run(scenario())
    finally:
        end(stray)


@pytest.mark.parametrize("is_granted", [False, True], ids=["sealed", "removed"])
def test_process_that_locks_the_witness_late_ends_before_it_opens_the_device(
    pod_dir, start_server, start_engine, is_granted
):
    """Goal: a witness found free stays free. Method: a rank that is still starting when its tree is
    killed opens its witness once the lock is free, or once the next engine has it."""
    server = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    path = os.path.join(pod_dir, witness.name_of(holder.incarnation))
    late = run(LATE, path)

    async def scenario() -> None:
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

    try:
        asyncio.run(scenario())
    finally:
        end(late)


def test_child_forked_without_exec_keeps_the_connection_but_not_the_lock(pod_dir, start_server):
    """Goal: an open connection does not prove that the supervisor lives (the pidfd counts). Method:
    kill a supervisor and its backend; its forked child keeps the socket open and lives on."""
    server = start_server()
    supervisor = run(FORKING, pod_dir)
    child, backend = (int(word) for word in supervisor.stdout.readline().split())
    pidfd = OwnedFd(os.pidfd_open(child))

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            supervisor.kill()
            await auntil(lambda: server.lock()["cause"] == "process_gone", "its end to be seen")
            assert standby.token() == 0  # the backend holds the witness
            os.kill(backend, signal.SIGKILL)
            assert await standby.granted() == 2
            assert not is_readable(pidfd.fileno())

    try:
        asyncio.run(scenario())
    finally:
        signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
        pidfd.close()
        end(supervisor)
