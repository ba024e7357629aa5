"""Processes that get no CPU for a while, without a trace in them.

Unlike SIGSTOP, which tests use themselves, this leaves a process in state R or S, and its sockets
go on filling: it is moved to a control group whose quota a process of this program has used up.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from plumbing.service import procfs

WHO = ("servers", "tests", "threads", "any")
LEAST_MS = 20.0
MOST_MS = 300.0
CONTROLLER = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 1_000_000  # the longest that the kernel accepts
QUOTA_US = 1_000  # the least; the spinner takes it at once


class NoCpu:
    """A control group whose quota its spinner has always just used up."""

    def __init__(self) -> None:
        self._path = CONTROLLER / f"understudy-stutter-{os.getpid()}"
        self._path.mkdir()
        (self._path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._path / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        self._spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        (self._path / "cgroup.procs").write_text(str(self._spinner.pid))

    def stall(self, victim: int, seconds: float, *, is_thread: bool) -> None:
        """
        Raises:
            OSError: `victim` has ended.
        """
        home = CONTROLLER / _group_of(victim).lstrip("/")
        try:
            (self._path / ("tasks" if is_thread else "cgroup.procs")).write_text(str(victim))
            time.sleep(seconds)
        finally:
            self._send_home(home)

    def _send_home(self, home: Path) -> None:
        """Everybody but the spinner: the victim, and what it has started meanwhile."""
        while others := set(self._members()) - {str(self._spinner.pid)}:
            for each in others:
                with contextlib.suppress(ProcessLookupError):
                    (home / "tasks").write_text(each)

    def _members(self) -> list[str]:
        return (self._path / "tasks").read_text().split()

    def close(self) -> None:
        self._spinner.kill()
        self._spinner.wait()
        self._path.rmdir()


class Stalls:
    """One process or thread of a command after the other gets no CPU."""

    def __init__(self, who: str, most_ms: float, pause_ms: float, rng: random.Random) -> None:
        self._who, self._most_ms, self._pause_ms, self._rng = who, most_ms, pause_ms, rng

    def run(self, command: subprocess.Popen[bytes], log: TextIO) -> None:
        """Until `command` ends; each stall is a line of `log`."""
        with contextlib.closing(NoCpu()) as no_cpu:
            while command.poll() is None:
                time.sleep(self._rng.expovariate(1000 / self._pause_ms))
                who = self._rng.choice(WHO[:3]) if self._who == "any" else self._who
                ms = self._rng.uniform(LEAST_MS, self._most_ms)
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    if victim := self._victim(command.pid, who):
                        words = " ".join(_words(victim))[:120]
                        print(
                            f"{time.time():.3f} {ms:3.0f} ms {who} {victim} {words}",
                            file=log,
                            flush=True,
                        )
                        no_cpu.stall(victim, ms / 1000, is_thread=who == "threads")

    def _victim(self, root: int, who: str) -> int | None:
        found = procfs.descendants(root)
        if who == "threads":
            found = [int(each) for pid in found for each in os.listdir(f"/proc/{pid}/task")]
        else:
            found = [each for each in found if is_test_process(each) == (who == "tests")]
        return self._rng.choice(found) if found else None


def is_test_process(pid: int) -> bool:
    """Whether it is pytest or a worker of its, which executes what it reads."""
    words = _words(pid)
    return "pytest" in words or any(word.startswith("import sys;exec(eval(") for word in words)


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    return []


def _group_of(pid: int) -> str:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return path
    raise ProcessLookupError(pid)
