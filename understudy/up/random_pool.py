"""A pool without a file: three small random models on one device, of which not all fit awake.

The first model has a shadow; the second rests in host memory, and the third not at all, so that a
drill sees every state.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from understudy.up.random_model import make_random_model

# An engine has some 55 MiB, and this many tokens of its cache 196 MiB: all engines at rest and the
# KV memory of one model fit, and where the third model is cold, that of two.
CACHE_TOKENS, MEMORY = 400_000, "{weights: 1MiB, kv: 196MiB, base: 64MiB}"
DEVICE_BYTES = 560 << 20
POOL_FILE = """\
devices: [HOST-0]
host_memory: 256MiB
margin: 0
defaults:
  backend: reference
  args: [--cache-tokens, {tokens}]
  min_runtime: 500ms
  max_wait: 200ms
  drain_timeout: {{park: 200ms, cut: 60s}}
models:
  a: {{shadow: follows, model: {directory}/a, memory: {memory}}}
  b: {{keep_alive: 300ms, offload_after: 200ms, model: {directory}/b, memory: {memory}}}
  c: {{keep_alive: 300ms, unload_after: 500ms, model: {directory}/c, memory: {memory}}}
"""
NAMES = ("a", "b", "c")


async def make_random_pool(directory: Path) -> Path:
    """Create the models and the pool file in `directory`; the path of the file."""
    models = directory / "models"
    models.mkdir()
    await asyncio.gather(
        *(
            make_random_model(models / name, (f"--seed={number}",))
            for number, name in enumerate(NAMES)
        )
    )
    path = directory / "pool.yaml"
    text = POOL_FILE.format(directory=models, tokens=CACHE_TOKENS, memory=MEMORY)
    path.write_text(text, encoding="utf-8")
    return path
