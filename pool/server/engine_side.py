"""The engines of all models: their words go to the core with their evidence, goals go to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from plumbing.pod.messages import EngineReportMsg, GoalGeneration, PoolWord, Tier
from plumbing.service.clock import Clock
from pool.core.events import EngineDead, EngineLost, EngineSaid, PoolEvent
from pool.server.engine_link import EngineLink
from pool.server.witnesses import WitnessWatch


class EngineSide:
    """One link for each engine."""

    def __init__(
        self,
        directory: str,
        models: Mapping[str, Sequence[str]],
        clock: Clock,
        feed: Callable[[PoolEvent], None],
    ) -> None:
        """`models`: the engines of each."""
        self._feed = feed
        self.links = {
            engine: EngineLink(directory, engine, model, clock, self._said, self._lost)
            for model, engines in models.items()
            for engine in engines
        }
        self.witnesses = WitnessWatch(
            directory,
            lambda engine, incarnation: feed(EngineDead(engine, incarnation)),
            lambda engine, number: feed(EngineDead(engine, "", number)),
        )

    @property
    def problems(self) -> Iterator[str]:
        for engine, link in self.links.items():
            if link.problem is not None:
                yield f"{engine}: {link.problem}"
        if self.witnesses.problem is not None:
            yield self.witnesses.problem

    def start(self) -> list[asyncio.Task[None]]:
        """Take up the evidence of an earlier pool, and connect to all engines."""
        self.witnesses.recover(self._owner)
        loop = asyncio.get_running_loop()
        return [loop.create_task(link.run()) for link in self.links.values()]

    def look(self) -> None:
        """Call this every second or so."""
        for link in self.links.values():
            link.look()

    def tell(
        self, engine: str, goal: Tier, generation: GoalGeneration, *, is_kill: bool = False
    ) -> None:
        if goal is not Tier.COLD:
            self.witnesses.withdraw(engine)
        self.links[engine].tell(goal, generation, is_kill=is_kill)

    def bases(self, device: str) -> int | None:
        """What their processes have there beside weights and KV memory; None: not known of all."""
        total = 0
        for link in self.links.values():
            word = link.said.pool if link.said is not None else None
            if word is None or link.said is None or not link.said.incarnation:
                continue
            if not word.base_bytes:
                return None
            total += word.base_bytes.get(device, 0)
        return total

    def close(self) -> None:
        self.witnesses.close()

    def _owner(self, incarnation: str) -> str | None:
        engine = incarnation.rpartition("-")[0]
        return engine if engine in self.links else None

    def _said(self, link: EngineLink, am: EngineReportMsg, word: PoolWord) -> None:
        engine = link.engine
        if am.incarnation and word.witness is not None:
            self.witnesses.keep(engine, am.incarnation, word.witness)
        self.witnesses.trust(am.incarnation)
        self.witnesses.suspect(engine, but=am.incarnation)
        self._feed(
            EngineSaid(
                engine=engine,
                model=word.model,
                incarnation=am.incarnation,
                token=am.token,
                state=am.state,
                tier=am.tier,
                goal_seen=word.generation,
                base_bytes=word.base_bytes,
                weights_bytes=word.weights_bytes,
                kv_bytes=word.kv_bytes,
                in_flight=am.in_flight,
                can_resume=word.can_resume,
                can_rest=am.can_rest,
                fault=am.fault,
                is_permanent=word.is_permanent,
                is_leaving=word.is_leaving,
                is_machine=word.is_machine,
            )
        )

    def _lost(self, link: EngineLink) -> None:
        self.witnesses.suspect(link.engine)
        self._feed(EngineLost(link.engine))
