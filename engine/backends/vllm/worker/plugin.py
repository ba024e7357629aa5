"""The plugin that vLLM runs in each of its processes (entry point vllm.general_plugins).

Must be cheap and harmless: it also runs in every vLLM that is not ours. It runs before vLLM looks
for a device, so that the witness is held first.
"""

from __future__ import annotations

import os

from engine.backends.process import INCARNATION_ENV
from engine.backends.vllm import LOAD_FORMAT
from plumbing.service.process import widen_fd_table


def register() -> None:
    """Join the incarnation and register the loader; do nothing unless a supervisor started us.

    Raises:
        UnderstudyError: this incarnation is over; vLLM does not catch it, so the process ends.
    """
    if not os.environ.get(INCARNATION_ENV):
        return
    from engine.backends.vllm import membership

    member = membership.join()
    widen_fd_table()
    from vllm.model_executor.model_loader import register_model_loader

    from engine.backends.vllm.worker.weights import Loader

    register_model_loader(LOAD_FORMAT)(Loader)
    if member is not None and member.name == membership.CORE:
        from engine.backends.vllm import core_serving  # noqa: F401 - adds methods to the core
