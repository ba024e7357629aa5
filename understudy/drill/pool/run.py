"""One drill of a pool from start to end: learn each model's answers, load all models, kill.

Owns the order of the steps and the load; `killer.py` kills, and nothing here judges. Clients ask in
bursts, those of the first model in longer ones, so that all models also come to rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

from plumbing.errors import UnderstudyError, UsageError, WaitTimeoutError
from plumbing.part.format import duration
from plumbing.part.paths import engine_sockets
from plumbing.service.clock import SystemClock
from pool.settings import PoolFile, engines_of
from understudy.drill.burn import Burn
from understudy.drill.clients import REFUSED_PAUSE_S, Target, inside_target, send
from understudy.drill.observer import Observer
from understudy.drill.pool.killer import PoolKiller
from understudy.drill.pool.records import SHADOW, PoolDrillPlan, PoolDrillRecords
from understudy.drill.pool.schedule import default_targets, pool_prompts
from understudy.drill.pool.watch import PoolWatch, pool_status
from understudy.drill.prompts import learn_answers
from understudy.drill.records import End, Prompt
from understudy.pod.runner import PodRunner
from understudy.status.gather import gateway_part, lockserver_part, status_of

START_DEADLINE_S = 120.0  # until gateway, pool and engines have found one another
LEARNED_AT_ONCE = 5
SILENCE_S = 330.0  # longer than a ticket waits in the gateway by default, which ends in an answer
SWITCHES_DEADLINE_S = 120.0  # for the next one: turns take seconds
CLIENTS_MIN = 2  # of each model: one that streams for longer than a turn, one that asks anew
BURST, FIRST_BURST = 4, 12  # requests of a client, after which its model is left alone
PAUSE_S = 2.5
POLL_S = 0.01

clock = SystemClock()


class PoolDrill:
    """A drill of the pool in `directory`, whose file is `file` and whose pod `runner` runs."""

    def __init__(
        self,
        directory: Path,
        file: PoolFile,
        plan: PoolDrillPlan,
        say: Callable[[str], None],
        runner: PodRunner,
    ) -> None:
        models = {name: engines_of(name, each) for name, each in file.models.items()}
        self.records = PoolDrillRecords(models=models)
        self.records.base.is_direct = False
        self.backend: str = next(iter(file.models.values())).backend
        self.directory, self._file, self._plan, self._say = directory, file, plan, say
        self._runner = runner
        self._prompts: dict[str, list[Prompt]] = {}
        self._targets = tuple(plan.targets) or default_targets(
            self.backend,
            has_shadow=any(len(each) > 1 for each in models.values()),
            has_copies=bool(file.host_memory),
        )
        self._refuse_targets()

    def _refuse_targets(self) -> None:
        has_shadow = any(len(each) > 1 for each in self.records.models.values())
        named = [each for each in self._targets if each.startswith(SHADOW)]
        if named and not has_shadow:
            raise UsageError(
                "drill.no_shadow",
                f"--target {named[0]}: no model of this pool file has a shadow; choose another"
                " target, or add `shadow: follows` to a model",
            )

    async def prepare(self) -> Target:
        """Wait until the pool decides, and learn what each model answers.

        Raises:
            UnderstudyError: that does not happen, or a model gives no usable answers.
        """
        await self._decides()
        target = inside_target(await self._address())
        for model in self.records.models:
            began_ms = clock.now_ms()
            self._prompts[model] = await self._learn(target, pool_prompts(self.backend, model))
            took = duration(clock.now_ms() - began_ms)
            self._say(f"{model}: {len(self._prompts[model])} answers learned in {took}")
        return target

    async def _learn(self, target: Target, bank: list[Prompt]) -> list[Prompt]:
        """Those that can be used. The reference backend computes each request alike, whatever runs
        beside it."""
        at_once = 1 if self.backend == "vllm" else LEARNED_AT_ONCE
        parts = [bank[number::at_once] for number in range(at_once)]
        learned = await asyncio.gather(*(learn_answers(target, each, len(each)) for each in parts))
        for _, answers in learned:
            self.records.base.expected |= answers
        return [each for each in bank if each.key in self.records.base.expected]

    async def run(self, target: Target) -> None:
        """All kills and switches under load. Raises what ended it early; `records` is valid."""
        stopping = asyncio.Event()
        burn, base = Burn(self._plan.burn), self.records.base
        base.burn = burn.use if self._plan.burn else None
        burn.start()
        self.records.began_ms = began_ms = clock.now_ms()
        watch = PoolWatch(self.directory, self.records)
        observer = Observer(self.directory, engine_sockets(self.directory), base)
        pauses = {model: asyncio.Barrier(self._of_each) for model in self.records.models}
        clients = [
            asyncio.create_task(self._client(target, model, number, pauses[model], stopping))
            for model, number in itertools.product(self.records.models, range(self._of_each))
        ]
        try:
            killer = PoolKiller(
                self.directory, self.records, self._plan, watch, observer, self._runner, self._say
            )
            await killer.kill_all(self._targets)
            await self._switched(self._plan.switches)
            stopping.set()
            for pause in pauses.values():
                await pause.abort()
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await observer.close()
            await watch.close()
            burn.stop()
            base.lasted_s = (clock.now_ms() - began_ms) / 1000

    # ------------------------------------------------------------------ load

    @property
    def _of_each(self) -> int:
        return max(CLIENTS_MIN, -(-self._plan.clients // len(self.records.models)))

    async def _client(
        self,
        target: Target,
        model: str,
        number: int,
        pause: asyncio.Barrier,
        stopping: asyncio.Event,
    ) -> None:
        """Sends one model's prompts in turn; all its clients pause together after each burst."""
        prompts, done = self._prompts[model], self.records.base.exchanges.append
        is_first = model == next(iter(self.records.models))
        burst = FIRST_BURST if is_first else BURST
        for count in itertools.count(1):
            prompt = prompts[(number * len(prompts) // self._of_each + count) % len(prompts)]
            exchange = await send(target, prompt, SILENCE_S)
            done(exchange)
            pause_s = 0.0
            if exchange.end is End.REFUSED or exchange.status >= 400:
                pause_s = REFUSED_PAUSE_S
            if count % burst == 0 and not stopping.is_set():
                pause_s = PAUSE_S
                with contextlib.suppress(asyncio.BrokenBarrierError):
                    await pause.wait()
            if pause_s:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), pause_s)
            if stopping.is_set():
                return

    # ------------------------------------------------------------------ waits

    async def _switched(self, count: int) -> None:
        """Wait for `count` switches in all.

        Raises:
            WaitTimeoutError: `drill.no_switch`.
        """
        seen, seen_ms = len(self.records.switches), clock.now_ms()
        deadline_s = self._plan.stretched_s(SWITCHES_DEADLINE_S)
        while len(self.records.switches) < count:
            if len(self.records.switches) > seen:
                seen, seen_ms = len(self.records.switches), clock.now_ms()
            if clock.now_ms() > seen_ms + deadline_s * 1000:
                raise WaitTimeoutError(
                    "drill.no_switch", f"no model was switched to within {deadline_s:g} s"
                )
            await asyncio.sleep(POLL_S)

    async def _decides(self) -> None:
        """Wait until the pool has heard its gateway and all its engines.

        Raises:
            WaitTimeoutError: `drill.not_up`, with what is missing.
        """
        deadline_s = self._plan.stretched_s(START_DEADLINE_S)
        end_ms = clock.now_ms() + deadline_s * 1000
        while missing := await self._missing():
            if clock.now_ms() > end_ms:
                raise WaitTimeoutError(
                    "drill.not_up", f"the pool was not ready within {deadline_s:g} s: {missing}"
                )
            await asyncio.sleep(POLL_S)

    async def _missing(self) -> str | None:
        try:
            document = await pool_status(self.directory)
        except UnderstudyError as error:
            return error.message
        gateway = await status_of(gateway_part(self.directory))
        if not gateway.get("accepting"):
            return str(gateway.get("error") or "the gateway does not accept requests")
        if document.get("recovering"):
            return "it is recovering"
        return next(iter(document.get("problems") or ()), None)

    async def _address(self) -> str:
        """Where requests go, as the lock server says."""
        lock = await status_of(lockserver_part(self.directory))
        return str(((lock.get("service") or {}).get("active") or {}).get("address"))
