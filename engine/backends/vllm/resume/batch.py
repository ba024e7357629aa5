"""In the workers: the persistent batch of vLLM's model runner of version 1.

The scheduler tells a worker the prompt of a new request and not its output, so the tokens already
made come from the request's parameters. V2 gets all tokens from the scheduler.

Surprising: both classes are exchanged on objects that vLLM has made. It offers no other way, and
makes its batch anew when the KV cache's layout is known.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from engine.backends.vllm.resume.answer import made_by

NARROW = 2  # the smallest vocabulary from which something can be drawn


class ResumingBatch(InputBatch):
    """`add_request` is where each new request comes by, before its tokens are laid out and before
    logits processors hear of it; the list that grows here is the one that they all hold."""

    runner: Any = None

    def add_request(self, request: Any) -> int:
        made = made_by(request.sampling_params)
        if made and not getattr(request, "understudy_resumed", False):
            request.understudy_resumed = True
            if not request.output_token_ids:  # it may come back after a preemption of this engine
                request.output_token_ids.extend(made)
            if request.generator is not None:
                _draw(self.runner, request.generator, len(made))
        index: int = super().add_request(request)
        return index


class _Resuming:
    """A model runner whose batch is a `ResumingBatch`."""

    input_batch: Any

    def _update_states(self, *args: Any, **kwargs: Any) -> Any:
        if type(self.input_batch) is InputBatch:
            self.input_batch.__class__ = ResumingBatch
            self.input_batch.runner = self
        return super()._update_states(*args, **kwargs)  # type: ignore[misc]  # a mixin: vLLM has the method


class ResumingGPURunner(_Resuming, GPUModelRunner):
    pass


def install(runner: Any) -> str:
    """Exchange the class of a worker's model runner; what is in the way, or nothing."""
    if type(runner) is GPUModelRunner:
        runner.__class__ = ResumingGPURunner
        return ""
    return f"vLLM's model runner is a {type(runner).__name__}"


def _draw(runner: Any, generator: torch.Generator, times: int) -> None:
    """Draw as often as the dead engine has: by the same sampler, because what one token takes from
    a generator depends on it."""
    sampler = runner.sampler.topk_topp_sampler

    def one(width: int) -> torch.Tensor:
        sampler(torch.zeros((1, width), device=runner.device), {0: generator}, None, None)
        return generator.get_state()

    vocabulary = runner.input_batch.vocab_size
    devices = [runner.device] if runner.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):  # the other requests' noise stays as it was
        # vLLM's sampler for the CPU takes one number for a token, however large the vocabulary is,
        # and is slow. Ask it, so that nothing depends on the version.
        before = generator.get_state()
        narrow = one(NARROW)
        generator.set_state(before)
        width = NARROW if torch.equal(one(vocabulary), narrow) else vocabulary
        for _ in range(times - 1):
            one(width)
