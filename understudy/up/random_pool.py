"""A pool without a file: three small random models on one device, of which not all fit awake.

The first model has a shadow; the second rests in host memory, and the third not at all, so that a
drill sees every state.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from understudy.up.random_model import make_random_model

# An engine has some 55 MiB, and this many tokens of its cache 199 MiB: all engines at rest and the
# KV memory of one model fit. That of two never does, or each switch would be a load of the third.
CACHE_TOKENS, MEMORY = 400_000, "{weights: 1MiB, kv: 196MiB, base: 64MiB}"
TOKEN_INTERVAL_MS = 6  # streams outlast a turn, and the machine is left to the switches
DEVICE_BYTES = 480 << 20
POOL_FILE = """\
devices: [HOST-0]
host_memory: 256MiB
margin: 0
defaults:
  backend: reference
  args: [--cache-tokens, {tokens}, --token-interval-ms, {interval_ms}]
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
    numbers = {"tokens": CACHE_TOKENS, "memory": MEMORY, "interval_ms": TOKEN_INTERVAL_MS}
    text = POOL_FILE.format(directory=models, **numbers)
    path.write_text(text, encoding="utf-8")
    return path
