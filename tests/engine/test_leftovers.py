"""What an engine's processes leave in shared memory is removed, and nothing else: real processes
make the files, are killed with SIGKILL, and the files are looked for."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.supervisor import leftovers
from tests.engine.pod import QUICK, Engine, Pod
from tests.helpers import until


@pytest.fixture
def prefix() -> Iterator[str]:
    """Of names that no other test has; what a failed test leaves is removed."""
    chosen = f"understudy-test-{secrets.token_hex(6)}"
    yield chosen
    for name in os.listdir(leftovers.SHM):
        if chosen in name:
            os.unlink(os.path.join(leftovers.SHM, name))


def files_of(prefix: str, directory: Path) -> set[str]:
    """What is there with this prefix, in shared memory and in the pod's directory."""
    there = [*os.listdir(leftovers.SHM), *os.listdir(directory)]
    return {name.removeprefix("sem.").removeprefix(prefix) for name in there if prefix in name}


def started(pod: Pod, prefix: str) -> Engine:
    """An engine whose backend has used one file of each kind, all of which are on file; one of
    them was there before."""
    before = os.path.join(leftovers.SHM, f"{prefix}-before")
    with open(before, "wb"):
        engine = pod.engine("e-0", "--leave-behind", prefix, flags=QUICK)
    engine.until("active")
    until(lambda: sum(prefix in name for name in on_file(pod)) == 4, "four names to be on file")
    assert files_of(prefix, pod.directory) == {
        *("-before", "-mapped", "-semaphore", ".socket", ".store")
    }
    return engine


def on_file(pod: Pod) -> list[str]:
    """Names on the engine's list; the garbage that a test put there has names of its own length."""
    path = pod.directory / "leftovers_e-0.json"
    return [name for name, *_ in json.loads(path.read_text())["names"]] if path.exists() else []


@pytest.mark.slow
def test_a_killed_supervisors_successor_removes_it(pod, lock, prefix):
    """Kill the supervisor, so that no process is left that saw the files: the next one of the same
    engine finds the list."""
    engine = started(pod, prefix)
    engine.process.kill()
    engine.process.wait()
    assert files_of(prefix, pod.directory) > {"-before"}
    pod.engine("e-0", flags=QUICK)
    until(lambda: files_of(prefix, pod.directory) == {"-before"}, "the files to be removed")
    until(lambda: on_file(pod) == [], "the list to be empty")


@pytest.mark.slow
def test_all_that_a_killed_tree_left_is_removed(pod, lock, prefix):
    """Kill the backend and let none come back: its semaphore, its socket and the file that it told
    of are gone, one event names them, and what was there before is not touched. Its mapping, which
    a stranger has, too, stays, and stays on the list, until he has gone."""
    engine = started(pod, prefix)
    path = os.path.join(leftovers.SHM, f"{prefix}-mapped")
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait() == 0
        assert files_of(prefix, pod.directory) == {"-before", "-mapped"}
        assert on_file(pod) == [path]
        assert "files left by dead processes" in engine.errors.read_text()
    pod.engine("e-0", flags=QUICK)
    until(lambda: files_of(prefix, pod.directory) == {"-before"}, "the file to be removed")
    until(lambda: on_file(pod) == [], "the list to be empty")


def test_a_second_supervisor_of_an_engine_touches_nothing(pod, lock, prefix):
    """Goal: a supervisor that is refused has changed nothing. Method: start it while the first one
    serves, with files that only the list knows: every file is there and the same afterwards."""
    first = started(pod, prefix)
    state = pod.directory / "engine_e-0.json"
    until(lambda: state.exists() and '"active"' in state.read_text(), "its last state on disk")
    files, listed = contents_of(pod.directory), on_file(pod)
    second = pod.engine("e-0", flags=QUICK)
    assert second.wait() == 1
    assert f"pid {first.process.pid} holds" in second.errors.read_text()
    assert files_of(prefix, pod.directory) == {
        *("-before", "-mapped", "-semaphore", ".socket", ".store")
    }
    assert contents_of(pod.directory) == files
    assert on_file(pod) == listed
    assert first.state == "active"


def contents_of(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and content of each file there but the log, which both supervisors write."""
    return {
        path.name: (path.stat().st_ino, path.read_bytes() if path.is_file() else b"")
        for path in directory.iterdir()
        if path.suffix != ".stderr"
    }


def test_another_file_under_the_same_name_is_not_removed(prefix):
    """Replace a file by one of the same name after it was seen: it is not that one, and stays."""
    path = os.path.join(leftovers.SHM, prefix)
    with open(path, "wb"):
        name = leftovers.name_of(path)
    assert name is not None
    os.rename(path, f"{path}-aside")
    with open(path, "wb"):
        assert leftovers.remove(name) is None
    assert os.path.exists(path)
    os.rename(f"{path}-aside", path)
    assert leftovers.remove(name) == 0
    assert not os.path.exists(path)
