"""Ctrl-C at any moment of a command ends it without a stack trace, with the code of an
interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from understudy.pod.ports import free_offset

COMMANDS = ("understudy", "lockserver", "gms", "engine", "gateway", "pool")
WAIT_S = 60.0
# As a script does it; Python's own start, in which nothing of ours runs yet, is left out.
START = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    " import plumbing.entry; print('ready', flush=True); plumbing.entry.{}()"
)
INTERRUPTED = (-signal.SIGINT, 130)


def interrupted(command: str, *words: str, after_s: float) -> tuple[int, str]:
    """The exit code and output of a command that gets SIGINT some time after its entry."""
    with subprocess.Popen(
        [sys.executable, "-c", START.format(command), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(after_s)  # the moment of the signal is what varies here
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            output = process.stdout.read()
            return process.wait(WAIT_S), output
        finally:
            process.kill()


@pytest.mark.parametrize("command", COMMANDS)
def test_interrupt_while_a_command_is_imported_is_silent(command: str):
    code, output = interrupted(command, "--help", after_s=0.0)
    assert "Traceback" not in output
    assert code in (*INTERRUPTED, 0)  # 0: it was faster


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.05, 0.2, 0.4, 0.7, 1.5])
@pytest.mark.parametrize(
    "words",
    [
        ("status", "--watch"),
        ("pool", "status", "--watch"),
        ("ui",),
        ("drill", "--kills=50"),
        ("up",),
    ],
    ids=" ".join,
)
def test_interrupt_of_what_runs_on_is_silent(
    tmp_path: Path, words: tuple[str, ...], after_s: float
):
    """Method: SIGINT to the process group during imports, while the model is made, before and
    after the signal handlers are there."""
    flags = [f"--dir={tmp_path / 'pod'}"] if words[0] != "drill" else []
    if words[0] == "up":
        flags += [f"--port-offset={free_offset()}"]
    if words[0] == "ui":
        flags += ["--http-port=0"]
    code, output = interrupted("understudy", *words, *flags, after_s=after_s)
    for trace in ("Traceback", "Exception ignored", "Aborted!"):
        assert trace not in output
    stops_in_order = words[0] in ("up", "ui")
    ended = (0, *INTERRUPTED) if stops_in_order else INTERRUPTED
    assert code in ended, output


def test_ignored_interrupt_stays_ignored():
    """Goal: `nohup understudy up &` is not ended by somebody's Ctrl-C."""
    ignoring = START.format("understudy").replace("SIG_DFL", "SIG_IGN")
    code = f"{ignoring.rpartition(';')[0]}; import sys; sys.argv[1:] = ['--version']"
    check = (
        f"{code}\ntry: plumbing.entry.understudy()\nexcept SystemExit: pass\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)
