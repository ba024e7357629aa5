"""Runs the lifecycle: one inbox for events, and the performing of the effects they have.

Must not decide what follows from what: that is `engine/core`. Every callback (a pidfd, the channel,
the lock, a signal, a timer) only posts an event; events are handled one after the other, and
effects that cause further events post them too.

The surprising thing: `dead` has two halves. Until the tree is reaped nothing is said to the lock
server, whatever happens; only then is the incarnation no longer named, and the lock free.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import Any

from engine.core import events, probes
from engine.core.events import Event, Failed, State, WakingStep
from engine.core.lifecycle import IllegalEvent, Lifecycle
from engine.messages import FaultReport, Healthy
from engine.supervisor import predecessors, state_file, status
from engine.supervisor.health_watch import HealthWatch
from engine.supervisor.kv_layout import KvLayout
from engine.supervisor.launch import Launch
from engine.supervisor.leftovers import Leftovers
from engine.supervisor.leftovers import path_of as leftovers_path
from engine.supervisor.lock_side import LockSide
from engine.supervisor.metrics import EngineMetrics
from engine.supervisor.relauncher import Relauncher
from engine.supervisor.settings import Settings
from engine.supervisor.state_file import StateFile
from engine.supervisor.status import Budget, Facts
from engine.supervisor.takeover import Takeovers
from engine.supervisor.timers import Timers
from lockserver.client import witness
from plumbing.errors import InvariantError
from plumbing.part.paths import engine_state
from plumbing.service.clock import Clock, rfc3339
from plumbing.service.events import EventLog
from plumbing.service.http import Probe

# How often processes that have come since are looked for, and orphans buried.
TICK_MS = 1_000.0

# How soon to try again to bind the service address, which the engine before may have for a moment.
BIND_RETRY_MS = 50.0

# What a backend may say at the wrong moment: its fault, not ours.
BACKEND_EVENTS = (
    events.Prepared,
    events.Woken,
    events.CanaryPassed,
    events.Serving,
    events.Drained,
)


class Runner:
    """One engine, from its first launch until `exit` is set."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        path = engine_state(settings.directory, settings.engine)
        self._memory, self._memory_problem = state_file.load(path)
        self.state_file = StateFile(path, self._report_disk)
        self.log = EventLog(settings.engine, clock)
        self.leftovers = Leftovers(leftovers_path(settings.directory, settings.engine), self.log)
        self._layout = KvLayout(
            settings.directory, settings.engine, may_change=settings.config["kv_change"]
        )
        self.metrics = EngineMetrics(settings.engine, settings.role, self._memory)
        self.log.subscribe(self.metrics.observe)
        self.lifecycle = Lifecycle(self._memory.number)
        self.launch: Launch | None = None
        self.last_fault: FaultReport | None = None
        self.exit: asyncio.Future[events.Exit] = asyncio.get_running_loop().create_future()
        self.timers = timers = Timers()
        self._facts = Facts(since=rfc3339(clock.wall()))
        self._budget = Budget(clock.now_ms(), None)
        self._watch: HealthWatch | None = None
        self._predecessors: str | None = None  # who is in the way of the first launch
        self._inbox: deque[Event] = deque()
        self._is_handling = False
        self._takeovers = Takeovers(self.log, self._memory, clock)
        self.lock = LockSide(
            settings,
            self.log,
            post=self.post,
            on_loader=self._loader_granted,
            on_listener=self._wake,
        )
        if settings.is_remote:
            self.metrics.watch_lease(lambda: self.lock.client.lease)
        self.relauncher = Relauncher(
            settings, self.lock, timers, self.log, clock, self._launch_anew
        )

    def start(self) -> None:
        """Launch for the first time."""
        if self._memory_problem:
            text = f"starting without memory: {self._memory_problem}"
            self.log.record("engine.state_file", text, "warning")
        if self._settings.members > 1 and self._settings.backend == "reference":
            text = (
                f"this is member {self._settings.member} of {self._settings.members}; the reference"
                " backend does not divide a model among them: each has all of it, and 0 answers"
            )
            self.log.record("engine.members", text, "warning")
        self._tick()
        self._launch_first()

    def _launch_first(self) -> None:
        before = self._predecessors
        if self._settings.is_remote:
            self._predecessors = predecessors.clear(self._settings.directory, self._settings.engine)
        if self._predecessors is None:
            self._launch_anew()
            return
        if before is None:
            self.log.record("engine.relaunch", self._predecessors, "warning")
        self.timers.after("predecessors", predecessors.POLL_MS, self._launch_first)

    def close(self) -> None:
        """End timers; a tree that still lives (only after a bug of ours) is killed."""
        if self.launch is not None:
            self.launch.kill()
        self.timers.close()
        self.lock.close()
        self._layout.close()

    def _tick(self) -> None:
        if self.launch is not None:
            self.launch.tick()
        self.timers.after("tick", TICK_MS, self._tick)

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
            asked = self.lifecycle.handle(event)
        except IllegalEvent as error:
            if not isinstance(event, BACKEND_EVENTS):
                raise InvariantError(str(error)) from error
            asked = self.lifecycle.handle(Failed("backend_fault", f"out of order: {error}"))
        for effect in asked:
            self._perform(effect)

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.RecordTransition():
                self._record(effect)
            case events.StartTree():
                self._start_tree(effect)
            case events.TellLockServer():
                self._tell(effect)
            case events.Ask():
                self._ask(effect.step)
            case events.DrainBackend():
                self.lock.stop_listening()
                self._running.drain(self._settings.budgets_ms[State.DRAINING])
            case events.KillTree():
                self._running.kill()
            case events.ScheduleRelaunch():
                self.relauncher.schedule()
            case events.Exit():
                self.relauncher.cancel()
                self.timers.cancel("predecessors")
                if not self.exit.done():
                    self.exit.set_result(effect)

    @property
    def _running(self) -> Launch:
        if self.launch is None:
            raise InvariantError("there is no incarnation")
        return self.launch

    def _record(self, record: events.RecordTransition) -> None:
        """A transition: the one record of it, its budget, and what begins or ends with it."""
        now, now_ms = self.lifecycle.now, self._clock.now_ms()
        lasted_ms = self._budget.spent_ms(now_ms)
        self._facts.since = rfc3339(self._clock.wall())
        self._facts.cause = record.cause
        self._facts.is_healthy = record.cause != "unhealthy"
        self._memory.was_standby |= record.target is State.STANDBY
        is_bad = record.target is State.DEAD and not (now.is_leaving or now.is_handed_over)
        self.log.record(
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
        self._enter(record.target, now_ms)
        self._save()

    def _enter(self, state: State, now_ms: float) -> None:
        budget_ms = self._settings.budgets_ms.get(state)
        self._budget = Budget(now_ms, budget_ms)
        self.timers.cancel("budget")
        if budget_ms is not None:
            self.timers.after("budget", budget_ms, self._budget_spent)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if state is State.ACTIVE:
            self._takeovers.active(now_ms)
            self._watch = HealthWatch(
                self._settings,
                self._running,
                self.timers,
                self._clock,
                on_answer=self._answered,
                on_unhealthy=lambda reason: self.post(Failed("unhealthy", reason)),
            )

    def _budget_spent(self) -> None:
        state, budget_ms = self.lifecycle.state, self._budget.budget_ms
        assert budget_ms is not None  # the timer runs only where there is one
        self.log.record(
            "engine.budget_exceeded",
            f"{state} has lasted longer than its budget of {budget_ms / 1000:g} s",
            "error",
            {"state": state.value, "budget_ms": budget_ms},
        )
        self.post(events.BudgetSpent(budget_ms))

    # ------------------------------------------------------------------ launching and reaping

    def _launch_anew(self) -> None:
        self.post(events.Launch(witness.new_incarnation(self._settings.engine)))

    def _start_tree(self, effect: events.StartTree) -> None:
        self._memory.number = effect.number
        self._facts.launched_at = rfc3339(self._clock.wall())
        self.last_fault = None
        self.launch = Launch(
            self._settings,
            effect.incarnation,
            post=self.post,
            log=self.log,
            leftovers=self.leftovers,
            layout=self._layout,
            on_gone=self._gone,
            on_loader=self.lock.repeat,
        )
        self.launch.start()

    def _gone(self) -> None:
        """The last process is reaped and the last word read."""
        launch, now, now_ms = self._running, self.lifecycle.now, self._clock.now_ms()
        took_ms = self._budget.spent_ms(now_ms)
        died_ms = now_ms - took_ms
        self.launch, self.last_fault = None, launch.fault
        self.timers.cancel("budget")
        self._budget = Budget(self._budget.since_ms, None)
        is_rehearsed = launch.rehearsed_ms is not None
        if not now.is_leaving:
            self.relauncher.died(
                now.reason,
                reached_standby=now.reached_standby,
                is_planned=is_rehearsed
                or now.is_handed_over
                or self._facts.cause in events.FROM_OUTSIDE,
            )
        if launch.rehearsed_ms is not None and self._facts.cause == "child_exit":
            self._takeovers.phase("detect", died_ms - launch.rehearsed_ms)
        self._facts.remember_death(now, took_ms, is_rehearsed=is_rehearsed)
        self.log.record(
            "engine.reaped",
            f"every process of {launch.incarnation} is gone, {took_ms:.1f} ms after its end",
            data={"incarnation": launch.incarnation, "duration_ms": round(took_ms, 3)},
        )
        self.post(events.Reaped(self.relauncher.verdict))
        self._save()

    # ------------------------------------------------------------------ the lock, waking, health

    def _tell(self, effect: events.TellLockServer) -> None:
        if effect.wants_active:
            self._takeovers.wanted()
        launch = self.launch if effect.names_incarnation else None
        self.lock.tell(launch, wants_active=effect.wants_active)

    def _ask(self, step: WakingStep) -> None:
        if step is WakingStep.WAKE:
            token = self.lifecycle.now.token
            self._takeovers.granted(token, is_other_known=self.lock.other is not None)
            self._wake()
            self.lock.hold(token)
        else:
            self._takeovers.asked(step)
            self._running.ask(step)

    def _wake(self) -> None:
        """Once there are both a grant and the listening socket, whichever comes last."""
        now, launch = self.lifecycle.now, self.launch
        if now.step is WakingStep.WAKE and launch is not None and not launch.is_wake_asked:
            listener = self.lock.borrow_listener()
            if listener is not None:
                launch.wake(now.token, listener)
            elif self.lock.own is not None:
                self.timers.after("bind", BIND_RETRY_MS, self._wake)

    def _loader_granted(self, incarnation: str, token: int) -> None:
        if self.launch is not None and self.launch.incarnation == incarnation:
            self.launch.loader_granted(token)

    def _answered(self, healthy: Healthy) -> None:
        self._facts.in_flight = healthy.in_flight
        self.metrics.healthy(healthy.in_flight, healthy.rejected)

    # ------------------------------------------------------------------ what others see

    def status(self) -> dict[str, Any]:
        """The status document."""
        problems = [
            self.state_file.problem,
            self._predecessors,
            self.lock.problem,
            self._layout.note,
        ]
        if self.launch is not None and self.launch.prepared is not None:
            problems += self.launch.prepared.warnings
        return status.document(
            self._settings,
            self.lifecycle.now,
            self.launch,
            self.lock,
            self._budget,
            self._facts,
            self._memory,
            takeovers=self._takeovers,
            relaunch=self.relauncher.plan,
            pid=os.getpid(),
            now_ms=self._clock.now_ms(),
            newest=self.log.newest(),
            problems=[problem for problem in problems if problem],
        )

    def probe(self, endpoint: str) -> Probe:
        """The answer of one line of the probe table, and why."""
        now, now_ms = self.lifecycle.now, self._clock.now_ms()
        view = probes.View(
            state=now.state,
            was_standby=self._memory.was_standby,
            is_budget_spent=self._budget.is_spent(now_ms),
            is_healthy=self._facts.is_healthy,
            is_crash_loop=self.relauncher.verdict is not None,
            takes_traffic=self._settings.member == 0,
        )
        answer = probes.answer(endpoint, view)
        why = status.reason_of(now, self.launch, self.lock)
        since_s = round(self._budget.spent_ms(now_ms) / 1000, 3)
        details = {"state": now.state.value, "message": why, "since_s": since_s}
        return Probe(answer.ok, answer.reason, {**details, "rule": answer.rule.value})

    def _save(self) -> None:
        self.state_file.write(self.status())

    def _report_disk(self, problem: str | None) -> None:
        severity = "info" if problem is None else "warning"
        text = problem or "the state file can be written again"
        self.log.record("engine.state_file", text, severity)
