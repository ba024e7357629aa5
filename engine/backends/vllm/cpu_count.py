"""Lets vLLM's processes count all CPUs of their engine, although it loads on half of them.

While another engine serves, the supervisor limits the affinity of a loading one until it is
prepared. OpenMP, MKL and OpenBLAS count the CPUs in the affinity of the process that loads them,
once; vLLM itself asks Python. OpenMP is loaded under the affinity of before the limit, because it
can bind threads only to CPUs that it saw then: vLLM's CPU backend tells it to.
"""

from __future__ import annotations

import os

from engine.backends.process import CPUS_ENV


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
