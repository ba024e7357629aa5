"""The peer of a connection, and the watch over its process: real children, real pidfds."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plumbing.wire import peer
from plumbing.wire.fds import OwnedFd
from plumbing.wire.peer import Peer, ProcessWatch
from tests.helpers import until

_CONNECT = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"
)


@pytest.mark.parametrize("is_dead", [False, True])
@pytest.mark.parametrize("option", [peer.SO_PEERPIDFD, 9999])
def test_peer_is_identified_and_its_death_is_detected(
    option: int, is_dead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: uid, pid and a pidfd that becomes readable when the process dies, through SO_PEERPIDFD
    and, where the kernel lacks it, through pidfd_open, which has none for a peer that was reaped.
    Method: a real child, SIGKILL."""
    monkeypatch.setattr(peer, "SO_PEERPIDFD", option)
    path = str(tmp_path / "peer.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        child = subprocess.Popen([sys.executable, "-c", _CONNECT, path])
        accepted, _ = listener.accept()
    if is_dead:
        child.kill()
        child.wait()
    with accepted:
        found = peer.identify(accepted)
    assert (found.uid, found.pid) == (os.geteuid(), child.pid)
    pidfd, found.pidfd = found.pidfd, None
    found.close()
    if option == 9999:
        assert found.pidfd_source == ("none" if is_dead else "pidfd_open")
    if is_dead:
        assert option != 9999 or pidfd is None
    else:
        assert pidfd is not None
        assert not os.get_inheritable(pidfd.fileno())
        assert not peer.is_gone(pidfd.fileno())
        child.kill()
        until(lambda: peer.is_gone(pidfd.fileno()), "the pidfd to become readable")
        child.wait()
    if pidfd is not None:
        pidfd.close()


class _Socket:
    """A socket whose peer's process is hidden by its PID namespace, on an old kernel."""

    def __init__(self, pid: int, error: int) -> None:
        self._pid, self._error = pid, error

    def getsockopt(self, _: int, option: int, *size: int) -> bytes:
        if option == peer.SO_PEERPIDFD:
            raise OSError(self._error, os.strerror(self._error))
        return peer._UCRED.pack(self._pid, 7, 8)


def test_peer_whose_process_is_hidden_has_a_uid_only():
    """Goal: pid 0, as across PID namespaces, is never opened. Method: what such a kernel says."""
    sock: Any = _Socket(0, errno.ENOPROTOOPT)
    found = peer.identify(sock)
    assert (found.uid, found.pid, found.pidfd, found.pidfd_source) == (7, 0, None, "none")
    assert str(found) == "pid 0"


@pytest.mark.parametrize("is_old", [True, False])
def test_peer_at_the_limit_of_descriptors_is_an_error(
    is_old: bool, monkeypatch: pytest.MonkeyPatch
):
    """Goal: without a descriptor for the pidfd the peer is not accepted without one: the caller
    retries. Method: both ways to get one fail with EMFILE."""

    def full(_: int) -> int:
        raise OSError(errno.EMFILE, "full")

    monkeypatch.setattr(os, "pidfd_open", full)
    sock: Any = _Socket(os.getpid(), errno.ENOPROTOOPT if is_old else errno.EMFILE)
    with pytest.raises(OSError, match="full" if is_old else "Too many"):
        peer.identify(sock)


SUPERVISOR = "0123456789abcdef"


def start() -> tuple[subprocess.Popen[bytes], Peer]:
    child = subprocess.Popen(["sleep", "60"])
    pidfd = OwnedFd(os.pidfd_open(child.pid))
    return child, Peer(uid=os.getuid(), pid=child.pid, pidfd=pidfd, pidfd_source="pidfd_open")


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


async def test_exited_process_is_reported_within_the_check():
    """Goal: a process's end is known together with its connection's. Method: check while it lives
    and once it has ended, without a turn of the loop in between; later turns report nothing
    more."""
    gone: list[str] = []
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


async def test_process_without_a_pidfd_is_not_watched_and_all_are_forgotten_at_the_end():
    """Goal: a kernel without pidfds costs the report alone; nothing is left open. Method: a peer
    whose pidfd was taken already."""
    gone: list[str] = []
    child, peer = start()
    watch = ProcessWatch(gone.append)
    watch.watch(SUPERVISOR, peer)
    watch.watch(SUPERVISOR, peer)  # its pidfd was taken: the first one counts
    watch.close()
    end(child)
    watch.look(SUPERVISOR)
    assert gone == []
    child.wait()
