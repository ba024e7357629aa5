"""`understudy doctor` on real faults: real processes, sockets, files and the kernel.

An older kernel is simulated by a preloaded library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gms.bench import GmsProcess
from tests.helpers import free_port, until
from tests.lockserver.processes import ServerProcess
from tests.understudy.doctor.examining import FAIL, PASS, doctor, examined
from understudy.doctor import UNIX_LISTENS

LOCK_FILES = ("lockserver.sock", "lockserver.lock", "lockserver.json")
PRELOAD = Path(__file__).with_name("old_kernel.c")


def test_nothing_running_fails_nothing_and_makes_nothing(directory: str):
    """Goal: doctor before the first start. Method: a directory that is not there yet."""
    path = os.path.join(directory, "none")
    code, checks = doctor(f"--dir={path}")
    assert code == 0, checks
    assert {each["status"] for each in checks.values()} <= {"pass", "warn", "skip"}
    assert not os.path.exists(path)


def test_directory_that_another_container_mounts_for_itself_is_not_shared(directory: str):
    """Goal: the commonest mistake, a volume that one container has and another has not. Method: a
    lock server in a mount namespace in which the same path is another file system."""
    if os.geteuid() != 0:
        pytest.skip("making a mount namespace takes root")
    base = os.path.dirname(directory)
    port = free_port()
    inside = f"mount -t tmpfs tmpfs {base} && mkdir -m 700 {directory} && exec {sys.executable} "
    inside += f"-m lockserver.cli serve --dir {directory} --http-port {port}"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", inside], stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: "lockserver.sock" in listed(directory), "the lock server to listen")
            finding = examined(directory)["shared"]
        finally:
            process.kill()
    found = os.stat(directory)
    assert finding.status is FAIL
    assert f"pid {process.pid} (" in finding.found
    assert f"device {found.st_dev} inode {found.st_ino} here" in finding.found
    assert "mount one volume" in finding.fix


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_directory_replaced_under_a_running_part_is_not_shared(directory: str, start):
    """Goal: the same, without containers. Method: the directory of a lock server is moved away and
    made anew, while the server is stopped (one that runs would end by itself)."""
    server = start(ServerProcess(directory))
    assert examined(directory)["shared"].status is PASS
    aside = f"{directory}-aside"
    with stopped(server.pid):
        os.rename(directory, aside)
        os.mkdir(directory, 0o700)
        finding = examined(directory)["shared"]
        os.rmdir(directory)
        os.rename(aside, directory)
    assert finding.status is FAIL
    assert f"pid {server.pid} (" in finding.found
    assert "removed or replaced" in finding.found


def test_two_lock_servers_on_one_directory_are_named(directory: str, start):
    """Goal: both could grant. Method: the files that keep the second out are removed under the
    first, which is stopped (one that runs makes them anew); a second one starts."""
    first = start(ServerProcess(directory))
    assert examined(directory)["shared"].status is PASS
    with stopped(first.pid):
        for name in LOCK_FILES:
            os.rename(os.path.join(directory, name), os.path.join(directory, f"old-{name}"))
        second = start(ServerProcess(directory))
        pids = (first.pid, second.pid)
        finding = examined(directory)["shared"]
        second.close()
        for name in LOCK_FILES:
            os.rename(os.path.join(directory, f"old-{name}"), os.path.join(directory, name))
    assert finding.status is FAIL
    assert "one of 2 that listen on lockserver.sock" in finding.found
    assert all(f"pid {pid} (" in finding.found for pid in pids)
    assert "never remove a running part's files" in finding.fix


def test_kernel_without_peer_pidfds_and_files_without_flock_are_named(
    directory: str, tmp_path: Path
):
    """Goal: what the fence rests on. Method: the command with both refused to it."""
    library = tmp_path / "old_kernel.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(PRELOAD), "-ldl"], check=True
    )
    code, checks = doctor(f"--dir={directory}", LD_PRELOAD=str(library))
    assert code == 1
    assert checks["peer_pidfd"]["status"] == "warn"
    assert "no SO_PEERPIDFD" in checks["peer_pidfd"]["found"]
    assert "Linux 6.5" in checks["peer_pidfd"]["fix"]
    assert checks["flock"]["status"] == "fail"
    assert "No locks available" in checks["flock"]["found"]
    assert "local file system" in checks["flock"]["fix"]


def test_pod_in_another_pid_namespace_is_examined_without_its_pids(directory: str, start):
    """Goal: containers hide their processes from each other. Method: the command in a PID namespace
    of its own, beside a lock server and a memory server that it cannot see."""
    if os.geteuid() != 0:
        pytest.skip("making a PID namespace takes root")
    start(ServerProcess(directory))
    start(GmsProcess(directory))
    hidden = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    code, checks = doctor(f"--dir={directory}", before=hidden)
    assert code == 0, checks
    assert checks["shared"]["status"] == "pass"
    assert "2 listening sockets" in checks["shared"]["found"]


def listed(directory: str) -> list[str]:
    """The names in `directory` that somebody of this network listens on."""
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table][1:]
    paths = [row[-1] for row in rows if int(row[3], 16) & UNIX_LISTENS]
    return [os.path.basename(path) for path in paths if os.path.dirname(path) == directory]
