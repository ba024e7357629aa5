"""One engine: the lifecycle that judges its events, the effects performed, when it is launched
again, and whether it is healthy.

Must not decide what follows from what: that is `engine/core`.

The surprising thing: `dead` has two halves. Until the tree is reaped nothing is sent to the lock
server, whatever happens; only then is the incarnation no longer named, and the lock free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields

from engine.core import events as ev
from engine.core.events import Command, EngineEvent, Failed, State, WakingStep
from engine.core.health import Action, GenerationHealth, Patience, Signs
from engine.core.lifecycle import IllegalEvent, Lifecycle, Situation
from engine.core.relaunch import Death, Relaunch
from engine.messages import Counts, FaultReportMsg, HealthMsg, HealthyMsg
from engine.schema import EngineRelaunch
from engine.supervisor import leftovers, lock_side, state_file
from engine.supervisor.history import EngineMetrics, History
from engine.supervisor.hub import EngineHub
from engine.supervisor.incarnation import Incarnation
from engine.supervisor.lock_side import LISTENER_RETRY_MS, LockSide
from engine.supervisor.settings import EngineSettings
from lockserver.client import witness
from plumbing.errors import InvariantError
from plumbing.pod.messages import Tier
from plumbing.pod.paths import engine_state
from plumbing.service.clock import Clock
from plumbing.service.procfs import CpuPressure
from plumbing.text import duration

# How often new processes are looked for, and orphans reaped.
TICK_MS = 1_000.0


class Engine(EngineHub):
    """One engine, from its first launch until `exit` is set."""

    def __init__(self, settings: EngineSettings, clock: Clock) -> None:
        super().__init__(settings, clock)
        directory, engine, config = settings.directory, settings.engine, settings.config
        path = engine_state(directory, engine)
        saved, self._saved_problem = state_file.load(path, Tier(config["goal"]))
        self.history = History(saved, self.log, clock)
        self.metrics = EngineMetrics(engine, settings.role)
        self.metrics.page.refresh = self._show
        self.log.subscribe(self.metrics.observe)
        newest = state_file.from_text(saved.generation)
        self.lifecycle = Lifecycle(saved.number, Tier(saved.goal), newest)
        self.incarnation: Incarnation | None = None
        self.predecessor: str | None = None  # an earlier tree that holds up the first launch
        self.last_fault: FaultReportMsg | None = None
        self.machine_fault = ""  # what the last incarnation ended of, until one is prepared
        self.verdict: str | None = None  # why there will be no relaunch
        self.plan: EngineRelaunch | None = None  # what the next launch waits for
        self.exit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.listeners: list[Callable[[], object]] = []  # of `note`
        self._temporary = leftovers.directory_of(directory, engine)
        self.pressure = CpuPressure()
        self.watch: HealthWatch | None = None  # while active
        self._is_started = False
        self._noting: asyncio.Handle | None = None
        self.lock = LockSide(self)
        limits = [each.name for each in fields(Relaunch) if each.init]
        self._relaunch = Relaunch(**{name: config[name] for name in limits})

    def start(self) -> None:
        """Launch for the first time."""
        if self._saved_problem:
            text = f"starting without the saved state: {self._saved_problem}"
            self.log.record("engine.state_file", text, "warning")
        self.lock.listener.remove_leftover()  # of a predecessor that was killed
        self._tick()
        self._is_started = True
        if self.lifecycle.now.shall.goal is not Tier.COLD:
            self._launch_first()

    def _launch_first(self) -> None:
        before, settings = self.predecessor, self.settings
        if settings.is_remote:
            self.predecessor = lock_side.predecessor(settings.directory, settings.engine)
        if self.predecessor is None:
            self._launch()
            return
        if before is None:
            self.log.record("engine.relaunch", self.predecessor, "warning")
        self.after("predecessor", lock_side.POLL_MS, self._launch_first)

    def close(self) -> None:
        """End timers; a tree that still lives (only after a bug of ours) is killed."""
        if self._noting is not None:
            self._noting.cancel()
            self._noted()
        if self.incarnation is not None:
            self.incarnation.tree.kill()
        super().close()
        self.lock.listener.remove()
        self.pressure.close()

    def _tick(self) -> None:
        if self.incarnation is not None:
            self.incarnation.tick(is_asked=self.lifecycle.state in (State.ACTIVE, State.DEAD))
        self.pressure.sample(self.clock.now_ms())
        self.after("tick", TICK_MS, self._tick)

    def note(self) -> None:
        """Something has changed: tell `listeners`, in their order, in the next turn of the event
        loop. Changes of one turn cause one call of each, after their effects: writing a status
        takes longer than they do."""
        if self._noting is None:
            self._noting = asyncio.get_running_loop().call_soon(self._noted)

    def _noted(self) -> None:
        self._noting = None
        for listener in self.listeners:
            listener()

    # ------------------------------------------------------------------ effects

    def handle(self, event: EngineEvent) -> None:
        before = self.lifecycle.now
        try:
            effects = self.lifecycle.handle(event)
        except IllegalEvent as error:
            if not isinstance(event, ev.FROM_BACKEND):
                raise InvariantError(str(error)) from error
            effects = self.lifecycle.handle(Failed("backend_fault", f"out of order: {error}"))
        for effect in effects:
            self._perform(effect)
        if _shown(self.lifecycle.now) != _shown(before):
            self.note()

    def _perform(self, effect: ev.EngineEffect) -> None:
        now = self.lifecycle.now
        match effect:
            case ev.Transition():
                self._moved(effect)
            case Command.START_TREE:
                self._start_tree()
            case Command.TELL_LOCK_SERVER:
                self.lock.tell(now, self.incarnation)
            case Command.AWAIT_SUCCESSOR:
                self.lock.await_successor()
            case Command.ASK if now.step is WakingStep.WAKE:
                self._wake()
            case Command.ASK:
                self._running.serve()
            case Command.DRAIN_BACKEND:
                self.lock.listener.remove()
                keep_kv = now.hand_over is not None
                self._running.drain(resume=now.resumes, rest=now.rests_next, keep_kv=keep_kv)
            case Command.PLACE_WEIGHTS:
                self._running.place(is_away=now.asks_away)
            case Command.KILL_TREE:
                self.lock.listener.remove()
                self._running.tree.kill()
            case Command.KEEP_GOAL:
                self.history.asked_to_be(now.shall)
            case Command.RELAUNCH if self._is_started:
                self._launch_when_due()
            case Command.STAY_COLD:
                self._cancel_launch()
            case Command.EXIT:
                self._cancel_launch()
                self.cancel("predecessor")
                if not self.exit.done():
                    self.exit.set_result(None)

    @property
    def _running(self) -> Incarnation:
        if self.incarnation is None:
            raise InvariantError("there is no incarnation")
        return self.incarnation

    def _moved(self, record: ev.Transition) -> None:
        """The one record of a transition, its budget, and the health checks of `active`."""
        budget_ms = self.settings.budgets_ms.get(record.target)
        is_other_known = self.lock.other is not None
        now = self.lifecycle.now
        if record.target is State.ACTIVE:
            self.history.canary_passed(self._running.canary_ms)
        self.history.moved(record, now, budget_ms, is_other_known=is_other_known)
        self.cancel("budget")
        if budget_ms is not None:
            self.after("budget", budget_ms, self._budget_spent)
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        if record.target is State.ACTIVE:
            self.watch = HealthWatch(self, self._running)
        if record.target is State.STANDBY:
            self.machine_fault = ""
        self.note()

    def _budget_spent(self) -> None:
        self.post(ev.BudgetSpent(self.history.budget_spent(self.lifecycle.state)))

    # ------------------------------------------------------------------ launching and reaping

    def _launch(self) -> None:
        self.post(ev.Launch(witness.new_incarnation(self.settings.engine)))

    def _launch_when_due(self) -> None:
        """Launch now or later."""
        due_ms, reason = self._relaunch.due()
        rest_ms = due_ms - self.clock.now_ms()
        if rest_ms <= 0:
            self.plan = None
            self._launch()
            return
        if self.plan is None or self.plan.reason != reason:
            self.plan = EngineRelaunch(round(rest_ms), reason)
            text = f"relaunch in at most {duration(rest_ms)}: {reason}"
            data = {"in_ms": self.plan.in_ms, "reason": reason}
            self.log.record("engine.relaunch", text, data=data)
        self.after("relaunch", rest_ms, self._launch_when_due)

    def _cancel_launch(self) -> None:
        self.cancel("relaunch")
        self.plan = None

    def _start_tree(self) -> None:
        now = self.lifecycle.now
        assert now.incarnation is not None
        self.history.launched(now.number)
        self.last_fault = None
        self.incarnation = Incarnation(
            self,
            now.incarnation,
            temporary=self._temporary,
            failures=self._relaunch.failures,
            on_gone=self._gone,
        )
        self.incarnation.start()

    def _gone(self) -> None:
        """The last process is reaped."""
        gone, now, history = self._running, self.lifecycle.now, self.history
        self.incarnation, self.last_fault, self.machine_fault = None, gone.fault, gone.machine_fault
        self.cancel("budget")
        if not now.is_leaving:
            is_outside = gone.rehearsed_ms is not None or history.cause in ev.FROM_OUTSIDE
            death = Death(
                self.clock.now_ms(),
                now.reason,
                now.reached_standby,
                is_planned=now.is_meant or is_outside,
                is_machine=bool(gone.machine_fault),
                held_lock=now.token > 0,
            )
            self._relaunch.died(death)
            self.verdict = self._relaunch.verdict()
        history.reaped(now, gone.rehearsed_ms)
        self.post(ev.Reaped(self.verdict))
        if self.incarnation is None:  # else its launch has done it
            leftovers.remove(self._temporary)
        self.note()

    # ------------------------------------------------------------------ the lock, waking, health

    def _wake(self) -> None:
        """Ask for the wake once there are both a grant and the listening socket."""
        now, waking = self.lifecycle.now, self.incarnation
        if now.step is not WakingStep.WAKE or waking is None or waking.is_wake_asked:
            return
        listening, path = self.lock.listener.listen(), self.lock.listener.path
        if listening is None:
            self.after("listener", LISTENER_RETRY_MS, self._wake)
            return
        era = self.lock.era_of(now.token)
        waking.wake(now.token, era, listening, path)
        self.metrics.woken(is_behind_gateway=path is not None)

    def _show(self) -> None:
        now = self.lifecycle.state
        self.metrics.look(now, self.history, self.counts().kept, self.lock.lease)

    def counts(self) -> Counts:
        """Of the running incarnation."""
        return self.incarnation.tree.counts() if self.incarnation is not None else Counts()

    def signs(self) -> Signs:
        """What can be seen of the running incarnation without asking it."""
        pressure = self.pressure.sample(self.clock.now_ms())
        return Signs(self.counts().progress, pressure, self.lock.has_standby)

    def answered(self, healthy: HealthyMsg) -> None:
        self.history.answered(healthy.in_flight)
        self.metrics.counted(self.counts())


def _shown(now: Situation) -> tuple[object, ...]:
    """What others see of a situation, beside the transitions."""
    return now.shall, now.is_away, now.is_leaving


def patience_of(settings: EngineSettings) -> Patience:
    return Patience(settings.config["hang_ms"], settings.config["hang_alone_ms"])


class HealthWatch:
    """One active period of one incarnation, until `close`: performs `core/health`.

    It asks the backend, and reads what needs no answer: the counter of the shared page, the CPU
    pressure, and whether another engine stands by (`Engine.signs`).
    """

    def __init__(self, engine: Engine, incarnation: Incarnation) -> None:
        config, self._clock = engine.settings.config, engine.clock
        self._health = GenerationHealth(
            self._clock.now_ms(),
            patience=patience_of(engine.settings),
            answer_ms=config["answer_ms"],
            idle_canary_ms=config["idle_canary_ms"],
        )
        self._engine, self._running = engine, incarnation
        self._is_over = False
        self._tick()

    def close(self) -> None:
        """Ignore answers that still arrive."""
        self._is_over = True
        self._engine.cancel("health")

    @property
    def late_ms(self) -> float:
        """How late the backend's answer is; 0 while it is on time."""
        return self._health.late_ms(self._clock.now_ms())

    def _tick(self) -> None:
        actions = self._health.tick(self._clock.now_ms(), self._engine.signs())
        if isinstance(actions, str):
            self._go_on(actions)
            return
        for action in actions:
            if action is Action.ASK:
                self._running.channel.ask(HealthMsg(), HealthyMsg, self._answered)
            else:
                self._running.canary(self._canary_done)
        self._engine.after("health", self._health.next_ms() - self._clock.now_ms(), self._tick)

    def _answered(self, healthy: HealthyMsg) -> None:
        if not self._is_over:
            self._engine.answered(healthy)
            now_ms, signs = self._clock.now_ms(), self._engine.signs()
            self._go_on(self._health.answered(now_ms, healthy.in_flight, signs))

    def _canary_done(self, ok: bool, detail: str) -> None:
        if not self._is_over:
            self._go_on(self._health.canary_done(self._clock.now_ms(), ok=ok, detail=detail))

    def _go_on(self, verdict: str | None) -> None:
        if verdict is None:
            self._tick()
        else:
            self.close()
            self._engine.post(Failed("unhealthy", verdict))
