"""Speaks with the engine that holds the lock, on its control socket: whether it rests, and shall.

Carries out what `gateway.core.sleep` decides, and feeds it. An engine that cannot be heard opens
the door: children send it requests as if it were awake, and retry those that fail.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from gateway import messages as msg
from gateway.core import sleep as ev
from gateway.core.events import DoorSet, GatewayDoor
from gateway.core.sleep import SleepPolicy, SleepRules
from gateway.supervisor.child_processes import ChildLink, ChildProcesses
from plumbing.errors import UnderstudyError
from plumbing.pod.messages import GOAL_CATALOGUE, EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.paths import engine_socket
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.text import duration
from plumbing.wire.connection import Connection, Handler, connect
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message

BY = "gateway"  # who wants it, in the engine's status and events
# A supervisor answers within a millisecond, and is never blocked by its backend. While the engine
# sleeps it is polled this often, because requests wait for what it says.
ANSWER_MS = 3_000.0
LOOK_MS = 1_000.0
RETRY_S = 0.05  # a restarted supervisor takes some 200 ms to listen again; doubled
RETRY_S_MAX = 5.0  # up to this: one of an older release refuses every time
# The upper bounds of the buckets of the wake: 10 ms with the reference engine, a relaunch from cold
# takes minutes.
WAKE_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class GatewayEngineSide(Handler):
    """One gateway's connection to the engine that requests go to."""

    def __init__(
        self,
        rules: SleepRules,
        directory: str,
        children: ChildProcesses,
        clock: Clock,
        log: EventLog,
    ) -> None:
        self.core = SleepPolicy(rules)
        self.said: EngineReportMsg | None = (
            None  # the last word of this engine, while it is connected
        )
        self.said_ms = 0.0
        self.problem: str | None = None  # why it cannot be heard, or does not do what it should
        self.unheard_ms: float | None = None  # since when
        self.goals: Counter[Tier] = Counter()  # sent
        self.wakes = msg.HistogramTally(WAKE_BUCKETS_S)
        self._directory = directory
        self._children, self._clock, self._log = children, clock, log
        self._conn: Connection | None = None
        self._changed = asyncio.Event()  # there is another engine, or no connection
        self._retry_s = RETRY_S
        self._last_request = 0
        self._asked_ms: float | None = None  # since when an answer is due

    # ------------------------------------------------------------------ what happens outside

    def granted(self, engine: str, token: int) -> None:
        """The lock server names the holder; the children know already."""
        is_another = engine != self.core.engine
        self._feed(ev.HolderIs(engine, token))
        if is_another:
            self._retry_s = RETRY_S
            self._close("another engine holds the lock")
            self._changed.set()
        elif self.said is not None:
            self._heard(self.said, is_answer=False)  # it may have spoken under this token before

    def beaten(self, link: ChildLink) -> None:
        beat = link.beat
        assert beat is not None
        load = beat.load
        wanting = load.waiting + load.parked
        self._feed(ev.ChildSaid(link.number, beat.door, load.in_flight, wanting, beat.quiet_ms))

    def ended(self, link: ChildLink) -> None:
        self._feed(ev.ChildGone(link.number))

    def look(self) -> None:
        """Call this every 100 ms or so."""
        now_ms = self._clock.now_ms()
        if self._asked_ms is not None and now_ms - self._asked_ms > ANSWER_MS:
            silent = duration(now_ms - self._asked_ms)
            self._close(f"its supervisor has not answered for {silent}")
        is_due = self._asked_ms is None and now_ms - self.said_ms > LOOK_MS
        if is_due and self.core.door.door is GatewayDoor.SHUT:
            self._ask(SetGoalMsg())
        self._feed(ev.SleepTick())

    async def run(self) -> None:
        """Stay connected to the engine that holds the lock, until cancelled."""
        while True:
            self._changed.clear()
            engine = self.core.engine
            if engine and self._conn is None:
                try:
                    await connect(engine_socket(self._directory, engine), GOAL_CATALOGUE, self)
                except UnderstudyError as error:
                    self._fail(error.message)
            if engine != self.core.engine:
                self._close("another engine holds the lock")
            await self._changed.wait()

    def _fail(self, why: str) -> None:
        """There is no connection: try again, less and less often."""
        self.problem = why
        self.unheard_ms = self.unheard_ms or self._clock.now_ms()
        asyncio.get_running_loop().call_later(self._retry_s, self._changed.set)
        self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conn = conn
        self._ask(SetGoalMsg())

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        if conn is not self._conn:
            return
        is_answer = request_id == self._last_request
        if is_answer:
            self._asked_ms = None
        match message:
            case EngineReportMsg():
                self._heard(message, is_answer=is_answer)
            case FaultMsg():
                self.problem = message.message
                if is_answer and self.core.pending_goal is not None:
                    self._feed(ev.GoalRefused(message.message))

    def closed(self, conn: Connection, reason: str) -> None:
        if conn is self._conn:
            self._lost(reason)

    # ------------------------------------------------------------------ inside

    def _heard(self, said: EngineReportMsg, *, is_answer: bool) -> None:
        self.said, self.said_ms = said, self._clock.now_ms()
        self.unheard_ms, self._retry_s = None, RETRY_S
        self.problem = said.fault or None
        self._feed(
            ev.HolderSaid(
                said.token, said.state, said.goal, said.can_rest, said.since_ms, is_answer
            )
        )

    def _close(self, reason: str) -> None:
        if self._conn is not None:
            self._conn.close(reason)
            self._lost(reason)

    def _lost(self, reason: str) -> None:
        self._conn = self.said = self._asked_ms = None
        self._fail(reason)
        self._feed(ev.HolderLost())

    def _ask(self, question: SetGoalMsg) -> None:
        if self._conn is not None:
            self._last_request += 1
            if self._asked_ms is None:
                self._asked_ms = self._clock.now_ms()
            self._conn.send(question, self._last_request)

    def _feed(self, event: ev.SleepEvent) -> None:
        for effect in self.core.handle(event, self._clock.now_ms()):
            self._perform(effect)

    def _perform(self, effect: ev.SleepEffect | DoorSet) -> None:
        match effect:
            case DoorSet():
                self._children.tell(effect)
            case ev.SendGoal():
                self.goals[effect.goal] += 1
                self._ask(SetGoalMsg(effect.goal, BY))
            case ev.HolderWoke():
                self.wakes.observe(effect.ms / 1000)
                message = f"{self.core.engine} is awake after {duration(effect.ms)}"
                data = {"engine_id": self.core.engine, "duration_ms": round(effect.ms, 1)}
                self._log.record("gateway.woken", message, data=data)
            case ev.SleepTold():
                data = {"engine_id": self.core.engine, "token": self.core.token}
                self._log.record(f"gateway.{effect.kind}", effect.message, effect.severity, data)
