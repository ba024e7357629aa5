"""The scenarios of our own pool: which pod each of them needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from hack.bench_gateway.rig import pod as plain_pod
from hack.bench_pool import costs, killing, streaming, switching, waiting
from hack.bench_pool.plan import HURRIED, THROUGH_STREAMS, Plan, StreamPlan
from hack.bench_pool.pods import BACKENDS, BenchedPool, PoolPlan, with_pool
from hack.bench_pool.programs import Figures
from plumbing.errors import UnderstudyError
from plumbing.service.signals import SignalInbox

Body = Callable[[BenchedPool], Awaitable[Figures]]


class Ours:
    """Runs scenarios one after the other. `found`: their figures; `problems`: those that ended
    early, with the reason."""

    def __init__(
        self, plan: Plan, base: Path, inbox: SignalInbox, say: Callable[[str], None]
    ) -> None:
        self._plan, self._base, self._inbox, self._say = plan, base, inbox, say
        self.found: dict[str, Figures] = {}
        self.problems: list[str] = []
        self._scenarios: Mapping[str, Callable[[], Awaitable[Figures]]] = {
            "S1": self._s1,
            "S2": self._s2,
            "S3": self._s3,
            "S4": self._s4,
            "S5": self._s5,
            "S6": self._s6,
            "S7": self._s7,
            "parts": self._parts,
        }

    async def run(self, name: str) -> None:
        """Raises Interrupted."""
        self._say(f"{name} …")
        try:
            self.found[name] = await self._scenarios[name]()
        except UnderstudyError as error:
            self.problems.append(f"{name} ended early: {error}"[:500])

    async def _pod(self, name: str, pod: PoolPlan, body: Body) -> Figures:
        return await with_pool(self._base / name, pod, self._inbox, self._say, body)

    def _pool(self, models: int, **more: Any) -> PoolPlan:
        return PoolPlan(self._plan.backend, models, **more)

    def _slow(self, streams: StreamPlan) -> tuple[str, ...]:
        """What makes an engine as slow as a large model's."""
        return streams.arguments if self._plan.backend == "reference" else ()

    async def _s1(self) -> Figures:
        async def body(pool: BenchedPool) -> Figures:
            a, b = pool.models
            found = await switching.of_pool(
                pool, [a, b], self._plan.s1_switches, self._plan.pause_s
            )
            offloaded = await switching.from_offloaded(pool, a, self._plan.offloads)
            return {**found, "from_offloaded": offloaded}

        return await self._pod("s1", self._pool(2), body)

    async def _s2(self) -> Figures:
        async def body(pool: BenchedPool) -> Figures:
            switches = self._plan.models * self._plan.s2_rounds
            found = await switching.of_pool(pool, pool.models, switches, self._plan.pause_s)
            return {"models": len(pool.models), **found}

        return await self._pod("s2", self._pool(self._plan.models), body)

    async def _s3(self) -> Figures:
        async def body(pool: BenchedPool) -> Figures:
            await pool.learn(pool.mixed[pool.models[0]])
            return await waiting.saturated_pool(pool, self._plan)

        return await self._pod("s3", self._pool(2, defaults=self._plan.fair), body)

    async def _s4(self) -> Figures:
        async def body(pool: BenchedPool) -> Figures:
            return {"models": len(pool.models), **await waiting.zipf(pool, self._plan)}

        pod = self._pool(self._plan.s4_models, awake=2, defaults=self._plan.fair)
        return await self._pod("s4", pod, body)

    async def _s5(self) -> Figures:
        async def body(pool: BenchedPool) -> Figures:
            return await streaming.through_streams(pool, self._plan)

        arguments = self._slow(self._plan.streams)
        pod = self._pool(2, defaults=THROUGH_STREAMS, arguments=arguments)
        return await self._pod("s5", pod, body)

    async def _s6(self) -> Figures:
        async def body(pool: BenchedPool) -> Figures:
            await pool.learn(pool.mixed[pool.models[0]])
            return await waiting.leavers(pool, self._plan)

        # Whoever waits for less than `max_wait` makes nobody yield.
        return await self._pod("s6", self._pool(2), body)

    async def _s7(self) -> Figures:
        async def body(pool: BenchedPool) -> Figures:
            return await killing.in_each_phase(pool, self._plan, self._say)

        arguments = self._slow(self._plan.s7_streams)
        return await self._pod("s7", self._pool(2, defaults=HURRIED, arguments=arguments), body)

    async def _parts(self) -> Figures:
        async def killed(pool: BenchedPool) -> Figures:
            return {
                "process": await costs.of_process(pool, self._plan.idle_s),
                "pool_killed": await killing.of_the_pool(pool, self._plan, self._say),
            }

        found = await self._pod("parts", self._pool(2, defaults=HURRIED), killed)
        if self._plan.backend == "reference":
            found |= await self._beside_without()
        return found

    async def _beside_without(self) -> Figures:
        """Beside a pod without a pool, with the same engines."""

        async def body(pool: BenchedPool) -> Figures:
            doors = (
                costs.Door("pool", pool.directory, pool.target.port),
                costs.Door("no_pool", directory, port),
            )
            return {
                "request": await costs.of_request(doors, self._plan),
                "failover": await costs.of_failover(doors, self._plan, self._say),
            }

        directory = self._base / "plain"
        arguments = BACKENDS[self._plan.backend].arguments
        with plain_pod(directory, arguments=arguments) as port:
            return await self._pod("shadow", self._pool(1, has_shadows=True), body)
