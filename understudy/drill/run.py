"""One drill from start to end: learn the answers, load the pod, kill, wait, kill again.

Owns the order of the steps and the progress lines; judges nothing. It is kept lean, because it
shares its CPU cores with the pod whose speed it reports.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plumbing.errors import UnderstudyError, UsageError, WaitTimeoutError
from plumbing.part.format import duration
from plumbing.part.paths import engine_sockets
from plumbing.service.clock import SystemClock
from understudy.drill import part_killer
from understudy.drill.burn import Burn
from understudy.drill.clients import Target, inside_target, send, stream_without_pause
from understudy.drill.kept import note_adoption
from understudy.drill.killer import WHOLE_DEADLINE_S, Whole, kill_active, wait_whole
from understudy.drill.observer import Observer
from understudy.drill.part_killer import PhysicalMemory, Standing
from understudy.drill.prompts import bank_of, learn_answers, model_name, read_expected
from understudy.drill.records import (
    GATEWAYS,
    GMS,
    PARTS,
    EngineKill,
    MemoryUse,
    Prompt,
    Records,
    Upgrade,
    base_targets,
    targets_of,
)
from understudy.drill.upgrade import SETTING, VALUE, Upgrader
from understudy.pod.runner import PodRunner
from understudy.status.gather import engine_parts, gather, pids_of, require_pod, status_of

FIRST_WHOLE_DEADLINE_S = 7200.0  # a first start may wait two hours for the weights
ANSWERS_DEADLINE_S = 90.0  # longer than a client waits for a silent server
ANSWERS_POLL_S = 0.01
UP_DEADLINE_S = 300.0  # a container's probe may run only every ten seconds
TAKEOVER_DEADLINE_S = 90.0  # more than the wake budget (60 s) and the hold (10 s)

clock = SystemClock()


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """How many kills, of which targets, under how much load.

    `targets` are killed in turn; default: every process of an engine of this pod, and `also`.
    `expected`: a file of prompts and answers; default: the first active engine's answers.
    `is_upgrade`: no kills; both engines get a new configuration instead.
    `burn`: number of busy loops per CPU meanwhile; `duration_s`: spread the kills over this time.
    `has_long_prompts`: most requests share a long beginning.
    `outside`: where clients send requests instead of to the pod itself.
    """

    kills: int = 20
    targets: Sequence[str] = ()
    clients: int = 4
    expected: Path | None = None
    also: Sequence[str] = ()
    is_upgrade: bool = False
    burn: int = 0
    duration_s: float = 0.0
    has_long_prompts: bool = False
    outside: Target | None = None

    @property
    def kills_wanted(self) -> int:
        return 0 if self.is_upgrade else self.kills

    def stretched_s(self, deadline_s: float) -> float:
        """A deadline on the busy machine: loops of the same priority leave the pod its share."""
        return deadline_s * (1 + self.burn)


class Drill:
    """A drill on the pod whose sockets are in `directory`. `records` grows while it runs."""

    def __init__(
        self,
        directory: Path,
        plan: DrillPlan,
        say: Callable[[str], None],
        runner: PodRunner | None = None,
    ) -> None:
        """`runner` runs the pod, if the drill started it. Upgrades need it. Nothing is killed until
        its containers have passed their startup probes: before that a hang goes unnoticed."""
        self.records = Records()
        self.directory = directory
        self._plan = plan
        self._say = say
        self._targets = tuple(plan.targets)
        self._runner = runner
        self._physical = PhysicalMemory()
        self.prompts: list[Prompt] = []
        self.backend: str | None = None  # of the engines; known after `prepare`

    async def prepare(self) -> Target:
        """Wait until the pod is ready for a failover, and learn the expected answers.

        Raises:
            UnderstudyError: the pod does not become ready, or its model gives no usable answers.
        """
        await require_pod(self.directory)
        whole = await wait_whole(self.directory, self._say, FIRST_WHOLE_DEADLINE_S)
        engines = {part.name: part for part in engine_parts(self.directory)}
        backend = (await status_of(engines[whole.engine])).get("backend") or {}
        self.backend = backend.get("name")
        self.records.targets = base_targets(self.backend)
        self.records.is_direct = whole.is_direct
        processes = targets_of(self.backend, backend.get("pids") or ())
        gateways = GATEWAYS if whole.is_direct else ()
        self._refuse_targets(gateways)
        also = [part for part in self._plan.also if part not in gateways]
        self._targets = self._targets or (*processes, *also)
        inside = inside_target(whole.service)
        target = self._plan.outside or inside
        self.records.url = target.url
        model = await model_name(inside)
        if self._plan.expected is not None:
            self.prompts, self.records.expected = read_expected(self._plan.expected, model)
        else:
            bank = bank_of(self.backend, model, is_long=self._plan.has_long_prompts)
            self.prompts, self.records.expected = await learn_answers(target, bank, len(bank))
        if target.url:
            await self._check_outside(target, whole)
        self._say(
            f"{whole.engine} serves {model} at {target.url or whole.service}, "
            f"standby: {', '.join(whole.standbys)}; "
            f"{len(self.prompts)} prompts, {self._plan.clients} clients"
        )
        return target

    async def _check_outside(self, target: Target, before: Whole) -> None:
        """Raise if the address leads to another pod, whose tokens are of another lock.

        Raises:
            UnderstudyError: `drill.other_pod`.
        """
        after = await self._whole()
        for each in self.records.expected.values():
            if each.token is not None and not before.token <= each.token <= after.token:
                raise UnderstudyError(
                    "drill.other_pod",
                    f"an answer from {target.url} has token {each.token}, and the lock of the pod"
                    f" in {self.directory} has {after.token}: does it lead to another pod, too?",
                )

    def _refuse_targets(self, absent: Sequence[str]) -> None:
        named = [target for target in self._targets if target in absent]
        if named:
            raise UsageError(
                "drill.no_gateway",
                f"--target {named[0]}: this pod has no gateway, because it is in direct mode; "
                "choose another target, or start the pod without --direct",
            )

    async def run(self, target: Target) -> None:
        """All kills under load. Raises what ended the drill early; `records` is valid anyway."""
        stopping = asyncio.Event()
        burn = Burn(self._plan.burn)
        self.records.burn = burn.use if self._plan.burn else None
        burn.start()
        began_ms = clock.now_ms()
        engines = engine_sockets(self.directory)
        observer = Observer(self.directory, engines, self.records)
        exchanges = self.records.exchanges
        clients = [
            asyncio.create_task(
                stream_without_pause(target, self.prompts, number, exchanges.append, stopping)
            )
            for number in range(self._plan.clients)
        ]
        try:
            if self._plan.is_upgrade:
                await self._upgrade(observer)
            elif GMS in self._targets:
                await self._watch_memory()
            for number, what in zip(
                range(1, self._plan.kills_wanted + 1), itertools.cycle(self._targets), strict=False
            ):
                await self._until_due(began_ms, number - 1)
                await self._all_up(observer)
                whole = await self._whole()
                if what == GMS:
                    await self._kill_memory(number)
                elif what in PARTS:
                    await self._kill_part(number, what)
                else:
                    await self._kill(number, what, whole, target, observer)
            await self._until_due(began_ms, self._plan.kills_wanted)
            await self._whole()  # the last victim recovers, too
            stopping.set()
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await observer.close()
            await self._physical.close()
            burn.stop()
            self.records.lasted_s = (clock.now_ms() - began_ms) / 1000
            if self.records.memory is not None:
                self.records.memory.peak_bytes = self._physical.peak_bytes

    async def _upgrade(self, observer: Observer) -> None:
        """Give both engines a new configuration, and send requests to both."""
        assert self._runner is not None  # upgrades are for pods that we run
        self.records.upgrade = Upgrade(f"{SETTING}={VALUE}")
        await self._answers(2 * self._plan.clients)
        upgrader = Upgrader(
            self.directory,
            self._runner,
            observer,
            self._say,
            lambda: self._answers(2 * self._plan.clients),
        )
        await upgrader.run(self.records.upgrade)

    async def _until_due(self, began_ms: float, kills: int) -> None:
        """Wait until the time for so many kills has passed."""
        share = kills / max(1, self._plan.kills_wanted)
        due_ms = began_ms + 1000 * self._plan.duration_s * share
        await asyncio.sleep(max(0.0, due_ms - clock.now_ms()) / 1000)

    async def _whole(self) -> Whole:
        deadline_s = self._plan.stretched_s(WHOLE_DEADLINE_S)
        return await wait_whole(self.directory, self._say, deadline_s)

    def _not_up(self) -> Sequence[str]:
        return self._runner.not_up() if self._runner is not None else ()

    async def _watch_memory(self) -> None:
        """Note the committed memory, and start sampling the physical memory."""
        view = await gather(self.directory)
        sizes = [
            int(each["committed_bytes"]) for each in part_killer.committed_devices(view).values()
        ]
        self.records.memory = MemoryUse(sum(sizes), min(sizes, default=0))
        self._physical.watch(part_killer.roots_of(await pids_of(self.directory)))

    async def _all_up(self, observer: Observer) -> None:
        """Wait until every container has passed its startup probe, and the lock server is watched.

        Raises:
            WaitTimeoutError: `drill.not_up`, with what is missing.
        """
        deadline_s = self._plan.stretched_s(UP_DEADLINE_S)
        end_ms = clock.now_ms() + deadline_s * 1000
        while self._not_up() or not observer.is_watching_lock:
            if clock.now_ms() > end_ms:
                missing = ", ".join(self._not_up()) or "the lock server"
                raise WaitTimeoutError(
                    "drill.not_up", f"{missing} did not come back within {deadline_s:g} s"
                )
            await asyncio.sleep(ANSWERS_POLL_S)

    async def _kill_part(self, number: int, what: str) -> None:
        """Kill a part that is not an engine, and record what else its death has changed."""
        kill, before, memory = await part_killer.kill_part(self.directory, what)
        self.records.part_kills.append(kill)
        await part_killer.wait_back(self.directory, kill, memory)
        await self._whole()
        await self._answers(2 * self._plan.clients)
        await self._compare(what, before)
        took_ms = (kill.back_ms or kill.killed_ms) - kill.killed_ms
        self._say(f"kill {number}/{self._plan.kills}  {what}  back after {duration(took_ms)}")

    async def _compare(self, what: str, before: Standing) -> None:
        """Record what the death of `what` has changed."""
        changes = before.changes(Standing.of(await gather(self.directory)))
        self.records.disturbed += [f"after the death of {what}, {changed}" for changed in changes]

    async def _kill_memory(self, number: int) -> None:
        """Kill a memory server, and record what else its death has changed."""
        made = len(self.records.memory_kills)
        kill, before = await part_killer.kill_server(self.directory, made)
        self.records.memory_kills.append(kill)
        await part_killer.wait_recovered(self.directory, kill, self._say)
        # Earlier kills may have replaced engines.
        self._physical.watch(part_killer.roots_of(await pids_of(self.directory)))
        await self._answers(2 * self._plan.clients)
        await self._compare(f"the server of {kill.device}", before)
        took_ms = (kill.recovered_ms or kill.killed_ms) - kill.killed_ms
        self._say(
            f"kill {number}/{self._plan.kills}  gms server of {kill.device}  "
            f"recovered after {duration(took_ms)}"
        )

    async def _kill(
        self, number: int, what: str, whole: Whole, target: Target, observer: Observer
    ) -> None:
        kill = await kill_active(self.directory, what, whole, observer)
        self.records.kills.append(kill)
        took_ms = await self._probe(kill, target)
        await note_adoption(self.directory, kill)
        self._say(
            f"kill {number}/{self._plan.kills}  {what} of {kill.engine}  "
            f"{kill.new_engine or 'its successor'} answered after {duration(took_ms)}"
        )

    async def _answers(self, count: int) -> None:
        """Wait until `count` more requests have completed, so that a recovered part is used, too.

        Raises:
            WaitTimeoutError: `drill.no_answers`.
        """
        goal = len(self.records.exchanges) + count
        deadline_s = self._plan.stretched_s(ANSWERS_DEADLINE_S)
        end_ms = clock.now_ms() + deadline_s * 1000
        while len(self.records.exchanges) < goal:
            if clock.now_ms() > end_ms:
                raise WaitTimeoutError(
                    "drill.no_answers",
                    f"{count} requests did not complete within {deadline_s:g} s, although"
                    " nothing was killed",
                )
            await asyncio.sleep(ANSWERS_POLL_S)

    async def _probe(self, kill: EngineKill, target: Target) -> float:
        """Send requests until the new active engine answers; milliseconds since the kill."""
        # Only a stream shows its first token when it is there.
        streams = [each for each in self.prompts if each.body.get("stream")]
        prompts = itertools.cycle(streams or self.prompts)
        deadline_s = self._plan.stretched_s(TAKEOVER_DEADLINE_S)
        end_ms = kill.killed_ms + deadline_s * 1000
        while True:
            exchange = await send(target, next(prompts))
            self.records.exchanges.append(exchange)
            is_newer = exchange.token is not None and exchange.token > kill.old_token
            if is_newer and exchange.first_token_ms is not None:
                return exchange.first_token_ms - kill.killed_ms
            if exchange.ended_ms > end_ms:
                raise WaitTimeoutError(
                    "drill.no_takeover",
                    f"no engine took over from {kill.engine} within {deadline_s:g} s; "
                    "the last "
                    f"request: {exchange.end}, status {exchange.status}, {exchange.detail}",
                )
            # Without this, a refusing port would get thousands of requests a second.
            await asyncio.sleep(0.002)
