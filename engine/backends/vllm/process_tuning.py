"""What a process of vLLM sets about itself: garbage collection, the names of its shared memory, and
timer slack.

*Garbage collection.* Importing vLLM makes 700,000 objects that live as long as the process, and the
collector would visit them again and again: a fifth of the time of the imports. vLLM sets them aside
once it has started.

*Shared memory* stays when its processes are killed. Its names have that of the engine, by which the
supervisor removes it (`supervisor/leftovers.py`).

*Timer slack.* Gloo has a thread per process group, which polls its sockets every 10 ms: vLLM's 13
groups cost an idle rank 2.4 % of a core. Slack (prctl(2), PR_SET_TIMERSLACK) lets the kernel end
such a wait later; data still wakes the thread at once. Threads inherit it only from the thread that
starts them.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory

OBJECTS_BETWEEN = 50_000  # two collections; Python's own number is 700


def tune() -> None:
    """Before anything of vLLM is imported, in each of its processes."""
    gc.set_threshold(OBJECTS_BETWEEN)
    # Two private names of multiprocessing: without them everything works, but for the removal.
    name = os.path.basename(tempfile.gettempdir())
    vars(shared_memory)["_make_filename"] = lambda: f"/{name}-{secrets.token_hex(8)}"
    vars(multiprocessing.current_process())["_config"]["semprefix"] = f"/{name}"


PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
# A thread that polls every 10 ms is left with 5 polls a second. Destroying a group waits for one
# poll of its thread.
LATE_NS = 200_000_000

_libc = ctypes.CDLL(None, use_errno=True)


def current_ns() -> int:
    """The timer slack of this thread."""
    return int(_libc.prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))


@contextmanager
def new_threads_may_wake_late(late_ns: int = LATE_NS) -> Iterator[None]:
    """Threads started in this block by this thread may end their waits up to `late_ns` late."""
    before_ns = current_ns()
    _libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(late_ns), 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(before_ns), 0, 0, 0)
