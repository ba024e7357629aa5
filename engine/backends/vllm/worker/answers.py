"""How our methods in a worker fail: reported, or answered, but never raised to vLLM.

After an exception on one rank vLLM leaves the other ranks' answers in their queues, and every later
call gets the answer to an earlier one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.backends.vllm import membership
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)

CODE_UNEXPECTED = "vllm.worker_failed"

Answer = dict[str, Any]


@contextmanager
def reporting() -> Iterator[None]:
    """Report errors to the supervisor; vLLM would only say that its core has failed."""
    try:
        yield
    except UnderstudyError as error:
        membership.current().report(error)
        raise


def answering(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Make `method` never raise, and add the rank and whether it succeeded to its answer."""

    @functools.wraps(method)
    def answer(self: Any, *args: Any) -> Answer:
        about: Answer = {"rank": self.rank, "ok": True, "code": "", "error": ""}
        try:
            return about | method(self, *args)
        except UnderstudyError as error:
            logger.error("%s: %s", method.__name__, error)
            return about | {"ok": False, "code": error.code, "error": error.message}
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            text = f"{method.__name__} failed: {type(error).__name__}: {error}"
            return about | {"ok": False, "code": CODE_UNEXPECTED, "error": text}

    return answer
