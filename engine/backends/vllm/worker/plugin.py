"""What vLLM runs in every process of its own before anything else of ours (vllm.general_plugins).

Must be cheap and harmless: it also runs in a vLLM that has nothing to do with us. It comes before
vLLM looks for a device, so that the witness is held first.
"""

from __future__ import annotations

import os

from engine.backends.process import INCARNATION_ENV
from engine.backends.vllm.words import LOAD_FORMAT


def register() -> None:
    """Join the incarnation and name the loader; nothing where no supervisor has started us.

    Raises:
        UnderstudyError: this incarnation is over; vLLM lets it pass, and the process ends.
    """
    if not os.environ.get(INCARNATION_ENV):
        return
    from engine.backends.vllm.worker import membership

    membership.join()
    from vllm.model_executor.model_loader import register_model_loader

    from engine.backends.vllm.worker.loader import Loader

    register_model_loader(LOAD_FORMAT)(Loader)
