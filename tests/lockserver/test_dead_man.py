"""The kernel kills a process when its timer fires: real processes, real signals."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys

import pytest

from tests.helpers import until

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
may_unshare = pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode != 0,
    reason="this machine does not let us make a PID namespace",
)

PROGRAM = """
import os, signal, subprocess, sys, threading, time
from lockserver.client.lease import DeadMan, now_ms
{body}
"""


class Program:
    """A Python program that prints lines; `DeadMan` and `now_ms` are defined in it."""

    def __init__(self, body: str, *wrapper: str) -> None:
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-c", PROGRAM.format(body=body)], stdout=subprocess.PIPE
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def ended(self) -> int:
        until(lambda: self.process.poll() is not None, "the program to be ended")
        assert self.process.returncode is not None
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start():
    """`start(body, *wrapper)`: a `Program`, killed after the test."""
    programs: list[Program] = []

    def make(body: str, *wrapper: str) -> Program:
        programs.append(Program(body, *wrapper))
        return programs[-1]

    yield make
    for program in programs:
        program.close()


@pytest.mark.parametrize(
    "body",
    [
        "DeadMan().arm(now_ms() + 50); signal.pause()",
        "DeadMan().arm(now_ms() + 500); os.kill(os.getpid(), signal.SIGSTOP)",
        # C code that never returns and holds the interpreter's lock.
        "import ctypes; DeadMan().arm(now_ms() + 50); ctypes.PyDLL(None).pause()",
    ],
    ids=["idle", "stopped", "holds the interpreter"],
)
def test_process_is_killed_whatever_it_does(start, body):
    """Goal: the timer needs neither the event loop nor Python, and SIGSTOP is no protection."""
    assert start(body).ended() == -signal.SIGKILL


def test_rearmed_or_disarmed_timer_does_nothing_at_the_old_time(start):
    """Goal: only the last setting counts. Method: set three timers that are due at once, in order;
    only the last one remains, and the process prints what it has outlived."""
    program = start(
        "later, off, last = DeadMan(), DeadMan(), DeadMan()\n"
        "begun = now_ms()\n"
        "for each in (later, off): each.arm(begun + 1000)\n"
        "last.arm(begun + 3_600_000)\n"
        "later.arm(begun + 3_600_000); off.disarm()\n"
        "while now_ms() < begun + 1100: time.sleep(0.01)\n"
        "print('outlived', flush=True)\n"
        "last.arm(now_ms() + 50)\n"
        "signal.pause()"
    )
    assert program.line() == "outlived"
    assert program.ended() == -signal.SIGKILL


def test_timer_in_the_past_fires_at_once(start):
    """Goal: a lease that expires while the timer is being set still ends the process. Method: arm
    for a moment ago, and for a time before the machine booted."""
    for at in ("now_ms() - 1000", "-5"):
        program = start(f"DeadMan().arm({at}); signal.pause()")
        assert program.ended() == -signal.SIGKILL


@may_unshare
def test_pid_1_of_a_container_is_refused(start):
    """Goal: who could not be killed holds no lock. Method: PID 1 of a namespace."""
    program = start(
        "from plumbing.errors import UnderstudyError\n"
        "try: DeadMan()\n"
        "except UnderstudyError as error: print(error, flush=True)",
        *NAMESPACE,
    )
    assert re.search(r"understudy-init.*\[lock\.no_dead_man\]", program.line())


def test_missing_timer_is_a_clear_error(start):
    """Goal: a process that could not be killed in time is refused with an error. Method: allow no
    queued signals in that process, so that the kernel refuses the timer."""
    program = start(
        "import resource\n"
        "from plumbing.errors import UnderstudyError\n"
        f"resource.setrlimit({resource.RLIMIT_SIGPENDING}, (0, 0))\n"
        "try: DeadMan()\n"
        "except UnderstudyError as error: print(error, flush=True)"
    )
    assert re.search(r"RLIMIT_SIGPENDING.*\[lock\.no_dead_man\]", program.line())
