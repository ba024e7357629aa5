"""Goal: a child dies with its parent, also when the parent dies before the child could ask."""

import os
import signal
import subprocess
import sys
import textwrap

from plumbing.service import procfs
from tests.helpers import until

CHILD = textwrap.dedent(
    """
    import os, signal
    from plumbing.service.process import arm_from_environment
    print("armed", arm_from_environment(), "UNDERSTUDY_PARENT_PID" in os.environ, flush=True)
    signal.pause()
    """
)


def spawn(program, **environ):
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_child_is_killed_when_its_parent_is():
    """Goal: PDEATHSIG; method: SIGKILL the middle one of three real processes."""
    middle = spawn(
        textwrap.dedent(
            f"""
            import os, signal, subprocess, sys
            from plumbing.service.process import parent_environment
            child = subprocess.Popen(
                [sys.executable, "-c", {CHILD!r}],
                env={{**os.environ, **parent_environment()}}, stdout=subprocess.PIPE, text=True)
            print(child.pid, child.stdout.readline(), flush=True)
            signal.pause()
            """
        )
    )
    with middle:
        child_pid, *said = middle.stdout.readline().split()
        assert said == ["armed", "True", "False"]
        pidfd = os.pidfd_open(int(child_pid))
        try:
            middle.kill()
            middle.wait()
            until(lambda: not procfs.is_alive(int(child_pid)), "the child's death")
        finally:
            os.close(pidfd)


def test_child_whose_parent_died_first_kills_itself():
    """Goal: the race before prctl; method: name a parent that is not ours."""
    with spawn(CHILD, UNDERSTUDY_PARENT_PID="1") as child:
        assert child.wait() == -signal.SIGKILL
        assert child.stdout.read() == ""


def test_table_of_descriptors_is_widened_at_once():
    """Goal: no later `open` waits for it to grow; method: the kernel's own count, in a new process
    that then has as many descriptors open as before."""
    program = textwrap.dedent(
        """
        import os, re
        from plumbing.service.process import widen_fd_table
        def state():
            status = open("/proc/self/status").read()
            return int(re.search(r"FDSize:\\s+(\\d+)", status)[1]), len(os.listdir("/proc/self/fd"))
        before = state()
        widen_fd_table(900)
        print(*before, *state())
        """
    )
    with spawn(program) as child:
        before, open_before, after, open_after = map(int, child.stdout.read().split())
    assert (before < 900 <= after, open_after) == (True, open_before)
