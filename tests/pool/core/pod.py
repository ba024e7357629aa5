"""Neighbours of the pool's machine that obey at once: engines, lock, memory service, one gateway.

Each step is the caller's: what was told is kept, and `settle` lets everybody do it.
"""

from __future__ import annotations

from msgspec.structs import replace

from plumbing.pod.messages import EngineReportMsg, Tier
from pool.core import events as ev
from pool.core.facts import ModelSetup, PoolSetup
from pool.core.reconcile import ModelPool
from pool.core.states import EngineSizes, EntryKind, GoalGeneration, ModelRules, ModelState

GPU = "HOST-0"
MIB = 1 << 20
ERA = "e0"
SIZES = EngineSizes(base={GPU: 10 * MIB}, weights={GPU: 100 * MIB}, kv={GPU: 500 * MIB})


def rules(**changed: object) -> ModelRules:
    return replace(ModelRules(devices=(GPU,)), **changed)  # type: ignore[arg-type]


class Supervisor:
    """One engine, which is at once where its goal and the lock let it be."""

    def __init__(self, name: str, model: str) -> None:
        self.name, self.model = name, model
        self.goal, self.seen = Tier.COLD, None
        self.count = 0
        self.state, self.incarnation, self.token = "dead", "", 0
        self.in_flight = 0
        self.is_deaf = False  # it does not hear
        self.seen: GoalGeneration | None

    def said(self, **changed: object) -> ev.EngineSaid:
        tier = {"dead": Tier.COLD, "active": Tier.AWAKE}.get(self.state, Tier.WARM)
        word = EngineReportMsg(
            engine=self.name,
            model=self.model,
            incarnation=self.incarnation,
            token=self.token,
            state=self.state,
            tier=tier,
            generation=self.seen,
            base_bytes=SIZES.base if self.incarnation else {},
            weights_bytes=SIZES.weights if self.incarnation else {},
            kv_bytes=SIZES.kv if self.incarnation else {},
            in_flight=self.in_flight,
            can_resume=True,
            can_rest=True,
            goal=self.goal,
            goal_by="pool",
            since_ms=0,
        )
        return ev.EngineSaid(replace(word, **changed))  # type: ignore[arg-type]


class Pod:
    """A pool and all that it talks to. `told` has every effect of the last event."""

    def __init__(
        self,
        models: dict[str, ModelRules] | None = None,
        *,
        engines: int = 1,
        total_bytes: int = 1000 * MIB,
    ) -> None:
        models = models or {"a": rules(), "b": rules()}
        self.setup = PoolSetup(
            models={
                name: ModelSetup(each, tuple(f"{name}{i}" for i in range(engines)), SIZES)
                for name, each in models.items()
            },
            devices=(GPU,),
        )
        self.total_bytes = total_bytes
        self.now_ms = 1000.0
        self.supervisors = {
            name: Supervisor(name, model)
            for model, each in self.setup.models.items()
            for name in each.engines
        }
        self.holders: dict[str, Supervisor | None] = dict.fromkeys(models)
        self.tokens = 0
        self.weights: set[str] = set()
        self.kv: set[str] = set()
        self.asked: dict[str, int] = {}
        self.tickets: dict[str, list[ev.Ticket]] = {name: [] for name in models}
        self.in_flight = dict.fromkeys(models, 0)
        self.doors: dict[str, ev.SetModelDoor] = {}
        self.obeyed = dict.fromkeys(models, 0)
        self.questions: list[ev.PoolEffect] = []
        self.all: list[ev.PoolEffect] = []
        self.pool = ModelPool(self.setup, self.now_ms, ERA)

    # ------------------------------------------------------------------ what is said

    def handle(self, event: ev.PoolEvent) -> list[ev.PoolEffect]:
        told = self.pool.handle(event, self.now_ms)
        self.all += told
        for effect in told:
            self._perform(effect)
        return told

    def start(self) -> Pod:
        self.say_memory()
        for engine in self.supervisors.values():
            self.handle(engine.said())
        self.say_demand()
        return self

    def say_memory(self) -> None:
        held = {(EntryKind.WEIGHTS, model): SIZES.weights[GPU] for model in self.weights}
        held |= {(EntryKind.KV, model): SIZES.kv[GPU] for model in self.kv}
        self.handle(ev.MemoryIs(GPU, self.total_bytes, held, dict(self.asked)))

    def say_demand(self) -> list[ev.PoolEffect]:
        models = {
            name: ev.ModelDemand(
                tickets=tuple(self.tickets[name]),
                in_flight=self.in_flight[name],
                door=self.obeyed[name],
            )
            for name in self.tickets
        }
        return self.handle(ev.DemandCame("gateway", models))

    def ask(self, model: str, **changed: object) -> None:
        """A request arrives and waits."""
        ticket = ev.Ticket(len(self.tickets[model]) + 1, self.now_ms)
        self.tickets[model].append(replace(ticket, **changed))  # type: ignore[arg-type]
        self.say_demand()

    def tick(self, ms: float) -> list[ev.PoolEffect]:
        self.now_ms += ms
        return self.handle(ev.PoolTick())

    # ------------------------------------------------------------------ what they do

    def _perform(self, effect: ev.PoolEffect) -> None:
        match effect:
            case ev.TellEngine():
                engine = self.supervisors[effect.engine]
                is_stale = engine.seen is not None and effect.generation.is_older(engine.seen)
                if not engine.is_deaf and not is_stale:
                    engine.goal, engine.seen = effect.goal, effect.generation
            case ev.SetModelDoor():
                self.doors[effect.model] = effect
            case ev.AskMemory() | ev.AskWitness():
                self.questions.append(effect)

    def obey_doors(self) -> None:
        """The gateway obeys all doors; an open one sends what waits, which is answered at once."""
        for name, order in self.doors.items():
            self.obeyed[name] = order.number
            if isinstance(order.door, (ev.OpenDoor, ev.RefusedDoor)):
                self.tickets[name] = []
        self.say_demand()

    def obey_goals(self) -> None:
        for engine in self.supervisors.values():
            if not engine.is_deaf:
                self.obey_goal(engine)

    def obey_goal(self, engine: Supervisor) -> None:
        if engine.goal is Tier.COLD and engine.state != "dead":
            self.kill(engine)
        elif engine.goal is not Tier.COLD and engine.state == "dead":
            engine.count += 1
            engine.state, engine.incarnation = "standby", f"{engine.name}.{engine.count}"
            self.weights.add(engine.model)
        self.grant(engine.model)
        if engine.token:
            is_awake = engine.goal is Tier.AWAKE
            engine.state = "active" if is_awake else "resting"
            if is_awake:
                self.kv.add(engine.model)
        self.handle(engine.said())

    def grant(self, model: str) -> None:
        waiting = [each for each in self.supervisors.values() if each.model == model]
        for engine in waiting:
            if self.holders[model] is None and engine.state == "standby":
                self.tokens += 1
                engine.token = self.tokens
                self.holders[model] = engine
                self.handle(engine.said())

    def kill(self, engine: Supervisor) -> None:
        """Its tree is dead, by whomever."""
        gone = engine.incarnation
        engine.state, engine.incarnation, engine.token = "dead", "", 0
        if self.holders[engine.model] is engine:
            self.holders[engine.model] = None
        self.handle(ev.EngineDead(engine.name, gone))

    def answer_questions(self) -> None:
        """The memory service and the kernel. What nobody maps is freed, if that was allowed."""
        for effect in [each for each in self.questions if isinstance(each, ev.AskMemory)]:
            mine = [each for each in self.supervisors.values() if each.model == effect.model]
            if not any(each.state == "active" for each in mine):
                self.kv.discard(effect.model)
            if all(each.state == "dead" for each in mine):
                self.weights.discard(effect.model)
            self.asked[effect.model] = effect.number
            self.questions.remove(effect)
            self.say_memory()
        for effect in [each for each in self.questions if isinstance(each, ev.AskWitness)]:
            if self.supervisors[effect.engine].state == "dead":
                self.questions.remove(effect)
                self.handle(ev.EngineDead(effect.engine, "", effect.number))

    def settle(self, rounds: int = 12) -> None:
        """Everybody does what was told, until nothing is told any more."""
        for _ in range(rounds):
            before = len(self.all)
            self.obey_goals()
            self.obey_doors()
            self.answer_questions()
            self.handle(ev.PoolTick())
            if not any(not isinstance(each, ev.PoolRecord) for each in self.all[before:]):
                return

    def state(self, model: str) -> ModelState:
        return self.pool.facts.models[model].state
