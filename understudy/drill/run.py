"""One drill from start to end: learn the answers, load the pod, kill, wait, kill again.

Owns the order of the steps and the progress lines; judges nothing. It is kept lean, because it
shares its CPU cores with the pod whose speed it reports.

A pool's drill has more victims and several models. Clients send requests in bursts, those of the
first model in longer ones, so that all models also become idle. Every part is to die in every state
of a model, so a kill waits until a model enters a state.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from engine import messages as engine_messages
from plumbing.errors import RemoteError, UnderstudyError, UnreachableError
from plumbing.pod.models import lock_of
from plumbing.pod.observers import ask
from plumbing.pod.paths import engine_socket, engine_sockets, pool_socket
from plumbing.service.clock import SystemClock
from plumbing.text import duration
from pool.core.events import Order
from pool.core.states import ModelState
from pool.messages import CATALOGUE, OrderMsg
from pool.pool_file import PoolFile, engines_of
from understudy.drill.clients import Target, inside_target, pause, send, stream_without_pause
from understudy.drill.killer import (
    WHOLE_POLL_S,
    Whole,
    find_part,
    kill_engine,
    kill_part,
    note_adoption,
    service_of,
    wait_back,
    wait_for,
    wait_whole,
)
from understudy.drill.observer import Observer
from understudy.drill.prompts import bank_of, learn_answers, model_name, pool_prompts
from understudy.drill.records import End, Exchange, Kill, Prompt, Records, StatedBound
from understudy.drill.targets import (
    ALL_PARTS,
    SHADOW,
    STOP,
    SUPERVISOR,
    kill_order,
    pool_targets,
    process_of,
    targets_of,
)
from understudy.pod.runner import PodRunner
from understudy.status.gather import (
    PodPart,
    engine_parts,
    gather,
    part_of,
    said_by,
    status_of,
)

FIRST_WHOLE_DEADLINE_S = 7200.0  # a first start may wait two hours for the weights
START_DEADLINE_S = 120.0  # until gateway, pool and engines have found one another
UP_DEADLINE_S = 300.0  # a container's probe may run only every ten seconds
TAKEOVER_DEADLINE_S = 90.0  # more than the wake budget (60 s) and the hold (10 s)
PROBE_PAUSE_S = 0.002  # else a refusing port gets thousands of requests a second
ANSWERS_DEADLINE_S = 90.0  # longer than a client waits for a silent server

# In a pool.
WORKING = ("standby", "resting", "active")  # of an engine that has come back from its death
LEARNED_AT_ONCE = 5
POOL_ANSWERS_DEADLINE_S = 300.0  # as long as a request may wait
SILENCE_S = 330.0  # longer than a ticket waits in the gateway by default, which ends in an answer
CLIENTS_MIN = 2  # of each model: one that streams for longer than a turn, one that sends anew
BURST, FIRST_BURST = 4, 12  # requests of a client, after which its model is left alone
PAUSE_S = 2.5
MISSED_MAX = 300  # kills for which there was no moment: more than all pairs of target and state
STATE_DEADLINE_S = 20.0  # several turns of all models; else no model enters this state
BACK_DEADLINE_S = 120.0
FIND_S = 0.002  # between two looks for a state, or a process that is just being started
FIND_DEADLINE_S = 1.5  # after that, the engine has no such process
STATED_EVERY_S = 1.0  # how often the bounds are read: they change with costs and requests

clock = SystemClock()


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """How many kills, of which targets, under how much load.

    `targets` are killed in turn; default: every process of an engine of this pod, or, in a pool,
    every part.
    `expected`: prompts and their answers; default: the first active engine's answers.
    `duration_s`: spread the kills over this time.
    `outside`: where clients send requests instead of to the pod itself.
    """

    kills: int = 20
    targets: Sequence[str] = ()
    clients: int = 4
    expected: tuple[Sequence[Prompt], dict[str, Exchange]] | None = None
    duration_s: float = 0.0
    outside: Target | None = None


class Drill:
    """A drill on the pod whose sockets are in `directory`. `records` grows while it runs."""

    def __init__(
        self,
        directory: Path,
        plan: DrillPlan,
        say: Callable[[str], None],
        runner: PodRunner | None = None,
        file: PoolFile | None = None,
    ) -> None:
        """`runner` runs the pod, if the drill started it. Nothing is killed until its containers
        have passed their startup probes: before that a hang goes unnoticed.
        `file`: that of the pod's pool, if it has one.
        """
        self.records = Records()
        self.directory = directory
        self.prompts: list[Prompt] = []
        self.backend: str | None = None  # of the engines; known after `prepare`
        self.plan, self.say = plan, say
        self.runner = runner or PodRunner([], directory / "log")
        self._targets = tuple(plan.targets)
        self._models: dict[str, tuple[str, ...]] = {}  # of a pool: each model's engines
        self._missed: set[tuple[ModelState, tuple[str, ...]]] = set()  # waited for in vain
        if file is not None:
            self._models = {name: engines_of(name, each) for name, each in file.models.items()}
            self.records.models = self._models
            self.backend = next(iter(file.models.values())).backend
            has_shadow = any(len(each) > 1 for each in self._models.values())
            self._targets = self._targets or pool_targets(self.backend, has_shadow=has_shadow)

    # ------------------------------------------------------------------ before the first kill

    async def prepare(self) -> Target:
        """Wait until the pod is ready for a failover, and learn the expected answers.

        Raises:
            UnderstudyError: the pod does not become ready, or a model gives no usable answers.
        """
        return await (self._prepare_pool() if self._models else self._prepare_pod())

    async def _prepare_pod(self) -> Target:
        whole = await wait_whole(self.directory, self.say, FIRST_WHOLE_DEADLINE_S)
        engines = {part.name: part for part in engine_parts(self.directory)}
        backend = (await status_of(engines[whole.engine])).get("backend") or {}
        self.backend = backend.get("name")
        self._targets = self._targets or targets_of(self.backend, backend.get("pids") or ())
        inside = inside_target(whole.service)
        target = self.plan.outside or inside
        self.records.url = target.url
        model = await model_name(inside)
        if self.plan.expected is not None:
            prompts, self.records.expected = self.plan.expected
            self.prompts = [
                structs.replace(each, body={**each.body, "model": model}) for each in prompts
            ]
        else:
            bank = bank_of(self.backend, model)
            self.prompts, self.records.expected = await learn_answers(target, bank)
        newest = (await self._whole()).token if target.url else 0
        for each in self.records.expected.values():
            if newest and each.token is not None and not whole.token <= each.token <= newest:
                raise UnderstudyError(
                    "drill.other_pod",
                    f"an answer from {target.url} has token {each.token}, and the lock of the pod"
                    f" in {self.directory} has {newest}: does it lead to another pod, too?",
                )
        self.say(
            f"{whole.engine} serves {model} at {target.url or whole.service}, "
            f"standby: {', '.join(whole.standbys)}; "
            f"{len(self.prompts)} prompts, {self.plan.clients} clients"
        )
        return target

    async def _prepare_pool(self) -> Target:
        async def look() -> str | None:
            view = await gather(self.directory)
            missing = view["problems"] if view["pool"] is not None else ["no pool runs"]
            return next(iter(missing), None)

        failed = "the pool was not ready"
        await wait_for(look, START_DEADLINE_S, "drill.not_up", failed, poll_s=WHOLE_POLL_S)
        target = inside_target(service_of(await status_of(part_of(self.directory, "lockserver"))))
        # The reference backend computes each request alike, whatever runs beside it.
        at_once = 1 if self.backend == "vllm" else LEARNED_AT_ONCE
        for model in self._models:
            began_ms, bank = clock.now_ms(), pool_prompts(self.backend, model)
            parts = [bank[number::at_once] for number in range(at_once)]
            learned = await asyncio.gather(*(learn_answers(target, part) for part in parts))
            for _, answers in learned:
                self.records.expected |= answers
            used = [each for each in bank if each.key in self.records.expected]
            self.prompts += used
            took = duration(clock.now_ms() - began_ms)
            self.say(f"{model}: {len(used)} answers learned in {took}")
        return target

    # ------------------------------------------------------------------ under load

    async def run(self, target: Target) -> None:
        """All kills under load. Raises what ended the drill early; `records` is valid anyway."""
        records, stopping = self.records, asyncio.Event()
        records.began_ms = clock.now_ms()
        self._observe()
        tasks = [asyncio.create_task(each) for each in self._clients(target, stopping)]
        try:
            await self._make_kills(target)
            stopping.set()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close_watches()
            records.lasted_s = (clock.now_ms() - records.began_ms) / 1000

    def _observe(self) -> None:
        self._observer = Observer(self.directory, engine_sockets(self.directory), self.records)

    def _unwatched(self) -> list[str]:
        """What the next kill must wait for."""
        return self._observer.unwatched()

    async def _close_watches(self) -> None:
        await self._observer.close()

    def _clients(
        self, target: Target, stopping: asyncio.Event
    ) -> Iterable[Coroutine[Any, Any, None]]:
        if not self._models:
            done = self.records.exchanges.append
            for number in range(self.plan.clients):
                yield stream_without_pause(target, self.prompts, number, done, stopping)
            return
        for order, model in enumerate(self._models):
            yield self._bursts(target, model, BURST if order else FIRST_BURST, stopping)
        yield self._note_bounds(stopping)

    async def _bursts(
        self, target: Target, model: str, burst: int, stopping: asyncio.Event
    ) -> None:
        """The clients of a model: each sends a burst of requests, and all pause together."""
        prompts = [each for each in self.prompts if each.body["model"] == model]
        count = max(CLIENTS_MIN, -(-self.plan.clients // len(self._models)))
        done = self.records.exchanges.append
        for sent in itertools.count(step=burst):
            starts = (sent + number * len(prompts) // count for number in range(count))
            how = (done, stopping, burst, SILENCE_S)
            streams = (stream_without_pause(target, prompts, start, *how) for start in starts)
            await asyncio.gather(*streams)
            if stopping.is_set():
                return
            await pause(stopping, PAUSE_S)

    async def _note_bounds(self, stopping: asyncio.Event) -> None:
        """Note the bounds that the pool states, while it answers."""
        while not stopping.is_set():
            models, now_ms = (await self._pool()).get("models") or (), clock.now_ms()
            self.records.bounds += [
                StatedBound(now_ms, each["model"], each.get("bound_ms")) for each in models
            ]
            await pause(stopping, STATED_EVERY_S)

    async def _make_kills(self, target: Target) -> None:
        """
        Raises:
            WaitTimeoutError: something did not come back.
        """
        kills, missed, wanted = self.records.kills, self.records.not_reached, self.plan.kills
        plain = ((each, None) for each in itertools.cycle(self._targets))
        for what, state in kill_order(self._targets) if self._models else plain:
            if len(kills) >= wanted or len(missed) > MISSED_MAX:
                break
            await self._until_due(len(kills))
            await self._all_up()
            kill = await self._kill(what, state, target)
            if kill is None:
                missed.append(f"{what} at {state}")
            else:
                self.say(self._line(kill))
        await self._until_due(wanted)
        await self._all_up()  # the last victim, too
        if self.records.mode == "gateway":
            await self._whole()

    def _line(self, kill: Kill) -> str:
        """`kill 3/20  backend-model of engine-0  engine-1 answered after 31 ms`."""
        at = f" as {kill.model} was {kill.phase}" if kill.model else ""
        back = "" if kill.took_ms is None else f", back after {duration(kill.took_ms)}"
        made = f"kill {len(self.records.kills)}/{self.plan.kills}"
        done = f"{made}  {kill.name}{at}  {kill.result}{back}"
        return f"{done}; {len(self.records.switches)} switches" if self._models else done

    async def _until_due(self, kills: int) -> None:
        """Wait until the time for this number of kills has passed."""
        share = kills / max(1, self.plan.kills)
        due_ms = self.records.began_ms + 1000 * self.plan.duration_s * share
        await asyncio.sleep(max(0.0, due_ms - clock.now_ms()) / 1000)

    # ------------------------------------------------------------------ one kill

    async def _kill(self, what: str, state: ModelState | None, target: Target) -> Kill | None:
        """None: there was no moment for it."""
        whole = None if self._models else await self._whole()
        if what in ALL_PARTS:
            return await self._kill_part(what, state)
        if whole is not None:
            return await self._kill_active(what, whole, target)
        return await self._kill_models_engine(what, state)

    async def _kill_part(self, what: str, state: ModelState | None) -> Kill | None:
        """Kill a part that is not an engine, whose death no engine may follow. None: no model
        entered the state."""
        made = sum(each.target == what for each in self.records.kills)
        with ExitStack() as stack:
            is_pool = bool(self._models)
            victim = await find_part(self.directory, what, stack, number=made, is_pool=is_pool)
            model = "" if state is None else await self._entered(state, tuple(self._models))
            if model is None:
                return None
            kill = Kill(what, model=model, phase=state or "", result="did not come back")
            self.records.kills.append(kill)
            await kill_part(victim, kill)
        await wait_back(self.directory, victim, kill, self.say)
        kill.result = "restarted"
        if not self._models:
            await self._whole()
        await self._answers()
        return kill

    async def _kill_active(self, what: str, whole: Whole, target: Target) -> Kill:
        """Kill a process of the active engine, and send requests until another engine answers.

        Raises:
            WaitTimeoutError: `drill.no_takeover`.
        """
        kill = Kill(what, whole.engine, whole.token, result="no engine took over")
        await kill_engine(self.directory, kill, self._observer)
        self.records.kills.append(kill)
        # Only a stream shows its first token when it is there.
        streams = [each for each in self.prompts if each.body.get("stream")]
        prompts = itertools.cycle(streams or self.prompts)

        async def look() -> float | str:
            exchange = await send(target, next(prompts))
            self.records.exchanges.append(exchange)
            is_newer = exchange.token is not None and exchange.token > kill.old_token
            if is_newer and exchange.first_token_ms is not None:
                return exchange.first_token_ms - kill.killed_ms
            return f"the last request: {exchange.end}, status {exchange.status}, {exchange.detail}"

        failed = f"no engine took over from {kill.engine}"
        deadline_s, code = TAKEOVER_DEADLINE_S, "drill.no_takeover"
        took_ms = await wait_for(look, deadline_s, code, failed, poll_s=PROBE_PAUSE_S)
        why = await note_adoption(self.directory, kill)
        kill.result = f"{kill.new_engine or 'its successor'} answered after {duration(took_ms)}"
        kill.result += f", KV blocks were not adopted: {why}" if why else ""
        return kill

    async def _kill_models_engine(self, what: str, state: ModelState | None) -> Kill | None:
        """Kill a process of an engine as its model enters `state`, and wait until it is back. None:
        no model entered the state, or there was no such process any more.

        Raises:
            WaitTimeoutError: `drill.not_back`.
        """
        # Without a shadow a hang would last for half a minute: no engine could take over.
        needs_shadow, is_shadow = what.startswith((SHADOW, STOP)), what.startswith(SHADOW)
        wanted = (name for name, each in self._models.items() if len(each) > 1 or not needs_shadow)
        assert state is not None  # in a pool each kill has one
        model = await self._entered(state, tuple(wanted))
        if model is None:
            return None
        engines = self._models[model]
        locks = (await status_of(part_of(self.directory, "lockserver"))).get("locks") or {}
        holder = (locks.get(lock_of(model)) or {}).get("holder") or {}
        first = holder["engine"] if holder.get("engine") in engines else engines[0]
        engine = next(each for each in engines if (each == first) is not is_shadow)
        supervisor, _ = await self._engine(engine)
        kill = Kill(what, engine, int(holder.get("token") or 0), peers=engines, model=model)
        kill.holder = holder.get("incarnation", "")
        kill.phase, kill.result = state, "did not come back"
        end_ms = clock.now_ms() + FIND_DEADLINE_S * 1000
        while not await self._struck(kill):
            if clock.now_ms() > end_ms:
                return None
            await asyncio.sleep(FIND_S)  # its supervisor may be about to start it
        self.records.kills.append(kill)
        failed = f"{engine} did not come back after the death of {what} as {model} was {state}"
        back = partial(self._not_back, kill, supervisor)
        await wait_for(back, BACK_DEADLINE_S, "drill.not_back", failed)
        kill.back_ms = clock.now_ms()
        # The pool forgets the death: three of them in ten minutes are a fault of the model.
        with contextlib.suppress(UnderstudyError):
            await ask(pool_socket(str(self.directory)), CATALOGUE, OrderMsg(model, Order.RESET))
        await self._answers()
        return kill

    async def _struck(self, kill: Kill) -> bool:
        """Whether the engine had the process, which is dead now."""
        try:
            await kill_engine(self.directory, kill, self._observer)
        except (RemoteError, UnreachableError, KeyError):
            return False
        return True

    async def _not_back(self, kill: Kill, supervisor: int) -> str | None:
        """Why the engine has not come back: another incarnation stands by, sleeps or serves, or the
        engine is to be cold. Notes the kill's result once it has."""
        pid, about = await self._engine(str(kill.engine))
        if not pid or (process_of(kill.target) == SUPERVISOR and pid == supervisor):
            return "its supervisor did not restart"
        models = (await self._pool()).get("models") or ()
        model: Mapping[str, Any] = next((it for it in models if it["model"] == kill.model), {})
        engines = model.get("engines") or ()
        said: Mapping[str, Any] = next((e for e in engines if e["engine"] == kill.engine), {})
        if said.get("state") is None:
            return "it has not connected to the pool"
        is_up = about.get("incarnation") != kill.incarnation and about.get("state") in WORKING
        if not is_up and said.get("goal") != "cold":
            return "its next incarnation does not work yet"
        kill.result = "relaunched" if is_up else "cold, as the pool wants it"
        holder = (model.get("holder") or {}).get("engine")
        if holder not in (None, kill.engine) and not kill.target.startswith(SHADOW):
            kill.result = f"{holder} took over"
        return None

    # ------------------------------------------------------------------ waits

    async def _whole(self) -> Whole:
        return await wait_whole(self.directory, self.say)

    async def _all_up(self) -> None:
        """Wait until every container has passed its startup probe, and its watches are connected.

        Raises:
            WaitTimeoutError: `drill.not_up`, with what is missing.
        """

        async def look() -> str | None:
            return ", ".join([*self.runner.not_up(), *self._unwatched()]) or None

        await wait_for(look, UP_DEADLINE_S, "drill.not_up", "the pod was not up again")

    async def _answers(self) -> None:
        """Wait until a recovered part was used, too: each model has answered a new request.

        Raises:
            WaitTimeoutError: `drill.no_answers`.
        """
        exchanges, began_ms = self.records.exchanges, clock.now_ms()
        began = len(exchanges)
        wanted = {str(each.body["model"]) for each in self.prompts}

        async def look() -> str | None:
            new = (each for each in exchanges[began:] if each.sent_ms > began_ms)
            missing = wanted - {each.model for each in new if each.end is End.DONE}
            return ", ".join(sorted(missing)) or None

        deadline_s = POOL_ANSWERS_DEADLINE_S if self._models else ANSWERS_DEADLINE_S
        await wait_for(look, deadline_s, "drill.no_answers", "requests did not complete")

    async def _entered(self, state: ModelState, models: tuple[str, ...]) -> str | None:
        """The model that enters the state; None: none does, or none did the last time."""
        moments, seen = self.records.moments, len(self.records.moments)
        end_ms = clock.now_ms() + STATE_DEADLINE_S * 1000
        while models and (state, models) not in self._missed:
            for each in moments[seen:]:
                if each.state == state and each.part in models:
                    return each.part
            if clock.now_ms() > end_ms:
                self._missed.add((state, models))
            await asyncio.sleep(FIND_S)
        return None

    async def _pool(self) -> Mapping[str, Any]:
        return await status_of(part_of(self.directory, "pool"))

    async def _engine(self, engine: str) -> tuple[int, dict[str, Any]]:
        """The pid of its supervisor and its status; 0 if it does not answer."""
        path = engine_socket(str(self.directory), engine)
        pid, document = await said_by(PodPart(engine, path, engine_messages.CONTROL))
        return pid, document.get("engine") or {}
