"""`understudy doctor` on real faults: real processes, sockets, files and the kernel.

An older kernel is simulated by a preloaded library.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gms.bench import GmsProcess
from tests.helpers import free_port, free_ports, until
from tests.lockserver.processes import ServerProcess
from tests.understudy.doctor.examining import FAIL, PASS, doctor, examined
from understudy.doctor.check_pod import UNIX_LISTENS
from understudy.pod.ports import Ports

LOCK_FILES = ("lockserver.sock", "lockserver.lock", "lockserver.json")
PRELOAD = Path(__file__).with_name("old_kernel.c")


def test_nothing_running_fails_nothing_and_makes_nothing(directory: str):
    """Goal: doctor before the first start. Method: a directory that is not there yet."""
    path = os.path.join(directory, "none")
    code, checks = doctor(f"--dir={path}")
    assert code == 0, checks
    assert {each["status"] for each in checks.values()} <= {"pass", "warn", "skip"}
    assert checks["directory"]["status"] == "pass"
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
    assert examined(directory)["one_lockserver"].status is PASS
    with stopped(first.pid):
        for name in LOCK_FILES:
            os.rename(os.path.join(directory, name), os.path.join(directory, f"old-{name}"))
        second = start(ServerProcess(directory))
        pids = (first.pid, second.pid)
        finding = examined(directory)["one_lockserver"]
        second.close()
        for name in LOCK_FILES:
            os.rename(os.path.join(directory, f"old-{name}"), os.path.join(directory, name))
    assert finding.status is FAIL
    assert "2 lock servers" in finding.found
    assert all(f"pid {pid} (" in finding.found for pid in pids)
    assert "Never remove lockserver.lock" in finding.fix


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


def test_too_few_descriptors_are_named_of_the_command_and_of_a_part(directory: str, start):
    """Goal: passed descriptors get lost without an error. Method: a lock server and the command
    under a low limit, each for itself."""
    server = start(ServerProcess(directory))
    assert examined(directory)["descriptors"].status is PASS
    low = ("prlimit", "--nofile=900:900")
    code, checks = doctor(f"--dir={directory}", before=low)
    assert code == 1
    assert checks["descriptors"]["status"] == "fail"
    assert "(this command) may open 900 descriptors" in checks["descriptors"]["found"]
    pid = server.pid
    subprocess.run(["prlimit", f"--pid={pid}", "--nofile=1000:1000"], check=True)
    finding = examined(directory)["descriptors"]
    assert finding.status is FAIL
    assert f"pid {pid} (" in finding.found
    assert "ulimit -Hn" in finding.fix


def test_port_that_a_stranger_has_is_named_with_its_owner(directory: str, start):
    """Goal: a part that would not start. Method: this process listens where the lock server's
    probes would be; then where they are, which is its own."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = free_ports(5)
        ports = Ports(first, taken.getsockname()[1], first + 1, first + 4, (first + 2, first + 3))
        finding = examined(directory, ports)["ports"]
        assert finding.status is FAIL
        assert f"port {ports.lockserver} (probes of lockserver) is in use by" in finding.found
        assert f"pid {os.getpid()} (" in finding.found
        assert "--port-offset" in finding.fix
    server = start(ServerProcess(directory))
    ports = Ports(first, server.http_port, first + 1, first + 4, (first + 2, first + 3))
    assert examined(directory, ports)["ports"].status is PASS


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
    assert checks["shared"]["status"] == checks["one_lockserver"]["status"] == "pass"
    assert "not visible here" in checks["one_lockserver"]["found"]
    assert checks["ports"]["status"] == "pass"


def test_directory_that_every_start_refuses_is_named_and_left_alone(directory: str):
    """Goal: doctor changes nothing, and its fix is a command. Method: an open mode, looked at, then
    fixed as the finding says; a link."""
    os.chmod(directory, 0o750)
    finding = examined(directory)["directory"]
    assert finding.status is FAIL
    assert os.stat(directory).st_mode & 0o777 == 0o750
    subprocess.run(finding.fix.split(), check=True)
    assert examined(directory)["directory"].status is PASS
    link = f"{directory}-link"
    os.symlink(directory, link)
    assert examined(link)["directory"].found == f"{link} is a symbolic link"
    os.unlink(link)


def listed(directory: str) -> list[str]:
    """The names in `directory` that somebody of this network listens on."""
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table][1:]
    paths = [row[-1] for row in rows if int(row[3], 16) & UNIX_LISTENS]
    return [os.path.basename(path) for path in paths if os.path.dirname(path) == directory]
