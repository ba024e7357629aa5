"""Goal: the death of a lifeline's holder is reported early, once, and no other death is.

Method: real processes and the real kernel. That the notice is *early* is shown without a clock:
a process whose main thread has ended, but not another one, is dying and not gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from engine import lifeline
from plumbing.errors import ProtocolError
from tests.helpers import auntil, until

HOLDS = textwrap.dedent("""
    import ctypes, os, socket, sys, threading, time
    from engine import lifeline
    held, counts = lifeline.hold()
    try:
        os.ftruncate(held.fileno(), 0)
    except OSError:
        counts.progress = 2**63
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        socket.send_fds(ours, [b"x"], [held.fileno()])
    held.close()
    if sys.argv[2] == "thread":  # the main thread ends as a thread does, and the process lives on
        threading.Thread(target=time.sleep, args=(600,)).start()
        sys.stdin.readline()
        ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
    time.sleep(600)
""")


class Holder:
    """A process that holds a lifeline, of which `fd` is a descriptor."""

    def __init__(self, mode: str = "sleep") -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HOLDS, str(theirs.fileno()), mode],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
            )
            theirs.close()
            self.fd = socket.recv_fds(ours, 1, 1)[1][0]
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def is_gone(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def end_main_thread(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.end()
        assert self.process.stdin is not None
        self.process.stdin.close()
        os.close(self.fd)
        os.close(self.pidfd)


@pytest.fixture
def holder():
    with contextlib.closing(Holder()) as holder:
        yield holder


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lifeline"]


async def test_the_watcher_sees_what_the_holder_counts(holder):
    """Goal: the count arrives, and the page, which it wanted to shorten first, is whole."""
    watch = lifeline.LifelineWatch(holder.fd, lambda: None)
    assert watch.counts.progress == 2**63
    watch.close()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_death_is_told_once(holder, when):
    """Goal: a death is told, also one before the watch began, and by one thread."""
    told: list[str] = []
    if when == "before":
        holder.end()
    watch = lifeline.LifelineWatch(holder.fd, lambda: told.append("dying"))
    holder.end()
    await auntil(lambda: told, "notice of the death")
    await auntil(lambda: not watchers(), "the thread to end")
    watch.close()
    assert told == ["dying"]


async def test_notice_arrives_before_the_process_is_gone():
    with contextlib.closing(Holder("thread")) as holder:
        told: list[str] = []
        watch = lifeline.LifelineWatch(holder.fd, lambda: told.append("dying"))
        holder.end_main_thread()
        await auntil(lambda: told, "notice of the death")
        assert not holder.is_gone
        watch.close()


async def test_nothing_is_called_after_close(holder):
    told: list[str] = []
    watch = lifeline.LifelineWatch(holder.fd, lambda: told.append("dying"))
    until(watchers, "the thread")
    watch.close()
    holder.end()
    await auntil(lambda: not watchers(), "the thread to end")
    await asyncio.sleep(0)  # a turn of the loop, in which it would be told
    assert told == []


@pytest.mark.parametrize(
    ("flags", "size", "seals"),
    [
        (0, 4096, 0),  # its owner could shrink it, and our reading it would be our death by SIGBUS
        (os.MFD_ALLOW_SEALING, 4096, 0),
        (os.MFD_ALLOW_SEALING, 100, lifeline.SIZE_SEALS),
        (None, 0, 0),
    ],
)
async def test_what_is_no_lifeline_is_refused(flags, size, seals):
    fd = os.open("/dev/null", os.O_RDONLY) if flags is None else os.memfd_create("no", flags)
    if flags is not None:
        os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(ProtocolError, match=r"lifeline\.bad"):
        lifeline.LifelineWatch(fd, lambda: None)
    os.close(fd)
    assert not watchers()


async def test_only_the_main_thread_holds():
    """Goal: the end of another thread, which is no death, is not told. Method: its page is held by
    no thread, so that no thread watches it."""
    page, _ = await asyncio.to_thread(lifeline.hold)
    watch = lifeline.LifelineWatch(page.fileno(), lambda: None)
    assert not watchers()
    watch.close()
    page.close()
