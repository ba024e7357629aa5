"""In the engine core: the tokens already made are output, made before a preemption; and requests
that wait are on the page that the gateway reads after a death.

vLLM finds these classes by name (`scheduler_cls`).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from engine.backends import process
from engine.backends.vllm.resume.answer import attempt_of, conceal, made_by


class _Resuming:
    """What both schedulers do differently."""

    requests: dict[str, Any]
    structured_output_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue_page = process.queue_page()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """What is scheduled leaves the page before the step. The scheduler itself may be what a
        request ends, so meanwhile the page says nothing."""
        with self.queue_page.changing():
            step = super().schedule(*args, **kwargs)  # type: ignore[misc]  # a mixin: vLLM has the method
            for new in step.scheduled_new_reqs:
                self.queue_page.remove(attempt_of(new.sampling_params))
        return step

    def add_request(self, request: Any) -> None:
        if request.request_id not in self.requests and (made := made_by(request.sampling_params)):
            conceal(request.sampling_params)
            request.append_output_token_ids(list(made))
            # Otherwise a prefix that is found in the cache and reaches into the output ends the
            # core: it counts the cached tokens of prompts only.
            request.num_preemptions = 1
        super().add_request(request)  # type: ignore[misc]  # a mixin: vLLM has the method
        self.queue_page.add(attempt_of(request.sampling_params))

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """A grammar is compiled aside. Once it is there, it hears of the tokens already made."""
        was = request.status
        is_ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]  # a mixin: vLLM has the method
        if not is_ready or was != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return is_ready
        made = made_by(request.sampling_params)
        if not made or self.structured_output_manager.accept_tokens(request, list(made)):
            return True
        # The answer so far breaks its own grammar, so it cannot be continued: as if the grammar
        # could not be compiled. vLLM notes that in a set or a dictionary, depending on its version.
        request.structured_output_request.grammar = ValueError(
            "the answer so far does not fit its grammar"
        )
        request.status = was
        super()._handle_blocked_waiting_request(request)  # type: ignore[misc]  # a mixin: vLLM has the method
        return False


class ResumingScheduler(_Resuming, Scheduler):
    pass


class ResumingAsyncScheduler(_Resuming, AsyncScheduler):
    pass
