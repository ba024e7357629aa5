"""/proc's answers about real processes, of which a process that is gone is one; and CPU pressure,
from files that the test writes."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from plumbing.service import procfs
from plumbing.service.procfs import CpuPressure, candidates
from tests.freezer import freezer_of
from tests.helpers import until

GONE = 2**22 + 1  # above the kernel's largest pid


@pytest.fixture
def tree():
    """A process with a child of its own: (parent, the child's pid). Closing stdin ends both."""
    program = "import subprocess; subprocess.run(['cat'])"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    with process:
        (child,) = until(lambda: procfs.children(process.pid), "the grandchild")
        yield process, child
        process.stdin.close()


def test_children_never_misses_one_while_others_come_and_go():
    """Goal: a living child is always listed; method: 500 readings while siblings are reaped."""
    program = textwrap.dedent(
        """
        import subprocess
        short = [subprocess.Popen(["true"]) for _ in range(4)]
        lasting = subprocess.Popen(["cat"])
        print(lasting.pid, flush=True)
        while True:
            for process in short:
                process.wait()
            short = [subprocess.Popen(["true"]) for _ in range(4)]
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        lasting = int(process.stdout.readline())
        try:
            assert all(lasting in procfs.children(process.pid) for _ in range(500))
        finally:
            process.kill()


def test_children_without_the_kernels_list_are_found_by_their_parent(tree, monkeypatch):
    """Goal: kernels without CONFIG_PROC_CHILDREN; method: hide the list."""
    process, child = tree
    monkeypatch.setattr(procfs, "_children_once", lambda pid: None)
    assert procfs.children(process.pid) == [child]


def test_what_keeps_a_process_from_running(tree):
    """Goal: stopped and frozen are told apart, from running and from gone; method: SIGSTOP, and a
    freezer where there is one."""
    _, child = tree
    until(lambda: procfs.halted(child) is None, "it to run")  # it may wait for the disk at first
    assert procfs.halted(GONE) is None
    os.kill(child, signal.SIGSTOP)
    until(lambda: procfs.halted(child) == "stopped", "it to be stopped")
    os.kill(child, signal.SIGCONT)
    until(lambda: procfs.halted(child) is None, "it to go on")
    with freezer_of([child]) as freezer:
        freezer.freeze()
        assert procfs.halted(child) == "frozen"
        freezer.thaw()
        until(lambda: procfs.halted(child) is None, "it to go on")


def test_nothing_is_known_of_a_process_that_is_gone():
    """Goal: no exceptions for the dead; method: a pid that cannot exist."""
    assert not procfs.is_alive(GONE)
    assert procfs.name(GONE) == ""
    assert procfs.children(GONE) == []
    assert procfs.descendants(GONE) == []
    assert procfs.rss_bytes(GONE) is None
    assert procfs.parent(GONE) is None
    assert not procfs.flock_held(GONE, 0)


def test_holders_and_flock_of_a_file(tmp_path):
    """Goal: who has it open, who locks it; method: a shared flock taken and let go."""
    path = tmp_path / "witness"
    path.write_text("")
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDONLY)
    fd = os.open(path, os.O_RDONLY)
    me = os.getpid()
    try:
        status = os.fstat(fd)
        assert procfs.holders_of(status.st_dev, status.st_ino) == [me]
        assert not procfs.flock_held(me, fd)
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert procfs.flock_held(me, fd)
        assert procfs.flock_held(me, fd, status.st_dev, status.st_ino)
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not procfs.flock_held(me, other, status.st_dev, status.st_ino)
    finally:
        os.close(fd)
        os.close(other)
    assert procfs.holders_of(status.st_dev, status.st_ino) == []


def test_a_process_is_spent_once_none_of_its_threads_has_memory_or_descriptors():
    """Goal: what can touch nothing is told from what can, before the kernel says that it has ended.
    Method: a process whose first thread ends and whose second lives on; the same killed, unreaped.
    """
    program = """
        import ctypes, os, threading
        def wait():
            print(flush=True)
            ctypes.CDLL(None).pause()
        threading.Thread(target=wait).start()
        number = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
        ctypes.CDLL(None).syscall(number, 0)  # exit: of this thread alone
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline()
        until(lambda: not procfs.is_alive(process.pid), "the first thread to be a zombie")
        assert not procfs.is_spent(process.pid)
        process.kill()
        until(lambda: procfs.is_spent(process.pid), "its memory and descriptors to be gone")
    assert procfs.is_spent(process.pid)
    assert procfs.is_spent(GONE)
    assert not procfs.is_spent(os.getpid())


def write(path, total_us, average=0.0):
    path.write_text(
        f"some avg10={average:.2f} avg60=2.00 avg300=3.00 total={total_us}\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=99\n"
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cpu.pressure"
    write(path, 0)
    return path


def test_pressure_is_that_of_the_last_window_or_the_kernels_average(file):
    """A busy window shows at its end, what follows it at the end of the next; an average that
    remembers more counts more."""
    pressure, said = CpuPressure([str(file)]), []
    for now_ms, lost_ms, average in (
        *((0, 0, 0.0), (1000, 1000, 0.0), (2000, 2000, 0.0), (3000, 2500, 0.0)),
        *((4000, 2500, 0.0), (5000, 2500, 60.0), (6000, 2500, 0.0)),
    ):
        write(file, 5000 + 1000 * lost_ms, average)
        said.append(pressure.sample(now_ms))
    assert said == pytest.approx([0.0, 0.0, 1.0, 1.0, 0.25, 0.6, 0.0])
    pressure.close()
    pressure.close()
    assert pressure.sample(9000) is None


def test_first_file_that_can_be_read_counts(tmp_path, file):
    """Missing, not a pressure file, then the right one."""
    other = tmp_path / "other"
    other.write_text("nothing of the kind\n")
    pressure = CpuPressure([str(tmp_path / "missing"), str(other), str(file)])
    assert pressure.sample(1.0) is not None
    pressure.close()
    assert CpuPressure([str(other)]).sample(1.0) is None


def test_file_that_becomes_unreadable_is_unknown_and_a_total_may_begin_again(file):
    pressure = CpuPressure([str(file)])
    pressure.sample(0)
    file.write_text("")
    assert pressure.sample(6_000) is None
    for now, total, share in ((7_000, 1000, 0.0), (9_000, 1_001_000, 0.5), (11_000, 10, 0.5)):
        write(file, total)
        assert pressure.sample(now) == pytest.approx(share)
    write(file, 10)
    assert pressure.sample(13_000) == 0


def test_own_group_comes_first(tmp_path):
    """Version 2's line names the group; version 1's lines do not matter."""
    membership = tmp_path / "cgroup"
    membership.write_text("9:name=systemd:/x\n4:memory:/y\n0::/pods/a\n")
    assert candidates(str(membership)) == [
        "/sys/fs/cgroup/pods/a/cpu.pressure",
        "/sys/fs/cgroup/unified/pods/a/cpu.pressure",
        "/proc/pressure/cpu",
    ]
    assert candidates(str(tmp_path / "missing")) == ["/proc/pressure/cpu"]
