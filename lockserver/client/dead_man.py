"""A kernel timer that ends this process in time, whatever it is doing then.

Over TCP a holder must be gone before its lease can have expired. Its own loop sees to that, unless
it is stopped, swapped out or stuck; then a POSIX timer (timer_create(2)) does, which the kernel
runs without us: SIGKILL also ends a process that is stopped.

The surprising things:

- The clock is CLOCK_BOOTTIME, which goes on while the machine sleeps, and the time is absolute: a
  process that is preempted between reading a clock and setting the timer loses nothing.
- PID 1 of a PID namespace, which a supervisor is in its container, ignores a SIGKILL from inside,
  and a timer counts as inside (tried). A signal with a handler reaches it, and SIGCONT wakes it
  from a SIGSTOP. So there one timer's signal is handled by the C library's `_exit`, which needs
  neither Python nor its lock, and a second timer sends SIGCONT.
- Timers are neither inherited by a fork nor kept by an exec, and they belong to the process, not
  the thread. Processes that must end with this one have PDEATHSIG, or are in its PID namespace.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time

from plumbing.errors import InvariantError, UnderstudyError

CLOCK_BOOTTIME = time.CLOCK_BOOTTIME
TIMER_ABSTIME = 1  # linux/time.h
SIGEV_SIGNAL = 0  # asm-generic/siginfo.h
EXIT_SIGNAL = signal.SIGRTMAX  # for PID 1: no library and no shell uses it
NS_PER_S = 10**9


# A sigevent: value, signal, how to notify, and room; an itimerspec: interval and time, s and ns.
SIGEVENT = struct.Struct("@Pii48x")
ITIMERSPEC = struct.Struct("@4l")


def now_ms() -> float:
    """The clock of leases: CLOCK_BOOTTIME in milliseconds."""
    return time.clock_gettime_ns(CLOCK_BOOTTIME) / 1e6


class DeadMan:
    """Ends this process at the time it is armed for, unless it is armed again or disarmed."""

    def __init__(self) -> None:
        """Create the timers.

        Raises:
            UnderstudyError: `lock.no_dead_man`, the kernel refuses.
        """
        self.at_ms: float | None = None
        self._timers: list[ctypes.c_void_p] = []
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            if os.getpid() == 1:
                self._exit_on_signal()
                self._timers = [self._create(EXIT_SIGNAL), self._create(signal.SIGCONT)]
            else:
                self._timers = [self._create(signal.SIGKILL)]
        except (AttributeError, OSError) as error:  # a C library without them, or a limit
            self.close()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UnderstudyError(
                "lock.no_dead_man",
                f"the kernel refuses this process a timer that would end it with its lease"
                f" ({reason}), so it must not hold a lock over TCP; raise RLIMIT_SIGPENDING"
                " (ulimit -i), or use the lock server's Unix socket",
            ) from error

    def arm(self, at_ms: float) -> None:
        """End this process at `at_ms` (of `now_ms()`), and no longer at a time set before."""
        self.at_ms = at_ms
        # 0 would disarm; and the machine may have booted less than a lease ago.
        at_ns = max(1, int(at_ms * 1e6))
        for later, timer in enumerate(self._timers):  # woken only once the end is set
            self._set(timer, at_ns + later * NS_PER_S // 1000)

    def disarm(self) -> None:
        self.at_ms = None
        for timer in self._timers:
            self._set(timer, 0)

    def close(self) -> None:
        """Delete the timers."""
        self.at_ms = None
        for timer in self._timers:
            self._libc.timer_delete(timer)
        self._timers.clear()

    def _create(self, signum: int) -> ctypes.c_void_p:
        timer = ctypes.c_void_p()
        event = SIGEVENT.pack(0, signum, SIGEV_SIGNAL)
        if self._libc.timer_create(CLOCK_BOOTTIME, event, ctypes.byref(timer)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timer_create: {os.strerror(number)}")
        return timer

    def _set(self, timer: ctypes.c_void_p, at_ns: int) -> None:
        value = ITIMERSPEC.pack(0, 0, *divmod(at_ns, NS_PER_S))
        if self._libc.timer_settime(timer, TIMER_ABSTIME, value, None) != 0:
            number = ctypes.get_errno()
            raise InvariantError(f"timer_settime: {os.strerror(number)}")

    def _exit_on_signal(self) -> None:
        self._libc.signal.restype = ctypes.c_void_p
        leave = ctypes.cast(self._libc._exit, ctypes.c_void_p)
        self._libc.signal(ctypes.c_int(EXIT_SIGNAL), leave)
