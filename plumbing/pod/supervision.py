"""When a supervisor restarts its server, calls it hung, or gives up; how long an end may take.

All but `ChildProcess` is pure. A supervisor restarts a server in place, because others still serve
(of `gms`, those of other devices); the first time at once, since newcomers wait for it. After
several short runs in a row the program gives up: its init then ends the container, so that the loop
shows where containers are listed.

Two kinds of ends never count towards giving up. A server that had answered and was then killed by
SIGKILL was killed from outside, by a drill or for lack of memory: it lost nothing, so it is
restarted at once however often that happens, and only the counter shows it. And a shortage of
descriptors, processes or memory is not the server's fault: a new container would find the same
machine, so the start is retried for ever, and status names what is short.

Silence is how long a server has owed an answer, not counting the time in which it, or the process
that listens for the answer, waited for a CPU: killing a server would not help a busy machine. A
server that is stopped, blocked or in an endless loop could run and does not answer: that is a hang.

Kubernetes, systemd and `understudy up` are told the same `GRACE_MS`: change all of them together.
"""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Mapping, Sequence

from msgspec import Struct

from plumbing.errors import GivenUpError
from plumbing.wire.fds import OwnedFd

DEATHS_MAX = 5  # in a row: 0 + 0.5 + 1 + 2 s of back-off and five start-ups, about ten seconds
LONG_LIFE_MS = 10_000.0  # a server that lived longer did not die of how it was started
BACKOFF_MS, BACKOFF_MS_MAX = 500.0, 30_000.0
SIGKILL = 9  # signal(7); a core does not import the module
# A bad flag or path does not fix itself. But flags that have worked once are not bad: then what
# they name is gone, for example a GPU.
USAGE_EXIT_CODE = 2
# What the kernel answers while descriptors, processes, threads or memory run out (fork(2), open(2),
# socket(2)).
SHORTAGES = frozenset(
    {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}
)
SHORTAGE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the server met a shortage while it started
SHORTAGE_BACKOFF_MS_MAX = 5_000.0  # an attempt costs milliseconds, and newcomers wait


class StartAgain(Struct, frozen=True):
    """Restart it after `delay_ms`."""

    delay_ms: float


class GiveUp(Struct, frozen=True):
    """End the program with this exit code: 2 for bad flags, else that of GivenUpError."""

    exit_code: int


class Restarts:
    """The deaths, and the failed starts, in a row of one server."""

    def __init__(self) -> None:
        self.deaths = 0
        self.shortages = 0
        self.deaths_total = 0
        self._has_ever_answered = False

    def died(self, lived_ms: float, returncode: int, *, had_answered: bool) -> StartAgain | GiveUp:
        """What to do about a server that lived `lived_ms`; a signal is a negative returncode."""
        self.deaths_total += 1
        self._has_ever_answered |= had_answered
        if returncode == SHORTAGE_EXIT_CODE:
            return self._wait_out_shortage()
        self.shortages = 0
        was_killed = had_answered and returncode == -SIGKILL
        self.deaths = 1 if lived_ms >= LONG_LIFE_MS or was_killed else self.deaths + 1
        is_misused = returncode == USAGE_EXIT_CODE and not self._has_ever_answered
        return GiveUp(USAGE_EXIT_CODE) if is_misused else self._next()

    def not_started(self, error_number: int | None) -> StartAgain | GiveUp:
        """What to do about a server whose process could not be created, with the kernel's errno."""
        if error_number in SHORTAGES:
            return self._wait_out_shortage()
        self.deaths += 1
        return self._next()

    def _next(self) -> StartAgain | GiveUp:
        if self.deaths >= DEATHS_MAX:
            return GiveUp(GivenUpError.exit_code)
        if self.deaths == 1:
            return StartAgain(0.0)
        return StartAgain(min(BACKOFF_MS * 2 ** (self.deaths - 2), BACKOFF_MS_MAX))

    def _wait_out_shortage(self) -> StartAgain:
        self.shortages += 1
        # At most 2 ** 9: it may last for days.
        delay_ms = BACKOFF_MS * 2 ** min(self.shortages - 1, 9)
        return StartAgain(min(delay_ms, SHORTAGE_BACKOFF_MS_MAX))


# Between two looks: if more has passed, we were the ones who could not run or listen.
LOOK_MS_MAX = 2_000.0


class CpuTimes(Struct, frozen=True):
    """What the kernel has counted for a thread so far."""

    is_runnable: bool  # runs, or waits for a CPU
    ran_ms: float
    waited_ms: float  # for a CPU


class Silence:
    """Counts `ms`; `answered` starts anew."""

    def __init__(self) -> None:
        self.ms = 0.0
        self._last: CpuTimes | None = None

    def answered(self) -> None:
        self.ms = 0.0

    def look(self, elapsed_ms: float, cpu: CpuTimes | None) -> None:
        """`elapsed_ms` have passed since the last look; `cpu` is the server's, None if unknown."""
        last, self._last = self._last, cpu
        could_not_run_ms = 0.0
        if last is not None and cpu is not None:
            could_not_run_ms = cpu.waited_ms - last.waited_ms
            if cpu.is_runnable and cpu.ran_ms == last.ran_ms:
                could_not_run_ms = elapsed_ms  # a wait is only counted when it ends
        self.ms += max(0.0, min(elapsed_ms, LOOK_MS_MAX) - could_not_run_ms)


GRACE_MS = 45_000
ENDING_MS = 2_000  # of it: for the errors of streams that are left, for dying trees, for exits
DRAIN_MS = GRACE_MS - ENDING_MS


class ChildProcess:
    """A running child, started and watched on its supervisor's loop; `wait` for its end before it
    is dropped.

    Not asyncio's subprocess: on uvloop, each start that fails for lack of descriptors loses up to
    three more (tried), and such a start is retried for ever.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        """Start it; `pass_fds` are lent, and have the same numbers there.

        Raises:
            OSError: there is no such program, or no room for a process or its descriptors; nothing
                of the attempt is left.
        """
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=dict(environ), pass_fds=pass_fds
        )
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        try:
            self._pidfd = OwnedFd(os.pidfd_open(self._popen.pid))
            self._loop.add_reader(self._pidfd.fileno(), self._has_ended)
        except BaseException:
            self._popen.kill()  # nobody could watch it
            self._popen.wait()
            raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; a signal is negative."""
        return self._popen.returncode

    async def wait(self) -> int:
        """Its returncode, once it has ended."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        self._popen.kill()

    def _has_ended(self) -> None:
        self._loop.remove_reader(self._pidfd.fileno())
        self._pidfd.close()
        self._ended.set_result(self._popen.wait())
