"""The witness in real processes: its holders, the effect of sealing, and why descriptor 0."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys

import pytest

from lockserver import witness
from lockserver.core.names import WitnessState
from tests.helpers import free_witness, until
from tests.lockserver.engines import spawn_backend

INCARNATION = "engine-0-00112233445566aa"

JOIN = "import sys; from lockserver.witness import join; join(sys.argv[1]); print('in')"

# A device stand-in on 50 and 51, the witness on argv[2]. The memory is behind 51 and is slow to
# free; only then is the pipe on 50 closed. (With the witness on 60 this test fails: tried.)
DYING = """
import ctypes, fcntl, os, signal, sys
path, number, pipe = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
memory = os.memfd_create("device")
os.write(memory, b"x" * (256 << 20))
os.dup2(memory, 51); os.close(memory)
os.dup2(pipe, 50); os.close(pipe)
fd = os.open(path, os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_SH)
os.dup2(fd, number); os.close(fd)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def path(tmp_path):
    return free_witness(str(tmp_path), INCARNATION)


def ids(path):
    found = os.stat(path)
    return found.st_dev, found.st_ino


def run_join(path):
    return subprocess.run(
        [sys.executable, "-c", JOIN, path], capture_output=True, text=True, timeout=60
    )


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_probe_holders_of_several_ranks_free_only_when_all_are_dead(path):
    """Goal: the witness is held until its last holder dies. Method: two holders, killed one after
    the other."""
    first, second = spawn_backend(path), spawn_backend(path)
    assert witness.probe(path, *ids(path)) is WitnessState.HELD
    end(first)
    assert witness.probe(path, *ids(path)) is WitnessState.HELD
    assert os.path.getsize(path) == 0
    end(second)
    assert witness.probe(path, *ids(path)) is WitnessState.FREE
    assert os.path.getsize(path) == witness.SEALED_BYTES


def test_join_sealed_witness_is_refused_before_the_device_is_opened(path):
    """Goal: no process can join after the tree was found dead. Method: seal, then join in a
    process."""
    assert witness.probe(path, *ids(path)) is WitnessState.FREE
    ran = run_join(path)
    assert ran.returncode != 0
    assert "witness.sealed" in ran.stderr
    assert witness.identify(path)[1] is WitnessState.UNPROVEN


def test_join_replaced_or_missing_witness_is_refused(path, tmp_path):
    """Goal: another file of that name protects nothing. Method: swap it between open and stat."""
    os.unlink(path)
    assert "witness.replaced" in run_join(path).stderr


def test_join_holds_on_descriptor_zero_and_children_inherit_it(path):
    """Goal: the witness covers a backend's children too. Method: the child of a joined shell
    outlives it."""
    script = (
        "import subprocess, sys; from lockserver.witness import join; join(sys.argv[1]);"
        "p = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL);"
        "print(p.pid, flush=True)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    pidfd = os.pidfd_open(child)
    parent.wait()
    parent.stdout.close()
    assert os.readlink(f"/proc/{child}/fd/0") == path
    assert witness.probe(path, *ids(path)) is WitnessState.HELD
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    until(lambda: witness.probe(path, *ids(path)) is WitnessState.FREE, "the child to be gone")
    os.close(pidfd)


def test_probe_missing_or_different_file_proves_nothing(path, tmp_path):
    """Goal: only the inode on file counts. Method: wrong inode, wrong kind, no file."""
    dev, ino = ids(path)
    assert witness.probe(path, dev, ino + 1) is WitnessState.UNPROVEN
    assert os.path.getsize(path) == 0
    assert witness.probe(path + "x", dev, ino) is WitnessState.UNPROVEN
    fifo = str(tmp_path / "witness_engine-0_fifo")
    os.mkfifo(fifo)
    assert witness.probe(fifo, dev, ino) is WitnessState.UNPROVEN
    assert witness.identify(fifo) == (None, WitnessState.UNPROVEN)
    os.symlink(path, str(tmp_path / "link"))
    assert witness.identify(str(tmp_path / "link")) == (None, WitnessState.UNPROVEN)


def test_witness_created_locked_is_never_seen_free(tmp_path, monkeypatch):
    """Goal: a server that seals free witnesses cannot get there before the first process. Method:
    look at the instant at which the name appears."""
    rename, seen = os.rename, []

    def look_at_once(source, target):
        assert witness.scan(str(tmp_path), seal=True) == set()
        rename(source, target)
        seen.append(witness.probe(target, *ids(target)))

    monkeypatch.setattr(os, "rename", look_at_once)
    path, fd = witness.create(str(tmp_path), INCARNATION)
    assert seen == [WitnessState.HELD]
    assert os.fstat(fd).st_size == 0
    assert os.listdir(tmp_path) == [os.path.basename(path)]
    os.close(fd)
    assert witness.probe(path, *ids(path)) is WitnessState.FREE


def test_probe_that_cannot_seal_proves_nothing(path, monkeypatch):
    """Goal: free but joinable is not free. Method: an ftruncate that fails."""

    def refuse(fd, length):
        raise OSError(5, "no")

    monkeypatch.setattr(os, "ftruncate", refuse)
    assert witness.probe(path, *ids(path)) is WitnessState.UNPROVEN


def test_scan_names_the_held_and_seals_only_strangers(tmp_path):
    """Goal: the evidence that remains when the state file is unreadable. Method: held, kept and
    stray witnesses."""
    names = [f"engine-{n}-00112233445566aa" for n in range(3)]
    held, kept, stray = (free_witness(str(tmp_path), name) for name in names)
    holder = spawn_backend(held)
    assert witness.scan(str(tmp_path)) == {os.path.basename(held)}
    assert os.path.getsize(stray) == 0
    keep = frozenset({os.path.basename(kept)})
    assert witness.scan(str(tmp_path), seal=True, keep=keep) == {os.path.basename(held)}
    assert (os.path.getsize(kept), os.path.getsize(stray)) == (0, 1)
    assert [file.name for file in witness.sealed(str(tmp_path))] == [os.path.basename(stray)]
    assert witness.discard(stray, *ids(stray))
    assert not witness.discard(held, *ids(held))
    assert not os.path.exists(stray)
    assert os.path.exists(held)
    end(holder)


def test_witness_on_descriptor_zero_is_free_only_after_the_device_is_closed(path):
    """Goal: descriptor 0 is closed last in a dying process, so a free witness means a closed
    device. Method: a device stand-in on 50 and 51; when the witness is free, the pipe on 50 has
    ended."""
    for _ in range(5):
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", DYING, path, "0", str(writer)],
            stdout=subprocess.PIPE,
            pass_fds=(writer,),
        )
        os.close(writer)
        assert process.stdout.readline() == b"ready\n"
        poll = select.poll()
        poll.register(reader, select.POLLHUP)
        process.kill()
        dev, ino = ids(path)
        while witness.probe(path, dev, ino, seal=False) is WitnessState.HELD:
            pass
        assert poll.poll(0), "the witness was free while the device was still open"
        end(process)
        os.close(reader)


def test_join_waits_out_a_probe_by_the_server(path):
    """Goal: a server's probe must not make a joining process fail. Method: hold the lock while it
    joins, release it, and see it join."""
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    process = subprocess.Popen([sys.executable, "-c", JOIN, path], stdout=subprocess.PIPE)
    until(lambda: _waits_for_lock(process.pid), "the newcomer to wait")
    os.close(fd)
    assert process.stdout.readline() == b"in\n"
    end(process)


def _waits_for_lock(pid):
    with open("/proc/locks") as stream:  # man 5 proc: "->" marks a blocked process
        return any("->" in line and str(pid) in line.split() for line in stream)
