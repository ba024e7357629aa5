"""The drill of a pool: the drill of a pod with more victims, several models, and their states.

Every part is to die in every state of a model, so a kill waits until a model enters a state.
Clients send requests in bursts, those of the first model in longer ones, so that all models also
become idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine import messages as engine_messages
from plumbing.errors import (
    RemoteError,
    UnderstudyError,
    UnreachableError,
    UsageError,
    WaitTimeoutError,
)
from plumbing.pod.models import ACTIVE, lock_of
from plumbing.pod.observers import ask
from plumbing.pod.paths import engine_socket, pool_socket
from plumbing.text import duration
from pool.core.events import Order
from pool.core.states import ModelState
from pool.messages import CATALOGUE, OrderMsg
from pool.settings import PoolFile, engines_of
from understudy.drill.clients import Target, inside_target, pause, stream_without_pause
from understudy.drill.killer import (
    HeldPart,
    find_part,
    kill_engine,
    kill_part,
    service_of,
    wait_back,
    wait_for,
)
from understudy.drill.observer import Observer
from understudy.drill.prompts import learn_answers, pool_prompts
from understudy.drill.records import (
    ALL_PARTS,
    GATEWAY,
    GATEWAY_CHILD,
    GMS,
    GMS_COPY,
    GMS_KEEPER,
    GMS_KV,
    GMS_SUPERVISOR,
    LOCKSERVER,
    OF_MODEL,
    POOL,
    SHADOW,
    STOP,
    SUPERVISOR,
    End,
    Kill,
    Prompt,
    StatedBound,
    base_targets,
    process_of,
)
from understudy.drill.run import Drill, DrillPlan, clock
from understudy.pod.runner import PodRunner
from understudy.status.gather import gateway_part, lockserver_part, pool_part, status_of

# When to kill: as a model enters one of these states.
STATES = (
    ModelState.DRAINING,
    ModelState.WAKING,
    ModelState.AWAKE,
    ModelState.RELEASING,
    ModelState.PENDING,
    ModelState.LOADING,
    ModelState.WARM,
    ModelState.UNLOADING,
    ModelState.OFFLOADED,
    ModelState.COLD,
)
WORKING = ("standby", "resting", "active")  # of an engine that has come back from its death
NO_SUCH_PROCESS = "engine.unknown_target"

START_DEADLINE_S = 120.0  # until gateway, pool and engines have found one another
LEARNED_AT_ONCE = 5
SILENCE_S = 330.0  # longer than a ticket waits in the gateway by default, which ends in an answer
SWITCHES_DEADLINE_S = 120.0  # for all of them, beside what the kills took: turns take seconds
CLIENTS_MIN = 2  # of each model: one that streams for longer than a turn, one that sends anew
BURST, FIRST_BURST = 4, 12  # requests of a client, after which its model is left alone
PAUSE_S = 2.5
MISSED_MAX = 300  # kills for which there was no moment: more than all pairs of target and state
STATE_DEADLINE_S = 20.0  # several turns of all models; else no model enters this state
BACK_DEADLINE_S = 120.0
ANSWERS_DEADLINE_S = 300.0  # as long as a request may wait
FIND_S = 0.005  # between two looks for a process that is just being started
FIND_DEADLINE_S = 1.5  # after that, the engine has no such process
STATED_EVERY_S = 1.0  # how often the bounds are read: they change with costs and requests


# ------------------------------------------------------------------ which kill comes next


def default_targets(backend: str | None, *, has_shadow: bool, has_copies: bool) -> tuple[str, ...]:
    """Every part and every process, so that those of one kind are not neighbours."""
    names = base_targets(backend)
    front, model = names[0], names[1]
    shadows = (f"{SHADOW}{model}", f"{SHADOW}{SUPERVISOR}") if has_shadow else ("", "")
    # Without a shadow no engine takes over for half a minute, which is how long a hang may last.
    hangs = (f"{STOP}{model}", f"{STOP}{SUPERVISOR}") if has_shadow else ("", "")
    copies = (GMS_COPY, GMS_KEEPER) if has_copies else ("", "")
    found = (
        *(POOL, model, GATEWAY_CHILD, SUPERVISOR, LOCKSERVER, shadows[0], GMS, front, GMS_KV),
        *(hangs[0], GATEWAY, copies[0], shadows[1], GMS_SUPERVISOR, hangs[1], copies[1]),
    )
    return tuple(each for each in found if each)


def kill_order(
    targets: Sequence[str], states: Sequence[ModelState] = STATES
) -> Iterator[tuple[str, ModelState]]:
    """Pairs of a target and a state, without end; no pair comes twice before all have come. The
    first round pairs each target with another state, and each further round shifts the pairs by
    one. A model that is cold has nothing but supervisors."""
    for shift in itertools.count():
        for number, target in enumerate(targets):
            state = states[(number + shift) % len(states)]
            is_backend = target not in ALL_PARTS and process_of(target) != SUPERVISOR
            if not (is_backend and state is ModelState.COLD):
                yield target, state


# ------------------------------------------------------------------ the pool's documents


def model_in(document: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    """A model in the pool's document."""
    models = document.get("models") or ()
    return next((each for each in models if each["model"] == model), {})


def holder_of(model: Mapping[str, Any]) -> tuple[str | None, int]:
    """The engine that holds a model's lock and its token, from the pool's document."""
    holder = model.get("holder")
    return (holder["engine"], int(holder["token"])) if holder else (None, 0)


# ------------------------------------------------------------------ the drill


class PoolDrill(Drill):
    """A drill of the pool in `directory`, whose file is `file` and whose pod `runner` runs."""

    def __init__(
        self,
        directory: Path,
        file: PoolFile,
        plan: DrillPlan,
        say: Callable[[str], None],
        runner: PodRunner,
    ) -> None:
        super().__init__(directory, plan, say, runner)
        models = {name: engines_of(name, each) for name, each in file.models.items()}
        self.records.models = models
        self.backend = next(iter(file.models.values())).backend
        self._by_model: dict[str, list[Prompt]] = {}
        self._missed: set[tuple[ModelState, tuple[str, ...]]] = set()  # waited for in vain
        has_shadow = any(len(each) > 1 for each in models.values())
        self._targets = self._targets or default_targets(
            self.backend, has_shadow=has_shadow, has_copies=bool(file.host_memory)
        )
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
        deadline_s = START_DEADLINE_S * self._plan.stretch
        await wait_for(self._undecided, deadline_s, "drill.not_up", "the pool was not ready")
        lock = await status_of(lockserver_part(self.directory))
        target = inside_target(service_of({"lockserver": lock}))
        for model in self.records.models:
            began_ms = clock.now_ms()
            bank = pool_prompts(self.backend, model)
            # The reference backend computes each request alike, whatever runs beside it.
            at_once = 1 if self.backend == "vllm" else LEARNED_AT_ONCE
            parts = [bank[number::at_once] for number in range(at_once)]
            learned = await asyncio.gather(*(learn_answers(target, p, len(p)) for p in parts))
            for _, answers in learned:
                self.records.expected |= answers
            used = [each for each in bank if each.key in self.records.expected]
            self._by_model[model] = used
            self._say(f"{model}: {len(used)} answers learned in {_since(began_ms)}")
        return target

    async def _undecided(self) -> str | None:
        """What gateway, pool and engines still lack."""
        pool = await status_of(pool_part(self.directory))
        gateway = await status_of(gateway_part(self.directory))
        if "error" in pool:
            return str(pool["error"])
        if not gateway.get("accepting"):
            return str(gateway.get("error") or "the gateway does not accept requests")
        if pool.get("recovering"):
            return "it is recovering"
        return next(iter(pool.get("problems") or ()), None)

    def _clients(
        self, target: Target, stopping: asyncio.Event
    ) -> Iterable[Coroutine[Any, Any, None]]:
        count = max(CLIENTS_MIN, -(-self._plan.clients // len(self.records.models)))
        for number, prompts in enumerate(self._by_model.values()):
            together = asyncio.Barrier(count)
            burst = BURST if number else FIRST_BURST
            rest = partial(_rest, burst, together, stopping)
            for start in (each * len(prompts) // count for each in range(count)):
                yield stream_without_pause(
                    target, prompts, start, self.records.exchanges.append, stopping, rest, SILENCE_S
                )
            yield _release(together, stopping)
        yield self._note_bounds(stopping)

    async def _note_bounds(self, stopping: asyncio.Event) -> None:
        """Note the bounds that the pool states, while it answers."""
        while not stopping.is_set():
            document = await status_of(pool_part(self.directory))
            now_ms = clock.now_ms()
            self.records.bounds += [
                StatedBound(now_ms, each["model"], each.get("bound_ms"))
                for each in document.get("models") or ()
            ]
            await pause(stopping, STATED_EVERY_S)

    async def _make_kills(self, target: Target, observer: Observer) -> None:
        """
        Raises:
            WaitTimeoutError: something did not come back, or no model enters any state.
        """
        for what, state in kill_order(self._targets):
            made = len(self.records.kills)
            if made >= self._plan.kills:
                break
            await self._until_due(made)
            await self._all_up(observer)
            if not await self._kill_in_state(what, state, observer):
                self.records.not_reached.append(f"{what} at {state}")
            if len(self.records.not_reached) > MISSED_MAX:
                raise WaitTimeoutError(
                    "drill.no_phase", f"{MISSED_MAX} times no model entered the state for a kill"
                )
        await self._until_switched()

    async def _until_switched(self) -> None:
        """Wait for as many switches as are wanted.

        Raises:
            WaitTimeoutError: `drill.no_switch`.
        """
        wanted = self._plan.switches
        for count in range(len(self.records.switches) + 1, wanted + 1):

            async def look(count: int = count) -> str | None:
                is_seen = len(self.records.switches) >= count
                return None if is_seen else f"{count - 1} of {wanted} switches were seen"

            deadline_s = SWITCHES_DEADLINE_S * self._plan.stretch
            await wait_for(look, deadline_s, "drill.no_switch", "no model was switched to")

    # ------------------------------------------------------------------ one kill

    async def _entered(
        self, observer: Observer, state: ModelState, models: Sequence[str]
    ) -> str | None:
        """The model that enters the state; None: none does, or none did the last time."""
        wanted = state, tuple(models)
        if not models or wanted in self._missed:
            return None
        deadline_s = STATE_DEADLINE_S * self._plan.stretch
        found = await observer.entered(state, models, deadline_s)
        if found is None:
            self._missed.add(wanted)
        return found

    async def _kill_in_state(self, what: str, state: ModelState, observer: Observer) -> bool:
        """Kill `what` as a model enters `state`, and wait until all works again. False: no model
        entered the state, or there was no such process any more."""
        if what in ALL_PARTS:
            kill = await self._kill_pools_part(what, state, observer)
        else:
            kill = await self._kill_models_engine(what, state, observer)
        if kill is None:
            return False
        await self._answers()
        self._say(
            f"kill {len(self.records.kills)}/{self._plan.kills}  {what}"
            f"{f' of {kill.engine}' if kill.engine else ''} as {kill.model} was {state}:"
            f" {kill.result}, back after {duration(kill.took_ms or 0.0)};"
            f" {len(self.records.switches)} switches"
        )
        return True

    async def _kill_pools_part(
        self, what: str, state: ModelState, observer: Observer
    ) -> Kill | None:
        models = list(self.records.models)
        whose = models if what in OF_MODEL else models[:1]
        with ExitStack() as stack:
            held: dict[str, HeldPart] = {}
            for name in whose:
                found = await find_part(self.directory, what, stack, model=name, models=models)
                if found is not None:
                    held[name] = found
            model = await self._entered(observer, state, list(held) if what in OF_MODEL else models)
            if model is None or not held:
                return None
            victim = held.get(model) or held[models[0]]
            kill = Kill(what, model=model, phase=state, result="did not come back")
            self.records.kills.append(kill)
            await kill_part(victim, kill)
        await wait_back(self.directory, victim, kill, stretch=self._plan.stretch)
        kill.result = "restarted"
        return kill

    async def _kill_models_engine(
        self, what: str, state: ModelState, observer: Observer
    ) -> Kill | None:
        models = self.records.models
        # Without a shadow a hang would last for half a minute: no engine could take over.
        needs_shadow = what.startswith((SHADOW, STOP))
        wanted = [name for name, each in models.items() if len(each) > 1 or not needs_shadow]
        document = await status_of(pool_part(self.directory))
        model = await self._entered(observer, state, wanted)
        if model is None:
            return None
        holder, token = holder_of(model_in(document, model))
        first = holder if holder in models[model] else models[model][0]
        is_shadow = what.startswith(SHADOW)
        engine = next(each for each in models[model] if (each == first) is not is_shadow)
        planned = Kill(what, engine, token, lock=lock_of(ACTIVE, model), peers=models[model])
        planned.model, planned.phase, planned.result = model, state, "did not come back"
        supervisor, _ = await self._engine(engine)
        end_ms = clock.now_ms() + FIND_DEADLINE_S * 1000
        while not await self._struck(kill := replace(planned), observer):
            if clock.now_ms() > end_ms:
                return None
            await asyncio.sleep(FIND_S)  # its supervisor may be about to start it
        self.records.kills.append(kill)
        deadline_s = BACK_DEADLINE_S * self._plan.stretch
        what_failed = f"{engine} did not come back after the death of {what} as {model} was {state}"

        async def look() -> str | None:
            return await self._not_back(kill, supervisor)

        await wait_for(look, deadline_s, "drill.not_back", what_failed)
        kill.back_ms = clock.now_ms()
        # The pool forgets the death: three of them in ten minutes are a fault of the model.
        with contextlib.suppress(UnderstudyError):
            await ask(pool_socket(str(self.directory)), CATALOGUE, OrderMsg(model, Order.RESET))
        return kill

    async def _struck(self, kill: Kill, observer: Observer) -> bool:
        """Whether the engine had the process, which is dead now."""
        try:
            await kill_engine(self.directory, kill, observer)
        except (UnreachableError, KeyError):
            return False
        except RemoteError as error:
            if error.code == NO_SUCH_PROCESS:
                return False
            raise
        return True

    async def _engine(self, engine: str) -> tuple[int, dict[str, Any]]:
        """The pid of its supervisor and its status; 0 if it does not answer."""
        path = engine_socket(str(self.directory), engine)
        with contextlib.suppress(UnderstudyError):
            found = await ask(path, engine_messages.CONTROL, engine_messages.StatusMsg())
            return found.pid, (getattr(found.message, "document", {}).get("engine") or {})
        return 0, {}

    async def _not_back(self, kill: Kill, supervisor: int) -> str | None:
        """Why the engine has not come back: another incarnation stands by, sleeps or serves, or the
        engine is to be cold. Notes the kill's result once it has."""
        pid, about = await self._engine(str(kill.engine))
        if not pid or (process_of(kill.target) == SUPERVISOR and pid == supervisor):
            return "its supervisor did not restart"
        model = model_in(await status_of(pool_part(self.directory)), kill.model)
        engines = model.get("engines") or ()
        said: Mapping[str, Any] = next((e for e in engines if e["engine"] == kill.engine), {})
        if not said.get("connected"):
            return "it has not connected to the pool"
        is_up = about.get("incarnation") != kill.incarnation and about.get("state") in WORKING
        if not is_up and said.get("goal") != "cold":
            return "its next incarnation does not work yet"
        kill.result = "relaunched" if is_up else "cold, as the pool wants it"
        holder, _ = holder_of(model)
        if holder not in (None, kill.engine) and not kill.target.startswith(SHADOW):
            kill.result = f"{holder} took over"
        return None

    async def _answers(self) -> None:
        """Wait until each model has answered since now.

        Raises:
            WaitTimeoutError: `drill.no_answers`.
        """
        exchanges, missing = self.records.exchanges, {*self.records.models}
        began = len(exchanges)

        async def look() -> str | None:
            answered = {each.model for each in exchanges[began:] if each.end is End.DONE}
            return ", ".join(sorted(missing - answered)) or None

        deadline_s = ANSWERS_DEADLINE_S * self._plan.stretch
        await wait_for(look, deadline_s, "drill.no_answers", "a model did not answer")


async def _rest(burst: int, together: asyncio.Barrier, stopping: asyncio.Event, sent: int) -> None:
    """All clients of a model pause together after each burst."""
    if sent % burst == 0 and not stopping.is_set():
        with contextlib.suppress(asyncio.BrokenBarrierError):
            await together.wait()
        await pause(stopping, PAUSE_S)


async def _release(together: asyncio.Barrier, stopping: asyncio.Event) -> None:
    """Release the clients that wait for one another when the drill ends."""
    await stopping.wait()
    await together.abort()


def _since(began_ms: float) -> str:
    return duration(clock.now_ms() - began_ms)
