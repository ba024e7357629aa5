"""A supervisor while something is short. Its own limit of descriptors ends it; what the machine
lacks is waited for, and its status names it. `make sweep` fails every single call."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from plumbing.service import procfs
from plumbing.service.init import SHORTAGE
from tests.engine.pod import QUICK
from tests.helpers import until

NONE = 3  # no descriptor below this one is ever free


def patched(patch: str) -> tuple[str, ...]:
    """A wrapper that runs `engine` with `patch` applied."""
    program = f"{patch}\nimport sys\ndel sys.argv[1:4]\nfrom engine.cli import main\nmain()"
    return (sys.executable, "-c", program)


def short_at(place: str, method: str, flag: Path) -> str:
    """A patch: while `flag` exists, the machine has no file left for that method."""
    module, _, name = place.rpartition(".")
    return f"""
import errno, os
from {module} import {name} as kind
real = kind.{method}
def short(*args, **more):
    if os.path.exists({str(flag)!r}):
        raise OSError(errno.ENFILE, "short")
    return real(*args, **more)
kind.{method} = short
"""


def test_supervisor_that_has_used_up_its_descriptors_ends_and_an_init_restarts_it(pod, lock):
    """Goal: what can only be a leak of ours is not served on with. Method: lower the limit: exit
    code 75, one sentence, and no process of the backend is left."""
    engine = pod.active("e-0")
    backend = engine.pids()["http"]
    resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE, (NONE, NONE))
    code = engine.wait()
    assert code == SHORTAGE, engine.errors.read_text()
    assert "[wire.no_descriptors]" in engine.errors.read_text()
    until(lambda: not procfs.is_alive(backend), "the backend's end")


@pytest.mark.parametrize(
    ("place", "method", "state", "words"),
    [
        ("engine.supervisor.tree.Tree", "check_witness", "init", "check what the backend's"),
        ("engine.supervisor.lock_side.BackendListener", "_bind", "waking", "listening socket"),
    ],
)
def test_what_a_shortage_prevents_is_done_once_it_is_over(
    pod, lock, directory, place, method, state, words
):
    """Goal: what cannot be looked at is no proof, and a grant survives a shortage. Method: the
    check for standby, and the socket of a wake; the engine says why it waits, and goes on."""
    flag = directory / "short"
    flag.touch()
    wrapper = patched(short_at(place, method, flag))
    engine = pod.engine("e-0", flags=QUICK, wrapper=wrapper)
    engine.until(state)
    until(lambda: words in str(engine.status()["problems"]), "the problem")
    assert engine.state == state
    flag.unlink()
    document = engine.until("active")
    assert (document["engine"]["number"], document["problems"]) == (1, [])


@pytest.mark.slow
def test_a_state_file_that_could_not_be_written_is_written_later(pod, lock, directory):
    """Goal: the file shows the last state, without waiting for the next. Method: a directory in its
    place when the engine becomes active; then that is removed."""
    path = directory / "engine_e-0.json"
    path.mkdir()
    engine = pod.active("e-0")
    until(lambda: "cannot write" in str(engine.status()["problems"]), "the problem")
    path.rmdir()
    until(lambda: path.is_file() and '"active"' in path.read_text(), "the file")
    until(lambda: not engine.status()["problems"], "the problem to be over")


def test_an_error_in_a_callback_of_the_supervisor_ends_it(pod, lock):
    """Goal: an OSError of our own is not taken for a peer's. Method: a tick that raises one: the
    process ends with it, and so does its backend."""
    patch = """
from plumbing.service.procfs import CpuPressure
def sample(*_, **__):
    raise OSError(5, "injected")
CpuPressure.sample = sample
"""
    engine = pod.engine("e-0", flags=QUICK, wrapper=patched(patch))
    assert engine.wait() == 1
    assert "injected" in engine.errors.read_text()
