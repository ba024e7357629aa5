"""In the engine core: its place on the serving file, its memory, and why it cannot plan its caches.
The plugin imports this there.

The core maps the index of the KV pools, where it keeps one, and leads the workers; so it holds the
file whenever they do. The backend calls these methods by name (`call_utility_async`).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.core import EngineCore

from engine.backends import process_memory
from engine.backends.vllm import kv_size, membership
from engine.backends.vllm.membership import answering, reporting
from plumbing.errors import UnderstudyError


@answering
def _join(core: Any, token: int) -> None:
    """Before any process maps KV memory under `token`."""
    membership.join_serving(token)


@answering
def _leave(core: Any) -> None:
    """Once vLLM sleeps: let go of the index, where there is one, and leave the file."""
    if not core.is_scheduler_paused():
        raise UnderstudyError("vllm.not_parked", "vLLM's scheduler is not paused")
    index = getattr(core.scheduler, "pool_index", None)
    if index is not None:
        index.leave()
    membership.leave_serving()


_stock_initialize = EngineCore._initialize_kv_caches


def _initialize_kv_caches(core: Any, vllm_config: Any) -> Any:
    """As vLLM does, at the end of the start. Its refusal would be lost with this process, and the
    death look as if a restart would fix it. Errors of workers are of other classes, and theirs to
    report."""
    with reporting():
        try:
            planned = _stock_initialize(core, vllm_config)
        except ValueError as error:
            raise kv_size.refused(error) from error
    process_memory.into_huge_pages()  # so that this process dies sooner
    return planned


EngineCore._initialize_kv_caches = _initialize_kv_caches
EngineCore.understudy_join = _join
EngineCore.understudy_leave = _leave
