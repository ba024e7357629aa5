"""What a process of vLLM sets about itself before its libraries load: garbage collection, the count
of CPUs, timer slack, and the names of its shared memory.

*Garbage collection* is paused while a process starts. Importing vLLM makes 700,000 objects that
live as long as the process, and the collector would visit them again and again: a fifth of the time
of the imports. Afterwards they are set aside, because every full collection would visit them for
half a second.

*CPUs.* While another engine serves, the supervisor limits the affinity of a loading one to half of
the CPUs until it is prepared. OpenMP, MKL and OpenBLAS count the CPUs in the affinity of the
process that loads them, once; vLLM asks Python. OpenMP is loaded under the affinity from before the
limit, because it can bind threads only to CPUs that it saw then.

*Timer slack.* Gloo has a thread per process group, which polls its sockets every 10 ms: vLLM's 13
groups cost an idle rank 2.4 % of a core. Slack (prctl(2), PR_SET_TIMERSLACK) lets the kernel end
such a wait later; data still wakes the thread at once. Threads inherit it only from the thread that
starts them.

*Shared memory* stays when its processes are killed. Its names have that of the engine, by which the
supervisor removes it (`supervisor/leftovers.py`).

Imports neither vLLM nor torch at module level.
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

from engine.backends.process import CPUS_ENV

# The processes in which the plugin resumes it; in any other one it must not be paused.
RESUMED_IN = ("EngineCore", "VllmWorker-")


def pause_collector() -> None:
    gc.disable()


def pause_collector_in_spawned() -> None:
    """In a process that vLLM has just spawned."""
    if multiprocessing.current_process().name.startswith(RESUMED_IN):
        pause_collector()


def resume_collector() -> None:
    """From now on objects are collected, but those that exist already."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def count_all() -> None:
    """Load the libraries that count CPUs, and make Python count them all until the limit is lifted.

    The limit holds again afterwards, unless OpenMP has bound this thread: a binding stays.
    """
    given = os.environ.get(CPUS_ENV)
    if not given:
        return
    every, limit = set(map(int, given.split(","))), os.sched_getaffinity(0)
    if limit == every:
        return
    try:
        os.sched_setaffinity(0, every)
    except OSError:
        return  # the container has fewer CPUs by now; they are counted when they are needed
    try:
        import torch

        torch.get_num_threads()  # MKL counts at its first use
    finally:
        if os.sched_getaffinity(0) == every:
            os.sched_setaffinity(0, limit)
    get_affinity = os.sched_getaffinity

    def get_future_affinity(pid: int) -> set[int]:
        found = get_affinity(pid)
        return set(every) if found == limit else found

    os.sched_getaffinity = get_future_affinity


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


def name_shared_memory() -> None:
    """What multiprocessing makes from now on is named after this engine's TMPDIR. These two are
    its private names: without them everything works, but for the removal."""
    name = os.path.basename(tempfile.gettempdir())
    vars(shared_memory)["_make_filename"] = lambda: f"/{name}-{secrets.token_hex(8)}"
    vars(multiprocessing.current_process())["_config"]["semprefix"] = f"/{name}"
