"""The two files that prove something: the witness, and the serving file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from typing import Any

import pytest

from lockserver import serving, witness
from lockserver.core.names import ServingFile, WitnessState, new_incarnation
from lockserver.messages import GrantedMsg
from lockserver.server.prober import remove_dead
from lockserver.serving import ServingSeat
from plumbing.errors import UnderstudyError
from tests.helpers import free_witness, open_fds, room_for, run_command, until
from tests.lockserver.engines import HearingClient, spawn_backend

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
    return run_command([sys.executable, "-c", JOIN, path])


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
        assert witness.scan(str(tmp_path), seal_at=1)[0] == set()
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
    assert witness.scan(str(tmp_path))[0] == {os.path.basename(held)}
    assert os.path.getsize(stray) == 0
    keep = frozenset({os.path.basename(kept)})
    assert witness.scan(str(tmp_path), seal_at=1, keep=keep)[0] == {os.path.basename(held)}
    assert (os.path.getsize(kept), os.path.getsize(stray)) == (0, 1)
    assert not witness.discard(held, *ids(held))
    serving.create(str(tmp_path), names[2])
    remove_dead(str(tmp_path), keep)  # with the serving file beside it
    assert sorted(os.listdir(tmp_path)) == sorted(map(os.path.basename, (held, kept)))
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
        while witness.probe(path, dev, ino, 0) is WitnessState.HELD:
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


@pytest.fixture
def made(tmp_path) -> tuple[str, ServingFile]:
    return serving.create(str(tmp_path), new_incarnation("engine-0"))


def seat_at(path: str, file: ServingFile) -> contextlib.closing[ServingSeat]:
    return contextlib.closing(ServingSeat(path, file))


def test_file_is_held_while_joined_and_sealed_when_it_is_found_free(made):
    """Goal: seal, fence and re-grant in one. Method: join, try, leave, try; join again for the
    token that is over, and for the next one."""
    path, file = made
    assert serving.find(os.path.dirname(path), file.name.replace("serving_engine-0_", "engine-0-"))
    with seat_at(path, file) as seat:
        seat.join(3)
        assert serving.probe(path, file, 3) is WitnessState.HELD
        assert os.stat(path).st_size == 0
        seat.leave()
        assert serving.probe(path, file, 3) is WitnessState.FREE
        assert os.stat(path).st_size == 3
        with pytest.raises(UnderstudyError, match="token 3 is over") as over:
            seat.join(3)
        assert over.value.code == "serving.over"
        assert serving.probe(path, file, 2) is WitnessState.FREE
        assert os.stat(path).st_size == 3  # never taken back
        seat.join(4)
        assert serving.probe(path, file, 4) is WitnessState.HELD
    assert serving.probe(path, file, 4) is WitnessState.FREE


def test_only_the_file_that_was_made_is_joined_and_tried(made):
    """Goal: another file proves nothing, either way. Method: remove it; put a fifo in its
    place, and another file; put it back."""
    path, file = made
    with seat_at(path, file) as seat:
        os.rename(path, f"{path}.old")
        with pytest.raises(UnderstudyError, match="removed or replaced"):
            seat.join(1)
        assert serving.probe(path, file, 1) is WitnessState.UNPROVEN
        os.mkfifo(path)
        with pytest.raises(UnderstudyError, match="removed or replaced"):
            seat.join(1)
        assert serving.probe(path, file, 1) is WitnessState.UNPROVEN
        os.unlink(path)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        with pytest.raises(UnderstudyError, match="removed or replaced"):
            seat.join(1)
        assert serving.probe(path, file, 1) is WitnessState.UNPROVEN
        os.replace(f"{path}.old", path)
        seat.join(1)


def test_seat_is_below_what_is_opened_later_and_no_helper_inherits_it(made):
    """Goal: it is let go of after the device, and not kept by a helper. Method: numbers; a helper
    started while joined outlives the seat."""
    path, file = made
    with seat_at(path, file) as seat:
        device = os.open(os.devnull, os.O_RDONLY)
        seat.join(1)
        mine = [fd for fd, target in open_fds().items() if target == path]
        assert len(mine) == 1
        assert mine[0] < device
        os.close(device)
        # A process lets go of what exec closes just before its program begins: wait until it runs.
        running = "print(flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", running],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=False,
        ) as helper:
            assert helper.stdout is not None
            assert helper.stdout.readline() == b"\n"
            seat.leave()
            found = serving.probe(path, file, 1)
            helper.communicate(b"\n")
    assert found is WitnessState.FREE


def test_leaving_needs_no_descriptor_and_joining_without_one_fails_and_holds_nothing(made):
    """Goal: a shortage never keeps the file held. Method: leave, and join, with none left."""
    path, file = made
    with seat_at(path, file) as seat:
        seat.join(1)
        with room_for(0):
            seat.leave()
            with pytest.raises(OSError, match="Too many open files"):
                seat.join(1)
        assert serving.probe(path, file, 1) is WitnessState.FREE


def test_look_without_a_descriptor_shows_nothing(made):
    """Goal: a shortage of the server frees nothing. Method: look without a descriptor; then in
    the same directory at what cannot be tried."""
    path, file = made
    with room_for(0):
        assert serving.probe(path, file, 1) is WitnessState.UNSEEN
    assert os.stat(path).st_size == 0


def test_scan_names_what_is_held_and_seals_the_rest(tmp_path):
    """Goal: after a lost state. Method: one held, one free, one sealed higher, one foreign."""
    made = [serving.create(str(tmp_path), new_incarnation("engine-0")) for _ in range(3)]
    os.truncate(made[2][0], 7)
    os.mkdir(tmp_path / "serving_foreign")
    with seat_at(*made[0]) as seat:
        seat.join(2)
        held = {made[0][1].name, "serving_foreign"}
        assert witness.scan(str(tmp_path), serving.SERVING_PREFIX) == (held, 7)
        assert witness.scan(str(tmp_path), serving.SERVING_PREFIX, seal_at=9) == (held, 7)
    assert [os.stat(path).st_size for path, _ in made] == [0, 9, 9]


def test_client_reports_no_grant_up_to_the_token_that_was_handed_over():
    """Goal: an engine never wakes for a term that is over. Method: its own grants from before and
    after, and another engine's."""
    own, other = new_incarnation("engine-0"), new_incarnation("engine-1")
    client = HearingClient("nowhere", engine="engine-0")
    client.set_want(own, is_wanted=True, over=3)
    conn: Any = None
    for who, token in ((own, 3), (other, 4), (own, 5)):
        grant = GrantedMsg("active", who.rpartition("-")[0], who, token)
        client.received(conn, grant, 0, [])
    assert client.heard("granted") == [("active", other, 4), ("active", own, 5)]
