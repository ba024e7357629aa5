"""Words that the command line and vLLM's own processes both know. Needs neither vLLM nor torch."""

from __future__ import annotations

PLUGIN = "understudy"  # the name of the entry point (pyproject.toml)
LOAD_FORMAT = "understudy"

# What to do with weights that cannot be shared (`--unshareable`).
REFUSE, PRIVATE = "refuse", "private"
