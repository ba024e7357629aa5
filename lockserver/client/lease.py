"""An engine's lease, as its supervisor may count on it, and the kernel timer that enforces it.

    sent(p, t) ──→ server ──→ renewed(p)        valid until  t + lease
                                                stop at      t + 60 % of it: the engine ends itself
                                                kill at      t + 80 % of it: the kernel ends it

The server counts a lease, and a margin, from when it *received* what it answers; the supervisor
from when it *sent* that. Sending comes first, so the supervisor always gives up before the server
does, however long either direction takes. Clocks only have to run at the same rate to within the
margin.

The surprising things about the lease:

- Only an answer renews a lease, never a message that was merely sent; an answer to something older
  than what was answered before changes nothing.
- A lock that was held when the lease had to stop stays lost, whatever is answered later. Answers
  still count as long as the lease has not expired in between: the tree is being reaped under it.
- A grant that arrives while the lease is not valid is not kept for later. It may have lain in a
  buffer while the server granted the lock to another. The want is sent again instead, and the
  server repeats what is true by then.

The supervisor's own loop stops it in time, unless it is stopped, swapped out or stuck; then a POSIX
timer (timer_create(2)) does, which the kernel runs without us: SIGKILL also ends a process that is
stopped. The surprising things about the timer:

- The clock is CLOCK_BOOTTIME, which continues while the machine sleeps, and the time is absolute: a
  process that is preempted between reading a clock and setting the timer loses nothing.
- PID 1 of a PID namespace ignores a SIGKILL from inside, and a timer counts as inside (tried). A
  container's PID 1 is `understudy-init`, so a supervisor that finds itself there is refused.
- Timers are neither inherited by a fork nor kept by an exec, and they belong to the process, not
  the thread. Processes that must end with this one have PDEATHSIG, or are in its PID namespace.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from plumbing.errors import InvariantError, UnderstudyError
from plumbing.text import duration

CLOCK_BOOTTIME = time.CLOCK_BOOTTIME
TIMER_ABSTIME = 1  # linux/time.h
SIGEV_SIGNAL = 0  # asm-generic/siginfo.h
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
        """Create the timer.

        Raises:
            UnderstudyError: `lock.no_dead_man`, the kernel refuses.
        """
        self.at_ms: float | None = None
        if os.getpid() == 1:
            raise UnderstudyError(
                "lock.no_dead_man",
                "this process is PID 1 of its container, which no timer of its own can end, so it"
                " must not hold a lock over TCP; start it under understudy-init",
            )
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._timer = self._create()
        except (AttributeError, OSError) as error:  # a C library without them, or a limit
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
        self._set(max(1, int(at_ms * 1e6)))

    def disarm(self) -> None:
        self.at_ms = None
        self._set(0)

    def _create(self) -> ctypes.c_void_p:
        timer = ctypes.c_void_p()
        event = SIGEVENT.pack(0, signal.SIGKILL, SIGEV_SIGNAL)
        if self._libc.timer_create(CLOCK_BOOTTIME, event, ctypes.byref(timer)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timer_create: {os.strerror(number)}")
        return timer

    def _set(self, at_ns: int) -> None:
        value = ITIMERSPEC.pack(0, 0, *divmod(at_ns, NS_PER_S))
        if self._libc.timer_settime(self._timer, TIMER_ABSTIME, value, None) != 0:
            number = ctypes.get_errno()
            raise InvariantError(f"timer_settime: {os.strerror(number)}")


STOP_FRACTION = 0.6  # from here to 80 % the engine kills and reaps its tree by itself
KILL_FRACTION = 0.8  # the last fifth is for the processes that die with the supervisor
BEATS_PER_LEASE = 10  # so that four lost answers in a row cost nothing
# Answers arrive in order; this many without one means that none will, and the newest counts most.
SENT_MAX = 64
# After this much of the lease without a message, a connection counts as half-open and is replaced:
# TCP itself would retry the old one less and less often, and there is time for another attempt.
SILENT_FRACTION = 0.4
SILENT_MS_MAX = 3_000.0  # for long leases too: a connection should be there when needed
# Until the first answer carries the lease: the shortest one allows six of these.
FIRST_BEAT_MS = 100.0


class LeaseKeeper:
    """What was sent when, what was answered, and until when that holds. Pure. `sent_ms`: when the
    message was sent whose answer renewed the lease of `lease_ms` last, if any did."""

    def __init__(self, clock: Callable[[], float] = now_ms) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Another incarnation, or none: messages of the last one renew nothing."""
        self.lease_ms: int | None = None
        self.sent_ms = 0.0
        self.is_held = False  # a grant was acted on
        self.is_lost = False  # it was, and the lock had to be given up
        self._sent: deque[tuple[int, float]] = deque(maxlen=SENT_MAX)

    def at_ms(self, fraction: float) -> float:
        """When this fraction of the lease is over; long ago without one."""
        return -math.inf if self.lease_ms is None else self.sent_ms + fraction * self.lease_ms

    def sent(self, progress: int) -> None:
        """To be called *before* a `want` or heartbeat for an incarnation goes out: the lease counts
        from here. `progress` grows each time."""
        self._sent.append((progress, self._clock()))

    def cut(self) -> None:
        """The connection is gone, and with it every answer that has not arrived."""
        self._sent.clear()

    def renewed(self, progress: int, lease_ms: int) -> bool:
        """The server answered; whether that renewed anything."""
        while self._sent and self._sent[0][0] < progress:
            self._sent.popleft()
        if not self._sent or self._sent[0][0] != progress:
            return False  # answered twice, sent for another incarnation, or never sent
        _, sent_ms = self._sent.popleft()
        if self.is_held and self._clock() >= self.at_ms(1.0):
            self.is_lost = True  # the server may have answered before it gave up
            return False
        self.sent_ms, self.lease_ms = sent_ms, lease_ms
        return True

    def may_act(self) -> bool:
        """Whether a grant that is read now may be acted on."""
        return not self.is_lost and self._clock() < self.at_ms(STOP_FRACTION)

    def hold(self) -> None:
        """A grant is acted on; repeating it is harmless. Only after `may_act`."""
        self.is_held = True

    def must_stop(self) -> bool:
        """Whether the held lock is lost, because no answer arrived for too long. Stays true."""
        self.is_lost |= self.is_held and self._clock() >= self.at_ms(STOP_FRACTION)
        return self.is_lost

    def valid_for_ms(self) -> float:
        """For status: how long the engine may still serve under the lease; 0 if it may not."""
        return 0.0 if self.is_lost else max(0.0, self.at_ms(STOP_FRACTION) - self._clock())


class LeaseWatch(LeaseKeeper):
    """The lease of one supervisor, over all incarnations, with the dead man."""

    def __init__(self, on_lost: Callable[[str], object], ender: DeadMan | None = None) -> None:
        """`on_lost` is called once, when the engine must stop serving.

        Raises:
            UnderstudyError: `lock.no_dead_man`, the kernel could not end this process in time.
        """
        self.heard_ms: float | None = None
        self._on_lost = on_lost
        self._ender = ender or DeadMan()
        self._timer: asyncio.TimerHandle | None = None
        super().__init__()

    def begin(self) -> None:
        """The last incarnation has been reaped, and nothing must be killed for it."""
        super().begin()
        self._ender.disarm()
        self._is_reported = False
        self.close()

    def heard(self) -> None:
        """A message of the server arrived, or a connection was made, which it may now answer on."""
        self.heard_ms = self._clock()

    def renewed(self, progress: int, lease_ms: int) -> bool:
        is_new = super().renewed(progress, lease_ms)
        if is_new:
            self._arm()
        self._look()
        return is_new

    def hold(self) -> None:
        """A grant is about to be acted on: from here on the kernel's timer runs too."""
        super().hold()
        self._arm()
        self._look()

    def is_silent(self) -> bool:
        """Whether the server has not been heard for so long that the connection is suspect."""
        limit_ms = min(SILENT_FRACTION * (self.lease_ms or math.inf), SILENT_MS_MAX)
        return self.heard_ms is not None and self._clock() - self.heard_ms >= limit_ms

    def beat_ms(self, usual_ms: float) -> float:
        """The delay before the next heartbeat."""
        return min(usual_ms, self.lease_ms / BEATS_PER_LEASE if self.lease_ms else FIRST_BEAT_MS)

    def document(self) -> dict[str, Any]:
        """For status: how long the lease is valid, and when the server was last heard."""
        now_ms = self._clock()
        return {
            "lease_ms": self.lease_ms,
            "valid_for_ms": round(self.valid_for_ms(), 1),
            "server_heard_ms_ago": self.heard_ms and round(now_ms - self.heard_ms, 1),
            "is_held": self.is_held,
            "is_lost": self.is_lost,
        }

    def close(self) -> None:
        """Stop watching. An armed kernel timer stays: a holder that exits must do so in time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self.is_held and self.lease_ms is not None:
            self._ender.arm(self.at_ms(KILL_FRACTION))

    def _look(self) -> None:
        """Report the lease lost if it is, and look again when it could be: the loop's clock stops
        while the machine sleeps, and the lease's does not."""
        self.close()
        now_ms = self._clock()
        if self.must_stop():
            if not self._is_reported:
                self._is_reported = True
                self._on_lost(self._why(now_ms))
        elif self.is_held:
            delay_s = max(0.0, self.at_ms(STOP_FRACTION) - now_ms) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _why(self, now_ms: float) -> str:
        if self.lease_ms is None:
            return "the lease has ended"
        silent_ms, lease_ms = now_ms - self.sent_ms, self.lease_ms
        return (
            f"the lock server has not answered for {duration(silent_ms)}; this engine must stop"
            f" before its lease of {duration(lease_ms)} expires, because another engine may be"
            " granted the lock then"
        )
