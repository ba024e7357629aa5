"""A request is resumed from the tokens that a dead engine has already made.

To vLLM it is a request that was preempted: the same prompt and parameters, and output tokens whose
KV cache must be computed again. Three of vLLM's processes have a part in it: `scheduler.py` runs in
the engine core, `batch.py` in the workers, and `llm.py` in the API process. The tokens travel in
`SamplingParams.extra_args` (`answer.py`).

Everything here relies on private parts of vLLM; `contracts.txt` says on which. If one of
them has changed, nothing of this is installed: the engine serves, and its answers end with it.
"""

from __future__ import annotations

from typing import Any

from engine.backends.vllm import versions

# Set by the API process for its children: install the hooks.
INSTALL_ENV = "UNDERSTUDY_VLLM_RESUME"


def install(config: Any, runner: Any) -> str:
    """In a worker: have its model runner take up requests; what is in the way, or nothing. Imports
    only what this runner needs: another one's files may be gone, or must not be imported on this
    platform.

    V2 needs no hook: a request that was preempted comes to it as a new one, with prompt and output
    in one list of tokens. From that list V2 derives all that a request's output shapes: the counts
    of penalties, bad words, minimum lengths. Its noise is a function of seed, position and token,
    so nothing is drawn again. Grammars are the scheduler's. `contracts.txt` has all of this.
    """
    from vllm.platforms import current_platform

    if versions.in_use(config) == versions.V2:
        return _problem_with_v2(runner)
    if current_platform.is_cpu():
        from engine.backends.vllm.resume import batch_cpu

        return batch_cpu.install(runner)
    from engine.backends.vllm.resume import batch

    return batch.install(runner)


def _problem_with_v2(runner: Any) -> str:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        return f"vLLM's model runner is a {type(runner).__name__}"
    if type(runner).add_requests is not GPUModelRunner.add_requests:
        return f"{type(runner).__name__} adds requests in a way of its own"
    return ""
