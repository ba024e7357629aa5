"""The watch over the processes behind connections: real children, real pidfds."""

from __future__ import annotations

import asyncio
import os
import subprocess

from plumbing.wire.fds import OwnedFd
from plumbing.wire.peer import Peer, ProcessWatch

SUPERVISOR = "0123456789abcdef"


def start() -> tuple[subprocess.Popen[bytes], Peer]:
    child = subprocess.Popen(["sleep", "60"])
    pidfd = OwnedFd(os.pidfd_open(child.pid))
    return child, Peer(uid=os.getuid(), pid=child.pid, pidfd=pidfd, pidfd_source="pidfd_open")


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_exited_process_is_reported_within_the_check():
    """Goal: a process's end is known together with its connection's. Method: check while it lives
    and once it has ended, without a turn of the loop in between; later turns report nothing
    more."""
    gone: list[str] = []

    async def scenario() -> None:
        child, peer = start()
        watch = ProcessWatch(gone.append)
        watch.watch(SUPERVISOR, peer)
        watch.look(SUPERVISOR)
        assert gone == []
        assert watch.watches(SUPERVISOR)
        end(child)
        watch.look(SUPERVISOR)
        assert gone == [SUPERVISOR]
        assert not watch.watches(SUPERVISOR)
        watch.look(SUPERVISOR)
        watch.look("fedcba9876543210")  # never watched
        for _ in range(3):
            await asyncio.sleep(0)
        assert gone == [SUPERVISOR]
        watch.close()
        child.wait()

    asyncio.run(scenario())


def test_process_without_a_pidfd_is_not_watched_and_all_are_forgotten_at_the_end():
    """Goal: a kernel without pidfds costs the report alone; nothing is left open. Method: a peer
    whose pidfd was taken already."""
    gone: list[str] = []

    async def scenario() -> None:
        child, peer = start()
        watch = ProcessWatch(gone.append)
        watch.watch(SUPERVISOR, peer)
        watch.watch(SUPERVISOR, peer)  # its pidfd was taken: the first one counts
        watch.close()
        end(child)
        watch.look(SUPERVISOR)
        assert gone == []
        child.wait()

    asyncio.run(scenario())
