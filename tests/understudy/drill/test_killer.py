"""What a drill kills, how it knows of the dead, and when a victim works again: real processes,
locks and sockets."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import pytest

from engine.messages import KillMsg
from gms.client import messages as gms_messages
from lockserver.client import witness
from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.service.init import FIRST_START_ENV
from plumbing.service.procfs import is_alive
from plumbing.wire.connection import Handler
from plumbing.wire.server import Server
from pool.core.states import ModelState
from tests.helpers import NAMESPACE, can_unshare, free_witness, run_command, until
from tests.plumbing.service.test_init import INIT, ROOT
from understudy.drill import killer
from understudy.drill.killer import (
    FIRST,
    HeldPart,
    epochs_of,
    find_part,
    hold,
    kill_part,
    missing_of,
    wait_back,
)
from understudy.drill.observer import OldTree
from understudy.drill.records import Kill
from understudy.drill.targets import (
    ALL_PARTS,
    GMS,
    LOCKSERVER,
    STATES,
    SUPERVISOR,
    TARGETS,
    VLLM_TARGETS,
    check_target,
    kill_order,
    kill_request,
    needed_flag,
    pool_targets,
    process_of,
    targets_of,
)

HOLDS_ITSELF = """
import os
from understudy.drill.killer import hold
with hold(os.getpid(), "it"):
    pass
"""
SLEEP = "import signal; print('up', flush=True); signal.pause()"

# A lock server's socket, and a child that has nothing to say.
PART = """
import asyncio, os, signal, sys
from lockserver import messages
from plumbing.wire.connection import Handler
from plumbing.wire.server import Server
class Answers(Handler):
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
def test_process_that_must_not_be_killed_from_here_is_refused(pid: int | None, words: str):
    with pytest.raises(UnderstudyError, match=words) as caught, hold(pid, "the lock server"):
        pass
    assert caught.value.code == "drill.not_here"


def test_program_below_the_init_of_the_drills_own_container_is_not_killed():
    """Goal: a drill does not end itself: init would end everything in the container. Method: hold
    the program of an init that is pid 1, from inside of its namespace."""
    if not can_unshare():
        pytest.skip("this machine does not let us create a PID namespace")
    command = [*NAMESPACE, *INIT, sys.executable, "-c", HOLDS_ITSELF]
    environ = {**os.environ, "PYTHONPATH": ROOT, FIRST_START_ENV: "final"}
    done = run_command(command, env=environ)
    assert done.returncode == UnderstudyError.exit_code
    assert "drill.not_here" in done.stderr
    assert "its init ends everything in this container" in done.stderr


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
        with open(path) as looker:  # as the lock server does when it finds it free
            fcntl.flock(looker, fcntl.LOCK_EX)
            assert tree.alive() == []
        assert tree.alive() == []
        tree.close()
    for unknown in (witness.new_incarnation("engine-1"), None):
        assert not OldTree.by_witness(tmp_path, unknown).is_evidence


def test_process_that_was_stopped_and_not_detected_continues():
    """Goal: a drill that ends early leaves no process stopped. Method: SIGSTOP, then forget it."""
    with child(SLEEP) as process:
        tree = OldTree.of([process.pid])
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T", "it to be stopped")
        tree.close()
        until(lambda: state_of(process.pid) == "S", "it to continue")


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


# ------------------------------------------------------------------ parts


async def test_part_is_killed_with_all_its_processes_and_awaited_until_another_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Method: a process with a lock server's socket and a child is killed; nothing answers, then
    another process does."""
    path, kill = str(tmp_path / "lockserver.sock"), Kill(LOCKSERVER)
    with child(PART, path) as first:
        below = int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text())
        with ExitStack() as stack:
            victim = await find_part(tmp_path, LOCKSERVER, stack)
            await kill_part(victim, kill)
        assert first.wait() == -signal.SIGKILL
        until(lambda: not is_alive(below), "its child")
    with monkeypatch.context() as patch:
        patch.setattr(killer, "BACK_DEADLINE_S", 0.05)
        with pytest.raises(WaitTimeoutError, match=r"did not come back within 0\.05 s") as caught:
            await wait_back(tmp_path, victim, kill)
        assert caught.value.code == "drill.no_part"
    assert kill.back_ms is None
    with child(PART, path):
        await wait_back(tmp_path, victim, kill)
    assert kill.took_ms is not None
    assert kill.took_ms > 0


def device(state: str = "committed", epoch: str = "e") -> dict:
    about = {"device_uuid": "HOST-0", "tag": "weights", "pid": 2, "state": state}
    return {**about, "epoch": epoch, "unowned": []}


class Answers(Handler):
    """A device's server that gives one answer after the other, and the last one for ever."""

    def __init__(self, documents: list[dict]) -> None:
        self.documents = documents

    def received(self, conn, message, request_id, fds) -> None:
        document = self.documents.pop(0) if len(self.documents) > 1 else self.documents[0]
        conn.send(gms_messages.StatusReplyMsg(document), request_id)


async def test_memory_server_is_back_once_it_answers_and_has_recovered(tmp_path: Path):
    """Method: a socket without a server, one that recovers, or has another epoch, and then has what
    it had."""
    path, victim = (
        tmp_path / "gms_HOST-0_weights.sock",
        HeldPart(GMS, (), "", epochs_of([device()])),
    )
    answers = [device("recovering"), device(epoch="f"), device()]
    path.touch()
    assert await missing_of(tmp_path, victim) is not None
    path.unlink()
    server = Server(str(path), gms_messages.CATALOGUE, Answers(answers), service="gms")
    await server.start()
    try:
        kill = Kill(GMS, killed_ms=killer.clock.now_ms(), device="HOST-0")
        await wait_back(tmp_path, victim, kill)
    finally:
        await server.close()
    assert answers == [device()]
    assert kill.took_ms is not None


async def test_without_a_visible_memory_server_there_is_none_to_kill(tmp_path: Path):
    with ExitStack() as stack, pytest.raises(UnderstudyError, match=r"drill\.not_here"):
        await find_part(tmp_path, GMS, stack)


# ------------------------------------------------------------------ targets and their order


@pytest.mark.parametrize(
    ("backend", "processes", "found"),
    [
        (None, (), TARGETS),
        ("reference", ("model",), TARGETS),
        (
            "reference",
            ("model-2", "model", "model-1"),
            (TARGETS[0], "backend-model-1", "backend-model-2", SUPERVISOR),
        ),
        ("vllm", ("core", "api", "worker"), VLLM_TARGETS),
        (
            "vllm",
            ("api", "core", "worker", *(f"worker-{number}" for number in range(10, 0, -1))),
            (*VLLM_TARGETS[:3], *(f"worker-{number}" for number in range(1, 11)), SUPERVISOR),
        ),
    ],
)
def test_targets_of_an_engine_are_all_its_ranks_in_order(backend, processes, found):
    assert targets_of(backend, processes) == found
    assert [check_target(each) for each in found] == [*found]


@pytest.mark.parametrize(
    ("text", "target", "message", "is_only"),
    [
        ("backend-model-1", "backend-model-1", KillMsg("backend-model-1"), False),
        ("supervisor", "supervisor", KillMsg("supervisor"), False),
        ("backend-api", "api", KillMsg("backend-api"), False),
        ("worker-1", "worker-1", KillMsg("backend-worker-1"), False),
        ("stop:backend-core", "stop:core", KillMsg("backend-core", is_stop=True), False),
        ("stop:supervisor", "stop:supervisor", KillMsg("supervisor", is_stop=True), False),
        ("shadow:backend-model", "shadow:backend-model", KillMsg("backend-model"), True),
        ("shadow:stop:api", "shadow:stop:api", KillMsg("backend-api", is_stop=True), True),
        *((each, each, None, each != "gms") for each in ("pool", "gms")),
    ],
)
def test_target_names_one_process(text, target, message, is_only):
    assert check_target(text) == target
    assert needed_flag(target) == ("--pool" if is_only else None)
    if message is not None:
        assert kill_request(target) == message


def test_every_target_dies_in_every_state_before_any_pair_comes_again():
    targets = pool_targets("reference", has_shadow=True)
    backends = [
        each for each in targets if each not in ALL_PARTS and process_of(each) != SUPERVISOR
    ]
    pairs = len(targets) * len(STATES) - len(backends)
    order = list(islice(kill_order(targets), pairs))
    assert len(set(order)) == pairs
    assert not any((each, ModelState.COLD) in order for each in backends)
    # A short drill sees many of both.
    assert len({target for target, _ in order[:8]}) == len({state for _, state in order[:8]}) == 8
