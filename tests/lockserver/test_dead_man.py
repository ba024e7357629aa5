"""The kernel kills a process when its timer fires: real processes, real signals."""

from __future__ import annotations

import re
import resource
import signal
import sys

import pytest

from tests.helpers import NAMESPACE, can_unshare, run_command

PROGRAM = """
import os, resource, signal, time
from lockserver.client.lease import DeadMan, now_ms
from plumbing.errors import UnderstudyError
{body}
"""
REFUSED = "try: DeadMan()\nexcept UnderstudyError as error: print(error)"


def run(body: str, *wrapper: str) -> tuple[int, str]:
    """How a program with `DeadMan` and `now_ms` ended, and what it printed."""
    command = [*wrapper, sys.executable, "-c", PROGRAM.format(body=body)]
    done = run_command(command, timeout=60)
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    "body",
    [
        "DeadMan().arm(now_ms() + 50); signal.pause()",
        "DeadMan().arm(now_ms() + 500); os.kill(os.getpid(), signal.SIGSTOP)",
        # C code that never returns and holds the interpreter's lock.
        "import ctypes; DeadMan().arm(now_ms() + 50); ctypes.PyDLL(None).pause()",
        # A lease that expires while the timer is being set; a time before the machine booted.
        "DeadMan().arm(now_ms() - 1000); signal.pause()",
        "DeadMan().arm(-5); signal.pause()",
    ],
    ids=["idle", "stopped", "holds the interpreter", "in the past", "before the boot"],
)
def test_process_is_killed_whatever_it_does(body):
    """Goal: the timer needs neither the event loop nor Python, and SIGSTOP is no protection."""
    assert run(body) == (-signal.SIGKILL, "")


def test_rearmed_or_disarmed_timer_does_nothing_at_the_old_time():
    """Goal: only the last setting counts. Method: set three timers that are due at once, in order;
    only the last one remains, and the process prints what it has outlived."""
    body = (
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
    assert run(body) == (-signal.SIGKILL, "outlived")


@pytest.mark.skipif(not can_unshare(), reason="this machine allows no PID namespace")
def test_pid_1_of_a_container_is_refused():
    """Goal: who could not be killed holds no lock. Method: PID 1 of a namespace."""
    assert re.search(r"understudy-init.*\[lock\.no_dead_man\]", run(REFUSED, *NAMESPACE)[1])


def test_missing_timer_is_a_clear_error():
    """Goal: a process that could not be killed in time is refused with an error. Method: allow no
    queued signals in that process, so that the kernel refuses the timer."""
    none = f"resource.setrlimit({resource.RLIMIT_SIGPENDING}, (0, 0))\n"
    assert re.search(r"RLIMIT_SIGPENDING.*\[lock\.no_dead_man\]", run(none + REFUSED)[1])
