"""Threads that may wake late: how those of a library that polls are kept from costing a core.

Gloo has a thread for each process group, and each waits for its sockets for 10 ms at a time, for
ever: vLLM's 13 groups cost an idle rank 2.4 % of a core. A thread's timer slack is how much later
than asked the kernel may end such a wait (prctl(2), PR_SET_TIMERSLACK); data still wakes it at
once. It is inherited by the threads that a thread starts, which is the only way in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_TIMERSLACK = 29
_PR_GET_TIMERSLACK = 30
# Of a thread that polls every 10 ms it leaves 5 turns a second. A group that is taken down waits
# for one turn of its thread.
LATE_NS = 200_000_000

_libc = ctypes.CDLL(None, use_errno=True)


def current_ns() -> int:
    """The timer slack of this thread."""
    return int(_libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0))


@contextmanager
def new_threads_may_wake_late(late_ns: int = LATE_NS) -> Iterator[None]:
    """Threads that this one starts in the block end their waits up to `late_ns` after their time.

    Raises:
        OSError: the kernel refuses, which prctl(2) knows no reason for.
    """
    before_ns = current_ns()
    _set(late_ns)
    try:
        yield
    finally:
        _set(before_ns)


def _set(slack_ns: int) -> None:
    if _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(slack_ns), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_TIMERSLACK")
