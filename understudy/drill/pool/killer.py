"""Kills one victim after another, each as a model enters a phase, and waits until all work again.

Owns the order of a kill's steps: everybody is up, the victim is found and held, a model enters the
phase, the victim dies, it is back, every model has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.part.format import duration
from plumbing.part.paths import pool_socket
from plumbing.part.peers import ask
from plumbing.service.clock import SystemClock
from pool.core.events import Order
from pool.core.states import ModelState
from pool.messages import CATALOGUE, OrderMsg
from understudy.drill.observer import Observer
from understudy.drill.pool.records import (
    OF_MODEL,
    POOL_PARTS,
    SHADOW,
    PoolDrillPlan,
    PoolDrillRecords,
    PoolKill,
)
from understudy.drill.pool.schedule import kill_order
from understudy.drill.pool.victims import FoundPart, Victims, holder_of
from understudy.drill.pool.watch import PoolWatch, pool_status
from understudy.drill.records import STOP, End, PartKill
from understudy.pod.runner import PodRunner

MISSED_MAX = 300  # kills for which there was no moment: more than all pairs of target and phase
PHASE_DEADLINE_S = 20.0  # several turns of all models; else nobody comes into this phase
UP_DEADLINE_S = 120.0
BACK_DEADLINE_S = 120.0
ANSWERS_DEADLINE_S = 300.0  # as long as a request may wait
POLL_S = 0.01
FIND_S = 0.005  # a process that is just being started is looked for this often,
FIND_DEADLINE_S = 1.5  # and so long

clock = SystemClock()


@dataclass(slots=True)
class Fallen:
    """A kill, and what the victim was: its successor is another process."""

    kill: PoolKill
    pid: int | None = None  # of the part, or of the engine's supervisor
    child: int | None = None  # of the gateway


class PoolKiller:
    """All kills of a drill of the pool in `directory`; writes into `records`."""

    def __init__(
        self,
        directory: Path,
        records: PoolDrillRecords,
        plan: PoolDrillPlan,
        watch: PoolWatch,
        observer: Observer,
        runner: PodRunner,
        say: Callable[[str], None],
    ) -> None:
        self._directory, self._records, self._plan = directory, records, plan
        self._watch, self._observer, self._runner, self._say = watch, observer, runner, say
        self._victims = Victims(directory, runner)
        self._unseen: set[tuple[ModelState, tuple[str, ...]]] = set()  # waited for in vain

    async def kill_all(self, targets: Sequence[str]) -> None:
        """
        Raises:
            WaitTimeoutError: something did not come back, or no model enters any phase.
        """
        records, kills, missed = self._records, self._records.kills, 0
        for target, phase in kill_order(targets):
            if len(kills) >= self._plan.kills:
                return
            share = len(kills) / self._plan.kills
            due_ms = records.began_ms + 1000 * self._plan.duration_s * share
            await asyncio.sleep(max(0.0, due_ms - clock.now_ms()) / 1000)
            await self._up()
            is_part = target in POOL_PARTS
            fallen = await (self._kill_part if is_part else self._kill_engine)(target, phase)
            if fallen is not None:
                kills.append(fallen.kill)
                await self._recover(fallen)
                continue
            missed += 1
            records.not_reached.append(f"{target} at {phase}")
            if missed > MISSED_MAX:
                raise WaitTimeoutError(
                    "drill.no_phase", f"{missed} times no model entered the phase for a kill"
                )

    async def _up(self) -> None:
        """Wait until every container is up, and lock server and pool are heard.

        Raises:
            WaitTimeoutError: `drill.not_up`.
        """
        deadline_s = self._plan.stretched_s(UP_DEADLINE_S)
        end_ms = clock.now_ms() + deadline_s * 1000
        while missing := self._not_up():
            if clock.now_ms() > end_ms:
                raise WaitTimeoutError(
                    "drill.not_up", f"{missing} did not come back within {deadline_s:g} s"
                )
            await asyncio.sleep(POLL_S)

    def _not_up(self) -> str:
        missing = list(self._runner.not_up())
        missing += [] if self._observer.is_watching_lock else ["the lock server"]
        missing += [] if self._watch.is_on else ["the pool"]
        return ", ".join(missing)

    # ------------------------------------------------------------------ one kill

    async def _entered(self, phase: ModelState, models: Sequence[str]) -> str | None:
        """The model that enters the phase; None: none does, or none did the last time."""
        asked = phase, tuple(models)
        if asked in self._unseen:
            return None
        deadline_s = self._plan.stretched_s(PHASE_DEADLINE_S)
        found = await self._watch.entered(phase, models, deadline_s)
        if found is None:
            self._unseen.add(asked)
        return found

    async def _kill_part(self, target: str, phase: ModelState) -> Fallen | None:
        """None: no model entered the phase."""
        models = list(self._records.models)
        with ExitStack() as stack:
            held: dict[str, FoundPart] = {}
            for name in models if target in OF_MODEL else models[:1]:
                found = await self._victims.find(target, name)
                if found is not None:
                    held[name] = stack.enter_context(self._victims.held(found, target))
            wanted = [*held] if target in OF_MODEL else models
            model = await self._entered(phase, wanted) if held else None
            if model is None:
                return None
            victim = held.get(model) or held[models[0]]
            kill = PoolKill(target, model, phase, clock.now_ms())
            kill.killed_ms, gone_ms = await self._victims.kill_part(target, victim)
        part = PartKill(target, kill.killed_ms, gone_ms=gone_ms, child=victim.child)
        self._records.base.part_kills.append(part)
        return Fallen(kill, victim.pid, victim.child)

    async def _kill_engine(self, target: str, phase: ModelState) -> Fallen | None:
        """None: no model entered the phase, or there was no such process any more."""
        models = self._records.models
        # Without a shadow a hang would last for half a minute: nobody could take over.
        needs_shadow = target.startswith((SHADOW, STOP))
        wanted = [name for name, each in models.items() if len(each) > 1 or not needs_shadow]
        document = await pool_status(self._directory)
        model = await self._entered(phase, wanted)
        if model is None:
            return None
        holder, token = holder_of(document, model)
        stands = holder if holder in models[model] else models[model][0]
        is_shadow = target.startswith(SHADOW)
        engine = next(each for each in models[model] if (each == stands) is not is_shadow)
        kill = PoolKill(target, model, phase, clock.now_ms(), engine, is_shadow)
        fallen = Fallen(kill, self._victims.supervisor(engine))
        end_ms = clock.now_ms() + FIND_DEADLINE_S * 1000
        while kill.failover is None and clock.now_ms() < end_ms:
            kill.failover = await self._victims.kill_engine(
                kill, models[model], token, self._observer
            )
            if kill.failover is None:
                await asyncio.sleep(FIND_S)  # its supervisor may be about to start it
        if kill.failover is None:
            return None
        kill.killed_ms = kill.failover.killed_ms
        self._records.base.kills.append(kill.failover)
        return fallen

    # ------------------------------------------------------------------ what follows

    async def _recover(self, fallen: Fallen) -> None:
        """Wait until the victim works again, and every model answers; note how it ended.

        Raises:
            WaitTimeoutError: `drill.not_back`, `drill.no_answers`.
        """
        kill, deadline_s = fallen.kill, self._plan.stretched_s(BACK_DEADLINE_S)
        end_ms = clock.now_ms() + deadline_s * 1000
        kill.outcome = "did not come back"
        while not await self._is_back(fallen):
            if clock.now_ms() > end_ms:
                raise WaitTimeoutError(
                    "drill.not_back",
                    f"{kill.engine or kill.target} did not come back within {deadline_s:g} s after"
                    f" the death of {kill.target} as {kill.model} was {kill.phase}",
                )
            await asyncio.sleep(POLL_S)
        kill.back_ms = clock.now_ms()
        if kill.failover is None:
            kill.outcome = "restarted"
            self._records.base.part_kills[-1].back_ms = kill.back_ms
        else:
            kill.outcome = await self._outcome(kill)
            await self._forgive(kill.model)
        await self._answers()
        whose = f" of {kill.engine}" if kill.engine else ""
        self._say(
            f"kill {len(self._records.kills)}/{self._plan.kills}  {kill.target}{whose} as"
            f" {kill.model} was {kill.phase}: {kill.outcome}, back after"
            f" {duration(kill.took_ms or 0.0)}; {len(self._records.switches)} switches"
        )

    async def _is_back(self, fallen: Fallen) -> bool:
        kill = fallen.kill
        with contextlib.suppress(UnderstudyError):  # the pool or the engine does not answer yet
            if kill.failover is not None:
                return await self._victims.is_engine_back(kill, fallen.pid)
            return await self._victims.is_part_back(kill, fallen.pid, fallen.child)
        return False

    async def _outcome(self, kill: PoolKill) -> str:
        document = await pool_status(self._directory)
        holder, _ = holder_of(document, kill.model)
        if holder is not None and holder != kill.engine and not kill.is_shadow:
            return f"{holder} took over"
        return "relaunched" if await self._victims.is_up(kill) else "cold, as the pool wants it"

    async def _forgive(self, model: str) -> None:
        """Let the pool forget the death: three of them in ten minutes are a fault of the model."""
        path = pool_socket(str(self._directory))
        with contextlib.suppress(UnderstudyError):
            await ask(path, CATALOGUE, OrderMsg(model, Order.RESET))

    async def _answers(self) -> None:
        """Wait until each model has answered since now.

        Raises:
            WaitTimeoutError: `drill.no_answers`.
        """
        exchanges, missing = self._records.base.exchanges, {*self._records.models}
        seen = len(exchanges)
        deadline_s = self._plan.stretched_s(ANSWERS_DEADLINE_S)
        end_ms = clock.now_ms() + deadline_s * 1000
        while missing:
            missing -= {each.model for each in exchanges[seen:] if each.end is End.DONE}
            seen = len(exchanges)
            if clock.now_ms() > end_ms:
                raise WaitTimeoutError(
                    "drill.no_answers",
                    f"{', '.join(sorted(missing))} did not answer within {deadline_s:g} s",
                )
            await asyncio.sleep(POLL_S)
