"""The sweep of faults: its shim fails the call that is meant and no other, and a pod survives the
calls that once did harm.

Method: a real interpreter under the shim, one call after the other; a real pod for a fixed sample
of the sweep, each case named by the function that makes the call.
"""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sweep_faults.shim import CAN_SHOW_STACKS, CONTROL_ENV, KINDS, Control, build
from tests.sweep_faults.sweep import Case, Outcome, Sweep, Verdict
from understudy.up.models import make_random_model

pytestmark = pytest.mark.skipif(not CAN_SHOW_STACKS, reason="this Python hides _Py_DumpTraceback")

WHOLE_S = 60.0  # a busy machine; the sweep itself asks for 30 s
EMFILE, EAGAIN, ENOSPC = errno.EMFILE, errno.EAGAIN, errno.ENOSPC

# What each call is called from; every line is run in a function of its own.
PROGRAM = """
import os, socket, subprocess, sys, tempfile, threading

here = tempfile.mkdtemp()
listener = socket.create_server(("127.0.0.1", 0))
waiting = [socket.create_connection(listener.getsockname()) for _ in range(2)]
ours, theirs = socket.socketpair()
for _ in range(2):
    socket.send_fds(theirs, [b"x"], [0])
file = os.open(f"{here}/file", os.O_RDWR | os.O_CREAT)

def received():
    data, fds, flags, _ = socket.recv_fds(ours, 1, 4)
    if flags & socket.MSG_CTRUNC:
        raise OSError(24, "truncated")

def started():
    try:
        thread = threading.Thread(target=int)
        thread.start()
    except RuntimeError as error:
        raise OSError(11, str(error)) from error
    thread.join()

def bound():
    name = f"{here}/{len(os.listdir(here))}.sock"
    socket.socket(socket.AF_UNIX).bind(name)

def renamed():
    os.rename(f"{here}/file", f"{here}/file")

CALLS = {
    "socket": socket.socket,
    "socketpair": socket.socketpair,
    "accept": listener.accept,
    "dup": lambda: os.dup(0),
    "socket.dup": listener.dup,
    "pipe": os.pipe,
    "open": lambda: os.open("/dev/null", os.O_RDONLY),
    "opendir": lambda: os.scandir("/proc").close(),
    "memfd_create": lambda: os.memfd_create("x"),
    "pidfd_open": lambda: os.pidfd_open(os.getpid()),
    "recvmsg": received,
    "vfork": lambda: subprocess.run(["true"]),
    "pthread_create": started,
    "new file": lambda: os.open(f"{here}/new", os.O_WRONLY | os.O_CREAT),
    "write": lambda: os.write(file, b"x"),
    "pwrite": lambda: os.pwrite(file, b"x", 0),
    "ftruncate": lambda: os.ftruncate(file, 1),
    "fallocate": lambda: os.posix_fallocate(file, 0, 1),
    "rename": renamed,
    "bind": bound,
}

def wanted_call(call):
    try:
        call()
    except OSError as error:
        return error.errno
    return 0

print([wanted_call(CALLS[sys.argv[1]]) for _ in range(2)])
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def control(tmp_path: Path, library: Path) -> Control:
    (tmp_path / "calls.py").write_text(PROGRAM)
    return Control(tmp_path, library)


def run(control: Control, call: str) -> str:
    """The output of PROGRAM for `call` in a process under the shim."""
    path = Path(control.environment[CONTROL_ENV]).parent / "calls.py"
    command = [sys.executable, str(path), call]
    env = {**os.environ, **control.environment, "PYTHONDEVMODE": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("call", "kind", "error"),
    [
        *((call, "descriptor", EMFILE) for call in ("socket", "socketpair", "accept", "dup")),
        *((call, "descriptor", EMFILE) for call in ("socket.dup", "pipe", "open", "opendir")),
        *((call, "descriptor", EMFILE) for call in ("memfd_create", "pidfd_open", "recvmsg")),
        ("vfork", "process", EAGAIN),
        ("pthread_create", "thread", EAGAIN),
        *((call, "file", ENOSPC) for call in ("new file", "write", "pwrite", "ftruncate")),
        *((call, "file", ENOSPC) for call in ("fallocate", "rename", "bind")),
    ],
)
def test_a_call_fails_once_and_then_succeeds(
    control: Control, call: str, kind: str, error: int
) -> None:
    control.arm([sys.executable], KINDS[kind], ":wanted_call:")
    assert run(control, call).split("\n")[-2] == f"[{error}, 0]"
    assert control.fired == 1


@pytest.mark.parametrize(
    ("process", "kind", "site"),
    [
        (["another program"], "descriptor", "pipe@"),
        ([sys.executable, "!calls.py pipe"], "descriptor", "pipe@"),
        ([sys.executable], "file", ":wanted_call:"),
        ([sys.executable], "descriptor", "pidfd_open@"),
    ],
)
def test_no_other_process_kind_or_site_is_hit(
    control: Control, process: Sequence[str], kind: str, site: str
) -> None:
    control.arm(process, KINDS[kind], site)
    assert run(control, "pipe") == "[0, 0]\n"
    assert control.fired == 0


def test_recording_names_each_site_once_with_the_functions_that_lead_to_it(
    control: Control,
) -> None:
    control.record()
    assert run(control, "pipe") == "[0, 0]\n"
    found = [call for call in control.calls() if ":wanted_call:" in call.site]
    assert len(found) == 1
    assert found[0].site.startswith("pipe@calls.py:wanted_call:")
    assert (found[0].kinds, found[0].has_failed) == (KINDS["descriptor"].bit, False)
    assert sys.executable in found[0].process


def test_nothing_fails_or_is_recorded_at_rest(control: Control) -> None:
    control.arm([sys.executable], KINDS["descriptor"], "")
    control.rest()
    assert run(control, "pipe") == "[0, 0]\n"
    assert (control.fired, control.calls()) == (0, [])


# ---------------------------------------------------------------------- a pod

# Each of these once took failover away, or an engine, or a part of the pod.
SAMPLE = (
    # A supervisor could not start its backend: it stayed in `init`, without a process. Its own
    # limit ends it now, and it starts again.
    Case("relaunch", "standby-supervisor", "descriptor", "socketpair@"),
    # A backend could not open its checkpoint: it was called broken, and its supervisor ended.
    Case("relaunch", "standby-model", "descriptor", "engine/backends/shards.py:"),
    # The active engine's supervisor could not dial a restarted lock server: it died.
    Case("reconnect", "active-supervisor", "descriptor", "socket@"),
    # A device's server could not be started: the whole memory service ended.
    Case("gms-reconnect", "gms", "process", ""),
)


@pytest.mark.slow
def test_a_pod_is_whole_after_each_call_of_a_sample_has_failed(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: it heals by itself, nothing more is started again, and the next death of the active
    engine leads to a takeover."""
    monkeypatch.delenv("PYTHONDEVMODE", raising=False)  # the pod runs as users run it

    async def sweep_sample() -> list[Outcome]:
        model = await make_random_model(tmp_path / "model")
        sweep = Sweep(tmp_path, model, library, WHOLE_S, print)
        try:
            return [await sweep.run(case) for case in SAMPLE]
        finally:
            await sweep.close()

    outcomes = asyncio.run(sweep_sample())
    again = ["the supervisor of engine-1 was started again"]
    assert [(each.case, each.verdict, each.cost) for each in outcomes] == [
        (case, Verdict.WHOLE, again if case is SAMPLE[0] else []) for case in SAMPLE
    ]
