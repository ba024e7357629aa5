"""An engine that has to start: its processes, its imports, and weights that are loaded from disk.

Owns how a pod is made cold: both engines end, and the memory service starts anew, so that no device
has weights any more (the checkpoint stays in the page cache). Surprising: a request does not wait
for so long; the clock runs until the first one that is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from engine.core.events import State
from gms import names
from hack.bench_sleep.tiers import EngineTiers
from plumbing.errors import RemoteError, UnderstudyError
from plumbing.part.tier import Tier
from understudy.drill.clients import Target, clock, send
from understudy.drill.killer import backend_processes
from understudy.drill.records import Exchange, Prompt
from understudy.status.gather import engine_parts, memory_parts, status_of

START_S_MAX = 300.0
PAUSE_S = 0.02  # between two requests that were refused

BY_GOAL, BY_KILL = "goal", "kill"  # how engines end: told to be cold, or killed and relaunched


class ColdPod:
    """Makes the pod in `directory` cold again and again; `by` says how its engines end."""

    def __init__(self, directory: Path, engines: list[EngineTiers]) -> None:
        """The first of `engines` is the one that starts while the other stays cold."""
        self.by = BY_GOAL
        self._directory, self._engines = directory, engines

    async def freeze(self) -> None:
        """End both engines, and then what serves the devices' memory.

        Raises:
            UnderstudyError: an engine does not end.
        """
        for number, engine in enumerate(self._engines):
            began_ms = clock.now_ms()
            try:
                await engine.shall(Tier.COLD)
            except RemoteError as error:
                if error.code != "engine.no_such_tier":
                    raise
                self.by = BY_KILL  # a refusal has ended the connection
                self._engines[number] = await EngineTiers.to(str(self._directory), engine.engine)
                await self._kill(engine)
            await self._engines[number].until(State.DEAD, began_ms)
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
        """Have the pod whole again. Engines that were killed come back by themselves, and either
        may be the one that serves."""
        for engine in self._engines:
            await engine.shall(Tier.AWAKE)
            await engine.until_up()

    async def _kill(self, engine: EngineTiers) -> None:
        (part,) = (each for each in engine_parts(self._directory) if each.name == engine.engine)
        for pid in backend_processes((await status_of(part))["engine"]["pid"]):
            with contextlib.suppress(ProcessLookupError):  # its parent's death ended it
                os.kill(pid, signal.SIGKILL)
