"""What an engine's processes leave in shared memory and among temporary files is removed, and
nothing else: real processes make the files, are killed with SIGKILL, and the files are looked for.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.supervisor import leftovers
from plumbing.wire.server import PathGuard
from tests.engine.pod import QUICK, Engine, Pod
from tests.helpers import until

FILES = 4
QUIET_S = 0.5  # far more than a document waits (`state_file.SOON_S`)


@pytest.fixture
def strange() -> Iterator[Path]:
    """A file of another program, with a name like vLLM's."""
    path = Path(leftovers.SHM) / f"psm_{secrets.token_hex(6)}"
    path.touch()
    yield path
    path.unlink()


def left(pod: Pod) -> int:
    """How many files there are of the engine."""
    path = leftovers.directory_of(str(pod.directory), "e-0")
    temporary = os.listdir(path) if os.path.isdir(path) else []
    return len({*leftovers.in_shared_memory(path), *temporary} - {leftovers.OWNER})


def started(pod: Pod) -> Engine:
    return pod.active("e-0", "--leave-behind", flags=QUICK)


@pytest.mark.slow
def test_a_killed_supervisors_successor_removes_it(pod, lock, strange):
    """Kill the supervisor, so that no process is left that saw the files."""
    engine = started(pod)
    engine.process.kill()
    engine.process.wait()
    assert left(pod) == FILES
    pod.engine("e-0", flags=QUICK)
    until(lambda: not left(pod), "the files to be removed")
    assert strange.exists()


@pytest.mark.slow
def test_all_that_a_killed_tree_left_is_removed(pod, lock, strange):
    """Kill the backend and let none come back."""
    engine = started(pod)
    assert left(pod) == FILES
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait() == 0
    assert not left(pod)
    assert strange.exists()


def test_a_second_supervisor_of_an_engine_touches_nothing(pod, lock):
    """Goal: a supervisor that is refused has changed nothing. Method: start it while the first one
    serves: every file is there and the same afterwards."""
    first = started(pod)
    state = pod.directory / "engine_e-0.json"
    until(lambda: state.exists() and '"active"' in state.read_text(), "its state on disk")
    # The state of `active` may be written twice, when a document is made just before it is due.
    until(lambda: time.time() - state.stat().st_mtime > QUIET_S, "the last write of it")
    files = contents_of(pod.directory)
    second = pod.engine("e-0", flags=QUICK)
    assert second.wait() == 1
    assert f"pid {first.process.pid} holds" in second.errors.read_text()
    assert left(pod) == FILES
    assert contents_of(pod.directory) == files
    assert first.state == "active"


def test_a_killed_pods_empty_directory_is_removed_by_the_next_engine(tmp_path):
    """Method: directories of an engine that lives, of one that is gone, and of another program."""
    with closing(PathGuard(str(tmp_path / "living"), "an engine")):
        (tmp_path / f"{leftovers.PREFIX}foreign").mkdir()
        for name in ("living", "gone", "next"):
            leftovers.remake(str(tmp_path / f"{leftovers.PREFIX}{name}"), str(tmp_path / name))
    found = {path.name.removeprefix(leftovers.PREFIX) for path in tmp_path.glob("*-*")}
    assert found == {"living", "next", "foreign"}


def contents_of(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and content of each file there but the log, which both supervisors write."""
    return {
        path.name: (path.stat().st_ino, path.read_bytes() if path.is_file() else b"")
        for path in directory.iterdir()
        if path.suffix != ".stderr"
    }
