"""This process's membership in its incarnation, and how its methods fail: reported or answered, but
never raised to vLLM.

The plugin creates the membership once. It is a global, because vLLM itself creates our loader and
our worker, so it cannot be passed to them. After an exception on one rank vLLM leaves the other
ranks' answers in their queues, and every later call gets the answer to an earlier one; so methods
that the backend calls return their error. Needs neither vLLM nor torch.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.backends import process
from engine.backends.process import BackendProcess
from engine.messages import Counts
from lockserver.client import serving
from plumbing.errors import InvariantError, UnderstudyError
from plumbing.service.process import die_with_parent

logger = logging.getLogger(__name__)

CORE = "core"
WORKER = "worker"
FAILED = "vllm.process_failed"

_member: BackendProcess | None = None


def join() -> BackendProcess | None:
    """Enter the incarnation, if vLLM's main process has spawned this process.

    The parent to die with is the one that multiprocessing names; the inherited environment is older
    than that parent.

    Raises:
        UnderstudyError: this incarnation is over, or its supervisor is gone: the process must end.
    """
    global _member
    spawner = multiprocessing.parent_process()
    if _member is None and spawner is not None and spawner.pid is not None:
        die_with_parent(spawner.pid)
        _member = process.enter(name_of(multiprocessing.current_process().name))
    return _member


def current() -> BackendProcess:
    """The membership of this process.

    Raises:
        InvariantError: `join` has not been called, or not in a spawned process.
    """
    if _member is None:
        raise InvariantError("this process has not joined an incarnation; the plugin does that")
    return _member


def counts() -> Counts:
    """What this process shows the supervisor."""
    return Counts() if _member is None else _member.counts


def join_serving(token: int) -> None:
    """Hold the incarnation's serving file, before this process maps KV memory under `token`.

    Raises:
        UnderstudyError: `serving.over`, `serving.replaced`: it must not map any.
    """
    if (seat := _seat()) is not None:
        seat.join(token)


def check_serving() -> None:
    """Raises:
    InvariantError: KV memory is about to be mapped without `join_serving`.
    """
    if (seat := _seat()) is not None and not seat.token:
        raise InvariantError("KV memory was to be mapped before the serving file was joined")


def leave_serving() -> None:
    """After this process has unmapped all KV memory. Harmless to repeat."""
    if (seat := _seat()) is not None:
        seat.leave()


def _seat() -> serving.ServingSeat | None:
    return None if _member is None else _member.seat


def name_of(process_name: str) -> str:
    """The supervisor's name for a process, from vLLM's: `VllmWorker-1` is `worker-1`, rank 0 is
    `worker`, and everything else is the engine core."""
    found = re.fullmatch(r"VllmWorker-(\d+)", process_name)
    if found is None:
        return CORE
    return WORKER if found[1] == "0" else f"{WORKER}-{found[1]}"


Answer = dict[str, Any]


@contextmanager
def reporting() -> Iterator[None]:
    """Report errors to the supervisor; vLLM would only say that its core has failed."""
    try:
        yield
    except UnderstudyError as error:
        current().report(error)
        raise


def answering(method: Callable[..., Answer | None]) -> Callable[..., Answer]:
    """Make a method of a worker or of the engine core never raise. To its answer are added the
    rank, and `code` and `problem`, which are empty if it succeeded."""

    @functools.wraps(method)
    def answer(self: Any, *args: Any) -> Answer:
        about = {"rank": getattr(self, "rank", 0), "code": "", "problem": ""}
        try:
            return about | (method(self, *args) or {})
        except UnderstudyError as error:
            logger.error("%s: %s", method.__name__, error)
            return about | {"code": error.code, "problem": error.message}
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            problem = f"{method.__name__} failed: {type(error).__name__}: {error}"
            return about | {"code": FAILED, "problem": problem}

    return answer
