"""Lets the polling threads of a library wake late, so that an idle rank costs less CPU.

Gloo has a thread for each process group, which polls its sockets every 10 ms: vLLM's 13 groups cost
an idle rank 2.4 % of a core. A thread's timer slack is how much later than requested the kernel may
end such a wait (prctl(2), PR_SET_TIMERSLACK); data still wakes it at once. Threads inherit it from
the thread that starts them, which is the only way to set it here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_TIMERSLACK = 29
_PR_GET_TIMERSLACK = 30
# A thread that polls every 10 ms is left with 5 polls a second. Destroying a group waits for one
# poll of its thread.
LATE_NS = 200_000_000

_libc = ctypes.CDLL(None, use_errno=True)


def current_ns() -> int:
    """The timer slack of this thread."""
    return int(_libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0))


@contextmanager
def new_threads_may_wake_late(late_ns: int = LATE_NS) -> Iterator[None]:
    """Threads started in this block by this thread may end their waits up to `late_ns` late.

    Raises:
        OSError: the kernel refuses; prctl(2) documents no reason for that.
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
