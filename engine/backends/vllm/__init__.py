"""The vLLM backend: `api/` runs in vLLM's API server, `worker/` in its engine core and workers.

The names below are known to both. Importing this needs neither vLLM nor torch.
"""

PLUGIN = "understudy"  # the name of the entry point (pyproject.toml)
LOAD_FORMAT = "understudy"

# What to do with weights that cannot be shared (`--unshareable`).
REFUSE, PRIVATE = "refuse", "private"
NO_SELF_TEST = "vllm.no_self_test"  # an error: not with this model
