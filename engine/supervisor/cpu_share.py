"""The CPUs of an engine that loads while another one serves: half of them, until it is prepared.

Owns the limit: every process of the tree inherits it, and it is lifted thread by thread, when the
engine is prepared or once no other engine holds the lock. By affinity, because a lower priority
cannot be raised again without privileges. Never fatal: a limit that fails costs speed.

Surprising: libraries count the CPUs of their process when they are loaded, and keep as many threads
for good. A backend whose speed depends on that is told of all CPUs (`CPUS_ENV`). And a thread that
has another affinity than the limit has chosen it, so it keeps it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from engine.backends.process import CPUS_ENV
from plumbing.service import procfs
from plumbing.service.events import EventLog

# Looks after the engine is prepared, one a second. A thread that was still limited may have started
# another, and a process that leaves the limit for a moment, to load a library, may return to it
# just after it was lifted.
LAST_LOOKS = 5

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


class CpuShare:
    """The CPUs of one incarnation. `limit`: what it may use now, None for all."""

    def __init__(self, log: EventLog, find_serving: Callable[[], str | None]) -> None:
        """`find_serving`: the engine that needs the other half, if any."""
        self.available = frozenset(os.sched_getaffinity(0))
        self.serving = find_serving()
        self.limit = half_of(self.available) if self.serving is not None else None
        self._find_serving = find_serving
        self._log = log
        self._lifted: frozenset[int] | None = None  # the limit that was lifted
        self._looks = LAST_LOOKS
        self._has_failed = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables to add to the backend's environment."""
        if self.limit is None:
            return {}
        return {CPUS_ENV: ",".join(map(str, sorted(self.available)))}

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """A process that this thread starts in this block is limited."""
        if self.limit is not None and not self._set(0, self.limit):
            self.limit = None
        if self.limit is None:
            yield
            return
        text = f"limited to {self.describe()} until prepared, because {self.serving} holds the lock"
        self._log.record("engine.cpus", text, data={"cpus": cpu_list(self.limit)})
        try:
            yield
        finally:
            self._set(0, self.available)

    def describe(self) -> str:
        """`CPUs 8-15 of 0-15`."""
        assert self.limit is not None
        return f"CPUs {cpu_list(self.limit)} of {cpu_list(self.available)}"

    def lift(self, why: str) -> None:
        """Let the tree use all CPUs from now on."""
        if self.limit is None:
            return
        self._lifted, self.limit = self.limit, None
        self._widen()
        text = f"on all CPUs again ({cpu_list(self.available)}): {why}"
        self._log.record("engine.cpus", text, data={"cpus": cpu_list(self.available)})

    def tick(self, *, is_loading: bool) -> None:
        """Lift the limit once no other engine is serving, and of whatever acquired it again."""
        if is_loading and self.limit is not None and self._find_serving() is None:
            self.lift("no other engine holds the lock")
        if self._lifted is not None and self._looks:
            self._widen()
            self._looks -= not is_loading

    def _widen(self) -> None:
        """Every thread that has the limit gets all CPUs."""
        with suppress(OSError):  # no descriptor left to look: the next tick does it
            for thread in _threads_below():
                with suppress(ProcessLookupError):  # it has ended
                    if self._lifted == frozenset(os.sched_getaffinity(thread)):
                        self._set(thread, self.available)

    def _set(self, thread: int, cpus: frozenset[int]) -> bool:
        try:
            os.sched_setaffinity(thread, cpus)
        except ProcessLookupError:
            return False
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                text = f"cannot change which CPUs the backend may use: {error.strerror}"
                self._log.record("engine.cpus", text, "warning")
            return False
        return True


def cpu_list(cpus: Iterable[int]) -> str:
    """`0-3,8`, as the kernel writes it."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def half_of(cpus: Iterable[int]) -> frozenset[int] | None:
    """The upper half of `cpus`, in whole cores where they have several CPUs; None of one CPU."""
    ordered = sorted(cpus, key=lambda cpu: (_core_of(cpu), cpu))
    return frozenset(ordered[-(len(ordered) // 2) :]) if len(ordered) > 1 else None


def _threads_below() -> Iterator[int]:
    for pid in procfs.descendants(os.getpid()):
        with suppress(FileNotFoundError):  # it has ended
            yield from map(int, os.listdir(f"/proc/{pid}/task"))


def _core_of(cpu: int) -> int:
    """The lowest CPU of the same core; `cpu` itself where the kernel does not say."""
    try:
        with open(SIBLINGS.format(cpu)) as stream:
            found = re.match(r"\d+", stream.read())
    except OSError:
        found = None
    return int(found.group()) if found else cpu
