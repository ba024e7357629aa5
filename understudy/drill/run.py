"""One drill from start to end: learn the answers, load the pod, kill, wait, kill again.

Owns the order of the steps and the progress lines; judges nothing. It is kept lean, because it
shares its CPU cores with the pod whose speed it reports. `pool.py` has what is different in a pool.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.pod.paths import engine_sockets, lockserver_socket
from plumbing.service.clock import SystemClock
from plumbing.text import duration
from understudy.drill.clients import Target, inside_target, send, stream_without_pause
from understudy.drill.killer import (
    WHOLE_DEADLINE_S,
    Whole,
    changes,
    committed_devices,
    find_part,
    kill_engine,
    kill_part,
    note_adoption,
    standing,
    wait_back,
    wait_for,
    wait_whole,
)
from understudy.drill.machine import Burn, PhysicalMemory, roots_of
from understudy.drill.observer import Observer
from understudy.drill.prompts import bank_of, learn_answers, model_name, read_expected
from understudy.drill.records import (
    GMS,
    PARTS,
    Exchange,
    Kill,
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
UP_DEADLINE_S = 300.0  # a container's probe may run only every ten seconds
TAKEOVER_DEADLINE_S = 90.0  # more than the wake budget (60 s) and the hold (10 s)
PROBE_PAUSE_S = 0.002  # else a refusing port gets thousands of requests a second
GONE_AFTER_S = 3.0  # a part that is restarted listens again within a second
LOOK_S = 1.0  # the look costs the pod one connection

# Flags of both backends: the KV cache in memory that outlives its engine, and not using that.
LENT_KV, NO_ADOPTION = ("--kv-memory", "gms"), ("--no-kv-adoption",)

T = TypeVar("T")
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
    `switches`: of a pool, how many to wait for after the last kill.
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
    switches: int = 0

    @property
    def kills_wanted(self) -> int:
        return 0 if self.is_upgrade else self.kills

    @property
    def stretch(self) -> float:
        """By how much deadlines are longer on the busy machine: busy loops of the same priority
        leave the pod its share."""
        return 1.0 + self.burn


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
        self.prompts: list[Prompt] = []
        self.backend: str | None = None  # of the engines; known after `prepare`
        self._plan, self._say, self._runner = plan, say, runner
        self._targets = tuple(plan.targets)
        self._physical = PhysicalMemory()

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
        processes = targets_of(self.backend, backend.get("pids") or ())
        self._targets = self._targets or (*processes, *self._plan.also)
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

    async def run(self, target: Target) -> None:
        """All kills under load. Raises what ended the drill early; `records` is valid anyway."""
        records, stopping = self.records, asyncio.Event()
        burn = Burn(self._plan.burn)
        records.burn = burn.use if self._plan.burn else None
        burn.start()
        records.began_ms = clock.now_ms()
        observer = Observer(self.directory, engine_sockets(self.directory), records)
        clients = [asyncio.create_task(each) for each in self._clients(target, stopping)]
        try:
            await self._make_kills(target, observer)
            stopping.set()
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await observer.close()
            await self._physical.close()
            burn.stop()
            records.lasted_s = (clock.now_ms() - records.began_ms) / 1000
            if records.memory is not None:
                records.memory.peak_bytes = self._physical.peak_bytes

    def _clients(
        self, target: Target, stopping: asyncio.Event
    ) -> Iterable[Coroutine[Any, Any, None]]:
        done = self.records.exchanges.append
        for number in range(self._plan.clients):
            yield stream_without_pause(target, self.prompts, number, done, stopping)

    async def _make_kills(self, target: Target, observer: Observer) -> None:
        if self._plan.is_upgrade:
            await self._upgrade(observer)
        elif GMS in self._targets:
            await self._watch_memory()
        wanted = range(self._plan.kills_wanted)
        for number, what in zip(wanted, itertools.cycle(self._targets), strict=False):
            await self._until_due(number)
            await self._all_up(observer)
            whole = await self._whole()
            if what in PARTS:
                await self._kill_part(number + 1, what)
            else:
                await self._kill_engine(number + 1, what, whole, target, observer)
        await self._until_due(self._plan.kills_wanted)
        await self._whole()  # the last victim recovers, too

    async def _upgrade(self, observer: Observer) -> None:
        """Give both engines a new configuration, and send requests to both."""
        assert self._runner is not None  # upgrades are for pods that we run
        self.records.upgrade = Upgrade(f"{SETTING}={VALUE}")
        await self._answers()
        upgrader = Upgrader(self.directory, self._runner, observer, self._say, self._answers)
        await upgrader.run(self.records.upgrade)

    async def _until_due(self, kills: int) -> None:
        """Wait until the time for this number of kills has passed."""
        share = kills / max(1, self._plan.kills_wanted)
        due_ms = self.records.began_ms + 1000 * self._plan.duration_s * share
        await asyncio.sleep(max(0.0, due_ms - clock.now_ms()) / 1000)

    async def _whole(self) -> Whole:
        return await wait_whole(self.directory, self._say, WHOLE_DEADLINE_S * self._plan.stretch)

    async def _watch_memory(self) -> None:
        """Note the committed memory, and start sampling the physical memory."""
        view = await gather(self.directory)
        sizes = [int(each["committed_bytes"]) for each in committed_devices(view).values()]
        self.records.memory = MemoryUse(sum(sizes), min(sizes, default=0))
        self._physical.watch(roots_of(await pids_of(self.directory)))

    async def _all_up(self, observer: Observer) -> None:
        """Wait until every container has passed its startup probe, and its watches are connected.

        Raises:
            WaitTimeoutError: `drill.not_up`, with what is missing.
        """

        async def look() -> str | None:
            missing = list(self._runner.not_up()) if self._runner is not None else []
            return ", ".join([*missing, *observer.unwatched()]) or None

        deadline_s = UP_DEADLINE_S * self._plan.stretch
        await wait_for(look, deadline_s, "drill.not_up", "the pod was not up again")

    async def _kill_part(self, number: int, what: str) -> None:
        """Kill a part that is not an engine, and record what else its death has changed."""
        kill = Kill(what)
        made = sum(each.target == what for each in self.records.kills)
        before = standing(await gather(self.directory))
        with ExitStack() as stack:
            victim = await find_part(self.directory, what, stack, number=made)
            assert victim is not None  # only a model's part may be missing
            kill.device = victim.device
            self.records.kills.append(kill)
            await kill_part(victim, kill)
        await wait_back(self.directory, victim, kill, self._say, self._plan.stretch)
        await self._whole()
        if self.records.memory is not None:  # earlier kills may have replaced engines
            self._physical.watch(roots_of(await pids_of(self.directory)))
        await self._answers()
        after = standing(await gather(self.directory))
        about = f"after the death of {kill.victim}"
        self.records.disturbed += [f"{about}, {each}" for each in changes(before, after)]
        took = duration(kill.took_ms or 0.0)
        self._say(f"kill {number}/{self._plan.kills}  {kill.victim}  back after {took}")

    async def _kill_engine(
        self, number: int, what: str, whole: Whole, target: Target, observer: Observer
    ) -> None:
        kill = Kill(what, whole.engine, whole.token)
        await kill_engine(self.directory, kill, observer)
        self.records.kills.append(kill)
        took_ms = await self._probe(kill, target)
        why = await note_adoption(self.directory, kill)
        self._say(
            f"kill {number}/{self._plan.kills}  {what} of {kill.engine}  "
            f"{kill.new_engine or 'its successor'} answered after {duration(took_ms)}"
            f"{f', KV blocks were not adopted: {why}' if why else ''}"
        )

    async def _answers(self) -> None:
        """Wait until every client has had two more answers, so that a recovered part is used, too.

        Raises:
            WaitTimeoutError: `drill.no_answers`.
        """
        goal = len(self.records.exchanges) + 2 * self._plan.clients

        async def look() -> str | None:
            missing = goal - len(self.records.exchanges)
            return f"{missing} are missing, although nothing was killed" if missing > 0 else None

        deadline_s = ANSWERS_DEADLINE_S * self._plan.stretch
        await wait_for(look, deadline_s, "drill.no_answers", "requests did not complete")

    async def _probe(self, kill: Kill, target: Target) -> float:
        """Send requests until the new active engine answers; milliseconds since the kill.

        Raises:
            WaitTimeoutError: `drill.no_takeover`.
        """
        # Only a stream shows its first token when it is there.
        streams = [each for each in self.prompts if each.body.get("stream")]
        prompts = itertools.cycle(streams or self.prompts)

        async def look() -> Exchange | str:
            exchange = await send(target, next(prompts))
            self.records.exchanges.append(exchange)
            is_newer = exchange.token is not None and exchange.token > kill.old_token
            if is_newer and exchange.first_token_ms is not None:
                return exchange
            return f"the last request: {exchange.end}, status {exchange.status}, {exchange.detail}"

        deadline_s = TAKEOVER_DEADLINE_S * self._plan.stretch
        what = f"no engine took over from {kill.engine}"
        found = await wait_for(look, deadline_s, "drill.no_takeover", what, poll_s=PROBE_PAUSE_S)
        return (found.first_token_ms or found.ended_ms) - kill.killed_ms


# ------------------------------------------------------------------ a pod that is gone


async def unless_gone(directory: Path, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the pod in `directory` is gone: what it waits for
    will not come. A drill kills one part at a time, so some part of a living pod always listens.

    Raises:
        UnreachableError: `drill.pod_gone`.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(_until_gone(directory))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        watching.result()
        raise UnreachableError(
            "drill.pod_gone",
            f"the pod in {directory} is gone: for {GONE_AFTER_S:g} s no part of it has listened;"
            " see its logs, and start it again with `understudy up`",
            dir=str(directory),
        )
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(directory: Path) -> None:
    """Return once no part has listened for `GONE_AFTER_S`."""
    seen_ms = clock.now_ms()
    while clock.now_ms() - seen_ms < GONE_AFTER_S * 1000:
        await asyncio.sleep(LOOK_S)
        # The lock server comes first, as it is nearly always there.
        paths = [lockserver_socket(str(directory)), *map(str, directory.glob("*.sock"))]
        if any(listens(path) for path in paths):
            seen_ms = clock.now_ms()


def listens(path: str) -> bool:
    """Whether a process may listen on the Unix socket `path`: only the kernel's refusal says no."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog is one of a listener
            return True
    return True
