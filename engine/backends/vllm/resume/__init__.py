"""A request is resumed from the tokens that a dead engine has already made.

To vLLM it is a request that was preempted: the same prompt and parameters, and output tokens whose
KV cache must be computed again. Three of vLLM's processes have a part in it: `scheduler.py` runs in
the engine core, `batch.py` in the workers, and `llm.py` in the API process. The tokens travel in
`SamplingParams.extra_args` (`answer.py`).

Everything here relies on private parts of vLLM; `contracts.txt` says on which. If one of
them has changed, nothing of this is installed: the engine serves, and its answers end with it.
"""

# Set by the API process for its children: install the hooks.
INSTALL_ENV = "UNDERSTUDY_VLLM_RESUME"
