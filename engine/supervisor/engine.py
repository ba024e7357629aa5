"""One engine: an inbox of events, the lifecycle that judges them, and its effects performed.

Must not decide what follows from what: that is `engine/core`. Every callback (a pidfd, the channel,
the lock, a signal, a timer) only posts an event; events are handled one after the other, and
effects that cause further events post them too.

The surprising thing: `dead` has two halves. Until the tree is reaped nothing is sent to the lock
server, whatever happens; only then is the incarnation no longer named, and the lock free.

`Changes` reports the engine's state once for all that changes together, and after its effects,
because writing a status takes longer than they do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from engine.core import events as ev
from engine.core.events import EngineEvent, Failed, State, WakingStep
from engine.core.health import Signs
from engine.core.lifecycle import PARKED, IllegalEvent, Lifecycle
from engine.core.relaunch import Death
from engine.messages import FaultReportMsg, HealthyMsg
from engine.supervisor import lock_side, state_file
from engine.supervisor.cpu_share import CpuShare
from engine.supervisor.history import EngineMetrics, History
from engine.supervisor.incarnation import Incarnation
from engine.supervisor.kv_layout import layout_of
from engine.supervisor.leftovers import Leftovers, path_of
from engine.supervisor.lock_side import LISTENER_RETRY_MS, LockSide
from engine.supervisor.settings import EngineSettings
from engine.supervisor.state_file import serving_engine
from engine.supervisor.timers import HealthWatch, Relauncher, Timers
from lockserver.client import witness
from plumbing.errors import InvariantError
from plumbing.pod.messages import Tier
from plumbing.pod.paths import engine_state
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.service.procfs import CpuPressure

# How often new processes are looked for, and orphans reaped.
TICK_MS = 1_000.0

# Who wakes an engine for which no gateway would let requests wait.


class Engine:
    """One engine, from its first launch until `exit` is set."""

    def __init__(self, settings: EngineSettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.log = EventLog(settings.engine, clock)
        path = engine_state(settings.directory, settings.engine)
        saved, self._saved_problem = state_file.load(path, Tier(settings.config["goal"]))
        self.history = History(saved, self.log, clock)
        self.metrics = EngineMetrics(settings.engine, settings.role, saved)
        self.log.subscribe(self.metrics.observe)
        self.lifecycle = Lifecycle(saved.number, Tier(saved.goal), saved.newest)
        self.incarnation: Incarnation | None = None
        self.predecessor: str | None = None  # an earlier tree that holds up the first launch
        self.last_fault: FaultReportMsg | None = None
        self.machine_fault = ""  # what the last incarnation ended of, until one is prepared
        self.exit: asyncio.Future[ev.Exit] = asyncio.get_running_loop().create_future()
        self.changes = Changes()
        self.on_tick: Callable[[], object] = lambda: None
        self.leftovers = Leftovers(path_of(settings.directory, settings.engine), self.log)
        self.layout = layout_of(settings)
        self.pressure = CpuPressure()
        self.watch: HealthWatch | None = None  # while active
        self._timers = Timers()
        self._inbox: deque[EngineEvent] = deque()
        self._is_handling = self._is_started = False
        self.lock = LockSide(
            settings,
            self.log,
            post=self.post,
            on_loader=self._loader_granted,
            after=self._timers.after,
        )
        if settings.is_remote:
            self.metrics.watch_lease(lambda: self.lock.client.lease)
        self.relauncher = Relauncher(
            settings, self.lock, self._timers, self.log, clock, self._launch
        )

    def start(self) -> None:
        """Launch for the first time."""
        if self._saved_problem:
            text = f"starting without the saved state: {self._saved_problem}"
            self.log.record("engine.state_file", text, "warning")
        self.leftovers.start()
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
        self._timers.after("predecessor", lock_side.POLL_MS, self._launch_first)

    def close(self) -> None:
        """End timers; a tree that still lives (only after a bug of ours) is killed."""
        self.changes.close()
        if self.incarnation is not None:
            self.incarnation.tree.kill()
        self._timers.close()
        self.lock.listener.remove()
        self.layout.close()
        self.pressure.close()

    def _tick(self) -> None:
        if self.incarnation is not None:
            self.incarnation.tick(is_parked=self.lifecycle.state in PARKED)
            is_loading = self.lifecycle.state is State.INIT
            self.incarnation.cpus.tick(is_loading=is_loading, serving=self._serving)
        self.pressure.sample(self.clock.now_ms())
        self.on_tick()
        self._timers.after("tick", TICK_MS, self._tick)

    def _serving(self) -> str | None:
        return serving_engine(self.settings.directory, self.settings.engine)

    # ------------------------------------------------------------------ inbox and effects

    def post(self, event: EngineEvent) -> None:
        """Handle `event` after those posted before it."""
        self._inbox.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._is_handling = False

    def _handle(self, event: EngineEvent) -> None:
        try:
            effects = self.lifecycle.handle(event)
        except IllegalEvent as error:
            if not isinstance(event, ev.FROM_BACKEND):
                raise InvariantError(str(error)) from error
            effects = self.lifecycle.handle(Failed("backend_fault", f"out of order: {error}"))
        for effect in effects:
            try:
                self._perform(effect)
            except OSError as error:  # those that follow it are performed all the same
                self._failed(effect, error)

    def _failed(self, effect: ev.EngineEffect, error: OSError) -> None:
        """An effect was impossible. Where there is no incarnation to end, this process must."""
        text = f"the supervisor failed at {type(effect).__name__}: {error}"
        if self.lifecycle.state is State.DEAD:
            raise InvariantError(text) from error
        self.post(Failed("own_fault", text))

    def _perform(self, effect: ev.EngineEffect) -> None:
        match effect:
            case ev.RecordTransition():
                self._record(effect)
            case ev.KeepGoal():
                self.history.asked_to_be(effect.goal, effect.by, effect.generation)
                self.changes.note()
            case ev.StartTree():
                self._start_tree(effect)
            case ev.TellLockServer():
                if effect.wants_active:
                    self.history.wanted()
                named = self.incarnation if effect.names_incarnation else None
                self.lock.tell(named, wants_active=effect.wants_active)
            case ev.Ask():
                self._ask(effect.step)
            case ev.DrainBackend():
                self.lock.listener.remove()
                budget_ms = self.settings.budgets_ms[State.DRAINING]
                self._running.drain(budget_ms, resume=effect.resume)
            case ev.RestBackend():
                budget_ms = self.settings.budgets_ms[State.RELEASING]
                self._running.residency.rest(budget_ms, keep_kv=effect.keep_kv)
            case ev.PlaceWeights():
                self._running.place(is_away=effect.is_away)
            case ev.ShowTier():
                self.changes.note()
            case ev.Claim():
                self.history.granted(effect.token)
                self.lock.hold(effect.token)
            case ev.Leave() | ev.Linger():
                self.lock.succession.perform(effect)
            case ev.HandBack():
                self.history.wanted()
                self.lock.hand_back(effect.token)
            case ev.KillTree():
                self.lock.listener.remove()
                self._running.tree.kill()
            case ev.ScheduleRelaunch() if self._is_started:
                self.relauncher.schedule()
            case ev.StayCold():
                self.relauncher.cancel()
            case ev.Exit():
                self.relauncher.cancel()
                self._timers.cancel("predecessor")
                if not self.exit.done():
                    self.exit.set_result(effect)

    @property
    def _running(self) -> Incarnation:
        if self.incarnation is None:
            raise InvariantError("there is no incarnation")
        return self.incarnation

    def _record(self, record: ev.RecordTransition) -> None:
        """A transition: the one record of it, its budget, and the health checks of `active`."""
        budget_ms = self.settings.budgets_ms.get(record.target)
        self.history.moved(record, self.lifecycle.now, budget_ms)
        self._timers.cancel("budget")
        if budget_ms is not None:
            self._timers.after("budget", budget_ms, self._budget_spent)
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        if record.target is State.ACTIVE:
            self.watch = HealthWatch(
                self.settings,
                self._running,
                self._timers,
                self.clock,
                look=self.signs,
                on_answer=self._answered,
                on_unhealthy=lambda reason: self.post(Failed("unhealthy", reason)),
            )
        if record.target is State.STANDBY:
            self._running.cpus.lift("prepared")
            self.machine_fault = ""
        self.changes.note()

    def _budget_spent(self) -> None:
        self.post(ev.BudgetSpent(self.history.budget_spent(self.lifecycle.state)))

    # ------------------------------------------------------------------ launching and reaping

    def _launch(self) -> None:
        self.post(ev.Launch(witness.new_incarnation(self.settings.engine)))

    def _start_tree(self, effect: ev.StartTree) -> None:
        self.history.launched(effect.number)
        self.last_fault = None
        self.incarnation = Incarnation(
            self.settings,
            effect.incarnation,
            post=self.post,
            log=self.log,
            leftovers=self.leftovers,
            layout=self.layout,
            cpus=CpuShare(self.log, self._serving()),
            on_gone=self._gone,
            on_loader=self.lock.repeat,
        )
        self.incarnation.start()

    def _gone(self) -> None:
        """The last process is reaped and the last message read."""
        gone, now, history = self._running, self.lifecycle.now, self.history
        self.incarnation, self.last_fault, self.machine_fault = None, gone.fault, gone.machine_fault
        self._timers.cancel("budget")
        if not now.is_leaving:
            is_meant = now.is_handed_over or now.shall.goal is Tier.COLD
            is_outside = gone.rehearsed_ms is not None or history.cause in ev.FROM_OUTSIDE
            is_planned, is_machine = is_meant or is_outside, bool(gone.machine_fault)
            death = (now.reason, now.reached_standby, is_planned, is_machine)
            self.relauncher.died(Death(self.clock.now_ms(), *death))
        history.reaped(now, gone.rehearsed_ms)
        self.post(ev.Reaped(self.relauncher.verdict))
        self.changes.note()

    # ------------------------------------------------------------------ the lock, waking, health

    def _ask(self, step: WakingStep) -> None:
        if step is WakingStep.WAKE:
            token = self.lifecycle.now.token
            self.history.waking(token, is_other_known=self.lock.other is not None)
            self._wake()
        else:
            self.history.asked(step)
            self._running.ask(step)

    def _wake(self) -> None:
        """Ask for the wake once there are both a grant and the listening socket."""
        now, waking = self.lifecycle.now, self.incarnation
        if now.step is WakingStep.WAKE and waking and not waking.residency.is_wake_asked:
            listening, path = self.lock.listener.listen(), self.lock.listener.path
            if listening is not None:
                waking.wake(now.token, self.lock.era_of(now.token), listening, path)
                self.metrics.woken(is_behind_gateway=path is not None)
            else:
                self._timers.after("listener", LISTENER_RETRY_MS, self._wake)

    def _loader_granted(self, incarnation: str, token: int) -> None:
        if self.incarnation is not None and self.incarnation.id == incarnation:
            self.incarnation.loader_granted(token)

    def signs(self) -> Signs:
        """What can be seen of the running incarnation without asking it."""
        progress = self.incarnation.progress.count if self.incarnation is not None else 0
        pressure = self.pressure.sample(self.clock.now_ms())
        return Signs(progress, pressure, self.lock.has_standby)

    def _answered(self, healthy: HealthyMsg) -> None:
        self.history.answered(healthy)
        self.metrics.healthy(healthy)


class Changes:
    """Tells `listeners`, in their order, in the next turn of the event loop."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], object]] = []
        self._due: asyncio.Handle | None = None

    def note(self) -> None:
        """Something has changed."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._tell)

    def close(self) -> None:
        """Tell now what is due."""
        if self._due is not None:
            self._due.cancel()
            self._tell()

    def _tell(self) -> None:
        self._due = None
        for listener in self.listeners:
            listener()
