"""The engine supervisor: one inbox, one lifecycle, and the effects it asks for.

Owns the performing of effects. Must not decide what follows from what: that is `engine/core`.
Every callback (a pidfd, the channel, the lock, a signal, a timer) only posts an event; events are
handled one after the other, and effects that cause further events post them too.

The surprising thing: `dead` has two halves. Until the tree is reaped nothing is said to the lock
server, whatever happens; only then is the incarnation no longer named, and the lock free.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from engine import state_file, status
from engine.control import Control
from engine.core import lifecycle, probes
from engine.core.lifecycle import Event, Failed, IllegalTransition, Lifecycle, State, Step
from engine.departure import depart
from engine.desk import Desk
from engine.health_watch import HealthWatch
from engine.launch import Launch
from engine.lock_side import LockSide
from engine.messages import FaultReport, Healthy
from engine.metrics import EngineMetrics
from engine.relauncher import Relauncher
from engine.settings import Settings
from engine.state_file import StateFile
from engine.status import Budget, Facts
from engine.takeover import Takeovers
from engine.timers import Timers
from engine.tree import become_subreaper
from lockserver.client import witness
from understudy.errors import InvariantError
from understudy.service.clock import Clock, SystemClock, rfc3339
from understudy.service.events import EventLog
from understudy.service.http import HttpServer, Probe
from understudy.service.signals import SignalInbox

# How often processes that have come since are looked for, and orphans buried.
TICK_MS = 1_000.0

# What a backend may say at the wrong moment: its fault, not ours.
BACKEND_EVENTS = (
    lifecycle.Prepared,
    lifecycle.Woken,
    lifecycle.CanaryPassed,
    lifecycle.Serving,
    lifecycle.Drained,
)


class Supervisor:
    """Runs one engine from its first launch to its departure."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock = clock or SystemClock()
        path = state_file.path_of(settings.directory, settings.engine)
        self._memory, self._memory_problem = state_file.load(path)
        self._state_file = StateFile(path, self._report_disk)
        self._events = events = EventLog(settings.engine, clock)
        self._metrics = EngineMetrics(settings.engine, settings.role, self._memory)
        events.subscribe(self._metrics.observe)
        self._lifecycle = Lifecycle(self._memory.number)
        self._facts = Facts(since=rfc3339(clock.wall()))
        self._budget = Budget(clock.now_ms(), None)
        self._timers = timers = Timers()
        self._launch: Launch | None = None
        self._watch: HealthWatch | None = None
        self._last_fault: FaultReport | None = None
        self._inbox: deque[Event] = deque()
        self._is_handling = False
        loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[lifecycle.Exit] = loop.create_future()
        self._takeovers = Takeovers(events, self._memory, clock)
        self._lock = LockSide(
            settings,
            events,
            post=self.post,
            on_loader=self._loader_granted,
            on_listener=self._wake,
        )
        self._relauncher = Relauncher(
            settings, self._lock, timers, events, clock, self._launch_anew
        )
        desk = Desk(
            self._lifecycle,
            lambda: self._launch,
            post=self.post,
            status=self.status,
            events=events,
            clock=clock,
        )
        self._control = Control(settings.control_path, desk, events)
        self.http = HttpServer(
            settings.config["http_host"],
            settings.http_port,
            probes={name: self._prober(name) for name in probes.TABLE},
            status=self.status,
            metrics=self._metrics.page,
            events=events,
        )

    # ------------------------------------------------------------------ the whole run

    async def run(self) -> None:
        """Run until told to end, or until no relaunch can help.

        Raises:
            UnderstudyError: why the engine ended, with the exit code; also a port or a socket
                that is in use.
        """
        become_subreaper()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._crash)
        signals = SignalInbox(loop)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._control.server.start()
            await self.http.start()
            if self._memory_problem:
                text = f"starting without memory: {self._memory_problem}"
                self._events.record("engine.state_file", text, "warning")
            tasks.append(loop.create_task(self._lock.client.run()))
            tasks.append(loop.create_task(self._heed(signals)))
            self._tick()
            self._launch_anew()
            for task in tasks:
                task.add_done_callback(self._ended)
            ending = await self._exit
        finally:
            if self._launch is not None:  # only after a bug of ours: leave nothing behind
                self._launch.kill()
            self._timers.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._lock.close()
            signals.close()
            await self.http.stop()
            await self._control.server.close()
            await self._state_file.close()
        is_loop = self._relauncher.verdict is not None
        depart(self._settings, ending, self._last_fault, is_loop=is_loop)

    async def _heed(self, signals: SignalInbox) -> None:
        await signals.get()
        self.post(lifecycle.Terminate())
        while True:
            await signals.get()
            self.post(lifecycle.TerminateNow())

    def _tick(self) -> None:
        if self._launch is not None:
            self._launch.tree.scan()
        self._timers.after("tick", TICK_MS, self._tick)

    def _crash(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A bug in a callback: a supervisor that is wrong about itself must end."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if (
            isinstance(error, Exception)
            and not isinstance(error, OSError)
            and not self._exit.done()
        ):
            self._exit.set_exception(error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Neither task ends by itself: what ended it ends us."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._exit.done():
            self._exit.set_exception(error)

    # ------------------------------------------------------------------ inbox and effects

    def post(self, event: Event) -> None:
        """Handle `event` after those that came before it."""
        self._inbox.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._is_handling = False

    def _handle(self, event: Event) -> None:
        try:
            effects = self._lifecycle.handle(event)
        except IllegalTransition as error:
            if not isinstance(event, BACKEND_EVENTS):
                raise InvariantError(str(error)) from error
            effects = self._lifecycle.handle(Failed("backend_fault", f"out of order: {error}"))
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: lifecycle.Effect) -> None:
        match effect:
            case lifecycle.Record():
                self._record(effect)
            case lifecycle.StartTree():
                self._start_tree(effect)
            case lifecycle.TellLockServer():
                self._tell(effect)
            case lifecycle.Ask():
                self._ask(effect.step)
            case lifecycle.DrainBackend():
                self._running.drain(self._settings.budgets_ms[State.DRAINING])
            case lifecycle.KillTree():
                self._running.kill()
            case lifecycle.ScheduleRelaunch():
                self._relauncher.schedule()
            case lifecycle.Exit():
                self._relauncher.cancel()
                if not self._exit.done():
                    self._exit.set_result(effect)

    @property
    def _running(self) -> Launch:
        if self._launch is None:
            raise InvariantError("there is no incarnation")
        return self._launch

    def _record(self, record: lifecycle.Record) -> None:
        """A transition: the one record of it, its budget, and what begins or ends with it."""
        now, now_ms = self._lifecycle.now, self._clock.now_ms()
        lasted_ms = self._budget.spent_ms(now_ms)
        self._facts.since = rfc3339(self._clock.wall())
        self._facts.cause = record.cause
        self._facts.is_healthy = record.cause != "unhealthy"
        self._enter(record.target, now_ms)
        is_bad = record.target is State.DEAD and not now.is_leaving
        self._events.record(
            "engine.state",
            f"{record.source} → {record.target}: {record.message}",
            "warning" if is_bad else "info",
            {
                "from": record.source.value,
                "to": record.target.value,
                "cause": record.cause,
                "incarnation": now.incarnation,
                "number": now.number,
                "token": now.token,
                "lasted_ms": round(lasted_ms, 3),
            },
        )
        self._save()

    def _enter(self, state: State, now_ms: float) -> None:
        budget_ms = self._settings.budgets_ms.get(state)
        self._budget = Budget(now_ms, budget_ms)
        self._timers.cancel("budget")
        if budget_ms is not None:
            self._timers.after("budget", budget_ms, self._budget_spent)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._memory.was_standby |= state is State.STANDBY
        if state is State.ACTIVE:
            self._takeovers.active()
            self._watch = HealthWatch(
                self._settings,
                self._running,
                self._timers,
                self._clock,
                on_answer=self._answered,
                on_unhealthy=lambda reason: self.post(Failed("unhealthy", reason)),
            )

    def _budget_spent(self) -> None:
        state, budget_ms = self._lifecycle.state, self._budget.budget_ms
        assert budget_ms is not None  # the timer runs only where there is one
        self._events.record(
            "engine.budget_exceeded",
            f"{state} has lasted longer than its budget of {budget_ms / 1000:g} s",
            "error",
            {"state": state.value, "budget_ms": budget_ms},
        )
        self.post(lifecycle.BudgetSpent(budget_ms))

    # ------------------------------------------------------------------ launching and reaping

    def _launch_anew(self) -> None:
        self.post(lifecycle.Launch(witness.new_incarnation(self._settings.engine)))

    def _start_tree(self, effect: lifecycle.StartTree) -> None:
        self._memory.number = effect.number
        self._facts.launched_at = rfc3339(self._clock.wall())
        self._last_fault = None
        self._launch = Launch(
            self._settings,
            effect.incarnation,
            post=self.post,
            events=self._events,
            on_gone=self._gone,
            on_loader=self._lock.repeat,
        )
        self._launch.start()

    def _gone(self) -> None:
        """The last process is reaped and the last word read."""
        launch, now, now_ms = self._running, self._lifecycle.now, self._clock.now_ms()
        took_ms = self._budget.spent_ms(now_ms)
        died_ms = now_ms - took_ms
        self._launch, self._last_fault = None, launch.fault
        self._timers.cancel("budget")
        self._budget = Budget(self._budget.since_ms, None)
        is_rehearsed = launch.rehearsed_ms is not None
        if not now.is_leaving:
            self._relauncher.died(
                now.reason, reached_standby=now.reached_standby, is_rehearsed=is_rehearsed
            )
        if launch.rehearsed_ms is not None and self._facts.cause == "child_exit":
            self._takeovers.phase("detect", died_ms - launch.rehearsed_ms)
        self._facts.remember_death(now, took_ms, is_rehearsed=is_rehearsed)
        self._events.record(
            "engine.reaped",
            f"every process of {launch.incarnation} is gone, {took_ms:.1f} ms after its end",
            data={"incarnation": launch.incarnation, "duration_ms": round(took_ms, 3)},
        )
        self.post(lifecycle.Reaped(self._relauncher.verdict))
        self._save()

    # ------------------------------------------------------------------ the lock, waking, health

    def _tell(self, effect: lifecycle.TellLockServer) -> None:
        if effect.wants_active:
            self._takeovers.wanted()
        launch = self._launch if effect.names_incarnation else None
        self._lock.tell(launch, wants_active=effect.wants_active)

    def _ask(self, step: Step) -> None:
        if step is Step.WAKE:
            token = self._lifecycle.now.token
            self._takeovers.granted(token, is_other_known=self._lock.other is not None)
            self._wake()
            self._lock.hold(token)
        else:
            self._takeovers.asked(step)
            self._running.ask(step)

    def _wake(self) -> None:
        """Once there are both a grant and the listening socket, whichever comes last."""
        now, launch = self._lifecycle.now, self._launch
        if now.step is Step.WAKE and launch is not None and not launch.is_wake_asked:
            listener = self._lock.borrow_listener()
            if listener is not None:
                launch.wake(now.token, listener)

    def _loader_granted(self, incarnation: str, token: int) -> None:
        if self._launch is not None and self._launch.incarnation == incarnation:
            self._launch.loader_granted(token)

    def _answered(self, healthy: Healthy) -> None:
        self._facts.in_flight = healthy.in_flight
        self._metrics.healthy(healthy.in_flight, healthy.rejected)

    # ------------------------------------------------------------------ what others see

    def status(self) -> dict[str, Any]:
        """The status document."""
        problems = [self._state_file.problem, self._lock.problem]
        return status.document(
            self._settings,
            self._lifecycle.now,
            self._launch,
            self._lock,
            self._budget,
            self._facts,
            self._memory,
            takeovers=self._takeovers,
            relaunch=self._relauncher.plan,
            pid=os.getpid(),
            now_ms=self._clock.now_ms(),
            event_id=self._events.last_id,
            problems=[problem for problem in problems if problem],
        )

    def _prober(self, name: str) -> Callable[[], Probe]:
        def ask() -> Probe:
            now = self._lifecycle.now
            view = probes.View(
                state=now.state,
                was_standby=self._memory.was_standby,
                is_budget_spent=self._budget.is_spent(self._clock.now_ms()),
                is_healthy=self._facts.is_healthy,
                is_crash_loop=self._relauncher.verdict is not None,
            )
            answer = probes.answer(name, view)
            why = status.reason_of(now, self._launch, self._lock)
            spent_s = round(self._budget.spent_ms(self._clock.now_ms()) / 1000, 3)
            details = {"state": now.state.value, "message": why, "since_s": spent_s}
            return Probe(answer.ok, answer.reason, {**details, "rule": answer.rule.value})

        return ask

    def _save(self) -> None:
        self._state_file.write(self.status())

    def _report_disk(self, problem: str | None) -> None:
        severity = "info" if problem is None else "warning"
        text = problem or "the state file can be written again"
        self._events.record("engine.state_file", text, severity)
