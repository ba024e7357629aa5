"""An engine that has to start: its processes, its imports, and weights that are loaded from disk.

Owns how a pod is made cold: both engines end, and the memory service starts anew, so that no device
has weights any more (the checkpoint stays in the page cache). Surprising: a request does not wait
for so long; the clock runs until the first one that is answered.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from gms import names
from hack.bench_sleep.tiers import EngineTiers
from plumbing.errors import UnderstudyError
from plumbing.part.tier import Tier
from understudy.drill.clients import Target, clock, send
from understudy.drill.records import Exchange, Prompt
from understudy.status.gather import memory_parts, status_of

START_S_MAX = 300.0
PAUSE_S = 0.02  # between two requests that were refused


class ColdPod:
    """Makes the pod in `directory` cold again and again."""

    def __init__(self, directory: Path, engines: list[EngineTiers]) -> None:
        """The first of `engines` is the one that starts while the other stays cold."""
        self._directory, self._engines = directory, engines

    async def freeze(self) -> None:
        """End both engines, and then what serves the devices' memory.

        Raises:
            UnderstudyError: an engine refuses, or does not end.
        """
        for engine in reversed(self._engines):
            await engine.shall(Tier.COLD)
            await engine.until_gone()
        for part in memory_parts(self._directory):
            if part.name.startswith(names.OFFLOAD):
                continue  # a copy stays: nothing refers to it any more
            document = await status_of(part)
            if "pid" in document:
                os.kill(document["pid"], signal.SIGKILL)

    async def wake(self, target: Target, prompt: Prompt) -> tuple[Exchange, float]:
        """Start the first engine; the first request that is answered, and when it was asked for.

        Raises:
            UnderstudyError: `bench.no_answer`.
        """
        first, began_ms = self._engines[0], clock.now_ms()
        await first.shall(Tier.AWAKE)
        while clock.now_ms() - began_ms < 1000 * START_S_MAX:
            exchange = await send(target, prompt)
            if exchange.first_token_ms is not None:
                return exchange, began_ms
            await asyncio.sleep(PAUSE_S)
        raise UnderstudyError("bench.no_answer", f"no answer within {START_S_MAX:g} s of a start")

    async def complete(self) -> None:
        """Have the pod whole again."""
        for engine in self._engines:
            await engine.shall(Tier.AWAKE)
            await engine.until_up()
