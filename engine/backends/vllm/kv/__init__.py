"""The index of KV memory that outlives its engine, kept by vLLM's scheduler.

vLLM hashes a block when it schedules the step that fills it, and forgets the hash when it hands the
block out again. `block_pool.py` hears of both and turns that into records that a successor may
believe (`engine.kv`); `scheduler.py` hears of the steps. `facts.py` runs in the workers: what the
bytes of a block depend on. `api/features.py` says for which engines nothing is published.

Everything here relies on private parts of vLLM; `contracts.txt` says on which. If one of them
has changed, nothing is published: the next engine starts with an empty cache.
"""

# Set by the API process for its children: the index is to be kept.
INSTALL_ENV = "UNDERSTUDY_VLLM_KV"
