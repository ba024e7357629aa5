"""What a drill kills by itself, and how it knows of the dead: real processes, locks and sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockserver.client import witness
from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.service.init import FIRST_START_ENV
from plumbing.service.procfs import is_alive
from tests.helpers import free_witness, until
from tests.plumbing.service.test_init import INIT, NAMESPACE, ROOT, can_unshare
from understudy.drill import part_killer
from understudy.drill.observer import OldTree
from understudy.drill.part_killer import FIRST, hold, kill_part, wait_back
from understudy.drill.records import LOCKSERVER, PartKill, Records
from understudy.drill.verdict import judge

HOLDS_ITSELF = """
import os
from understudy.drill.part_killer import hold
with hold(os.getpid(), "it"):
    pass
"""
SLEEP = "import signal; print('up', flush=True); signal.pause()"

# A lock server's socket, and a child that has nothing to say.
PART = """
import asyncio, os, signal, sys
from lockserver import messages
from plumbing.wire.server import Server
class Answers:
    def opened(self, conn): pass
    def closed(self, conn, reason): pass
    def received(self, conn, message, request_id, fds):
        conn.send(messages.StatusReplyMsg({"schema": 1}), request_id)
async def main():
    await Server(sys.argv[1], messages.CATALOGUE, Answers(), service="lockserver").start()
    print("up", flush=True)
    await asyncio.Event().wait()
parent = os.getpid()
if os.fork() == 0:
    from plumbing.service.process import die_with_parent
    die_with_parent(parent)
    while True:
        signal.pause()
asyncio.run(main())
"""


@contextmanager
def child(code: str, *arguments: str) -> Iterator[subprocess.Popen]:
    """A Python process that has said that it is up; killed in the end."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("pid", "words"), [(None, "is not visible"), (0, "is not visible"), (FIRST, "it is pid 1 here")]
)
def test_process_that_is_not_to_be_killed_from_here_is_refused(pid: int | None, words: str):
    """Goal: never the machine's own first process. Method: what no pid, and pid 1, come to."""
    with pytest.raises(UnderstudyError, match=words) as caught, hold(pid, "the lock server"):
        pass
    assert caught.value.code == "drill.not_here"


def test_witness_says_of_invisible_processes_whether_they_live(tmp_path: Path):
    """Goal: evidence across PID namespaces. Method: a real process that holds a real witness."""
    incarnation = witness.new_incarnation("engine-0")
    path = free_witness(str(tmp_path), incarnation)
    join = f"from lockserver.client import witness; witness.join({path!r}); {SLEEP}"
    with child(join) as process:
        tree = OldTree.by_witness(tmp_path, incarnation)
        assert tree.is_evidence
        assert tree.alive() == ["a process that holds its witness"]
        process.kill()
        process.wait()
        assert tree.alive() == []
        tree.close()
    for unknown in (witness.new_incarnation("engine-1"), "None"):
        assert not OldTree.by_witness(tmp_path, unknown).is_evidence


def test_process_that_was_stopped_and_not_found_out_goes_on():
    """Goal: a drill that ends early leaves nobody stopped. Method: SIGSTOP, then forget it."""
    with child(SLEEP) as process:
        tree = OldTree.of([process.pid])
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T", "it to be stopped")
        tree.close()
        until(lambda: state_of(process.pid) == "S", "it to go on")


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_part_is_killed_with_all_its_processes_and_awaited_until_another_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: what `lockserver` as a target does. Method: a process with its socket and a child; it
    is killed, nobody answers, another one does."""
    path = str(tmp_path / "lockserver.sock")
    with child(PART, path) as first:
        below = int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text())
        kill, before, memory = asyncio.run(kill_part(tmp_path, LOCKSERVER))
        assert first.wait() == -signal.SIGKILL
        until(lambda: not is_alive(below), "its child")
    assert (kill.target, memory, before.active) == (LOCKSERVER, [], None)
    with monkeypatch.context() as patch:
        patch.setattr(part_killer, "BACK_DEADLINE_S", 0.05)
        with pytest.raises(WaitTimeoutError, match=r"did not come back within 0\.05 s"):
            asyncio.run(wait_back(tmp_path, kill, memory))
    assert kill.back_ms is None
    with child(PART, path):
        asyncio.run(wait_back(tmp_path, kill, memory))
    assert kill.back_ms is not None
    assert kill.back_ms > kill.killed_ms


def test_part_that_does_not_come_back_fails_the_drill():
    """Goal: the verdict and the counts. Method: two kills, one of which is not followed."""
    back = PartKill(LOCKSERVER, 1.0, back_ms=2.0)
    report = judge(Records(part_kills=[back, PartKill(LOCKSERVER, 3.0)]), kills_wanted=2)
    assert report.kills == report.killed[LOCKSERVER] == 2
    assert "lockserver did not come back" in report.problems
    good = judge(Records(part_kills=[back]), kills_wanted=1)
    assert "lockserver did not come back" not in good.problems


def test_program_below_the_init_of_the_drills_own_container_is_not_killed():
    """Goal: a drill does not end itself: init would end everything in the container. Method: hold
    the program of an init that is pid 1, from inside of its namespace."""
    if not can_unshare():
        pytest.skip("this machine does not let us create a PID namespace")
    command = [*NAMESPACE, *INIT, sys.executable, "-c", HOLDS_ITSELF]
    environ = {**os.environ, "PYTHONPATH": ROOT, FIRST_START_ENV: "final"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == UnderstudyError.exit_code
    assert "drill.not_here" in done.stderr
    assert "its init ends everything in this container" in done.stderr
