"""In the engine core: its place on the serving file, and its memory. The plugin imports this there.

The core maps the index of the KV pools, where it keeps one, and leads the workers; so it holds the
file whenever they do. The backend calls these methods by name (`call_utility_async`). They never
raise: the answer says what went wrong.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.engine.core import EngineCore

from engine.backends import process_memory
from engine.backends.vllm import membership
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)

Answer = dict[str, str]


def _join(core: Any, token: int) -> Answer:
    """Before any process maps KV memory under `token`."""
    try:
        membership.join_serving(token)
    except UnderstudyError as error:
        return {"code": error.code, "problem": error.message}
    except OSError as error:
        return {"code": "vllm.core_failed", "problem": str(error)}
    return {"code": "", "problem": ""}


def _leave(core: Any) -> Answer:
    """Once vLLM sleeps: let go of the index, where there is one, and leave the file."""
    if not core.is_scheduler_paused():
        return {"code": "vllm.not_parked", "problem": "vLLM's scheduler is not paused"}
    index = getattr(core.scheduler, "pool_index", None)
    try:
        if index is not None:
            index.leave()
        membership.leave_serving()
    except Exception as error:
        logger.exception("the engine core failed to release its KV index")
        return {"code": "vllm.not_parked", "problem": f"{type(error).__name__}: {error}"}
    return {"code": "", "problem": ""}


def _into_huge_pages(core: Any) -> Answer:
    """Once the engine is prepared."""
    process_memory.into_huge_pages()
    return {"code": "", "problem": ""}


EngineCore.understudy_into_huge_pages = _into_huge_pages
EngineCore.understudy_join = _join
EngineCore.understudy_leave = _leave
