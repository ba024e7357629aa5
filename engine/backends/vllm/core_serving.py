"""In the engine core: its place on the serving file, and its memory. The plugin imports this there.

The core maps the index of the KV pools, where it keeps one, and leads the workers; so it holds the
file whenever they do. The backend calls these methods by name (`call_utility_async`). They never
raise: the answer says what went wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core import EngineCore

from engine.backends import process_memory
from engine.backends.vllm import membership
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)


def _answering(method: Callable[..., object]) -> Callable[..., dict[str, str]]:
    def answer(core: Any, *asked: Any) -> dict[str, str]:
        try:
            method(core, *asked)
        except UnderstudyError as error:
            return {"code": error.code, "problem": error.message}
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            return {"code": "vllm.core_failed", "problem": f"{type(error).__name__}: {error}"}
        return {"code": "", "problem": ""}

    return answer


def _leave(core: Any) -> None:
    """Once vLLM sleeps: let go of the index, where there is one, and leave the file."""
    if not core.is_scheduler_paused():
        raise UnderstudyError("vllm.not_parked", "vLLM's scheduler is not paused")
    index = getattr(core.scheduler, "pool_index", None)
    if index is not None:
        index.leave()
    membership.leave_serving()


# Once the engine is prepared; before any process maps KV memory under a token; and after that.
EngineCore.understudy_into_huge_pages = _answering(lambda core: process_memory.into_huge_pages())
EngineCore.understudy_join = _answering(lambda core, token: membership.join_serving(token))
EngineCore.understudy_leave = _answering(_leave)
