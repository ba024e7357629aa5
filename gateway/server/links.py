"""What the gateway hears from the lock server, the active engine and the pool, and tells them.

Each link stays connected to its server and hands what it hears to the `GatewayExchange`. None of
them decides about requests. A server may be away for as long as it likes: what it said last counts,
and requests are served.

`GatewayLockLink` has the listening socket lent and hears who holds the lock. `GatewayEngineLink`
carries out what `gateway.core.sleep_door` says: an engine that cannot be heard opens the door, so
requests are sent to it as if it were awake, and those that fail are retried. `GatewayPoolLink`
hears each model's door and says what there is for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from gateway.core.events import DoorSet, EngineGranted, NobodyGranted, Told
from gateway.core.sleep_door import Effects, SendGoal, SleepDoor
from gateway.server.exchange import GatewayExchange
from gateway.server.settings import GatewaySettings
from lockserver.client.borrower import Borrower
from plumbing.errors import UnderstudyError
from plumbing.pod.messages import GOAL_CATALOGUE, EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.models import ACTIVE
from plumbing.pod.paths import engine_socket, lockserver_socket
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.service.metrics import Tally
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message
from pool.client.link import KeptLink, PoolLink
from pool.core.events import RefusedDoor
from pool.core.states import ModelState
from pool.messages import DoorsMsg, PooledModel


class GatewayLockLink(Borrower):
    """One gateway's connection to the lock server."""

    def __init__(
        self,
        settings: GatewaySettings,
        exchange: GatewayExchange,
        clock: Clock,
        log: EventLog,
        *,
        on_lent: Callable[[OwnedFd, str], None],
        on_yield: Callable[[], None],
        on_granted: Callable[[str, int], None],
    ) -> None:
        """`on_granted(engine, token)` is called after the exchange is told."""
        super().__init__(lockserver_socket(settings.directory))
        self.changed_ms = clock.now_ms()  # connected, or lost
        self.is_served = False  # connected, and not refused
        self.refusal: str | None = None
        self.address = ""  # that it has lent last
        self._exchange, self._clock, self._log = exchange, clock, log
        self._on_lent, self._on_yield, self._on_granted = on_lent, on_yield, on_granted

    @property
    def outage(self) -> str | None:
        """Why the lock server is of no use now."""
        if self.refusal is not None:
            return f"the lock server refuses this gateway: {self.refusal}"
        if self.is_served:
            return self.problem
        return f"no lock server: {self.problem or 'not connected yet'}"

    def lent(self, fd: OwnedFd, address: str) -> None:
        self._heard()
        message = f"the lock server has lent {address}"
        self._log.record("gateway.socket_lent", message, data={"lock": ACTIVE})
        self.address = address
        self._on_lent(fd, address)

    def must_yield(self) -> None:
        self._on_yield()

    def granted(self, model: str, engine: str, token: int, era: str) -> None:
        """`model`: of a pool, which knows whether it is awake; else ""."""
        self._heard()
        lane = self._exchange.core.by_model.get(model)
        old = None if lane is None else lane.target.grant
        if old is None or (old.token, old.era) != (token, era):
            data = {"engine_id": engine, "token": token} | ({"model": model} if model else {})
            what = f"{engine} now serves {model}" if model else f"requests go to {engine}"
            self._log.record("gateway.engine", f"{what} (token {token})", data=data)
        self._exchange.told(EngineGranted(engine, token, era, model))
        if not model:
            self._on_granted(engine, token)

    def idle(self, model: str, reason: str, is_final: bool) -> None:
        self._heard()
        lane = self._exchange.core.alone
        if lane is not None and lane.target.idle is None:
            message = f"no engine is known to serve: {reason}"
            self._log.record("gateway.no_engine", message, "info" if is_final else "warning")
        self._exchange.told(NobodyGranted(reason, model, is_final))

    def _heard(self) -> None:
        """The server takes this gateway: a connection alone may be refused, and again and again."""
        if not self.is_served:
            self.is_served, self.refusal = True, None
            self.changed_ms = self._clock.now_ms()
            self._log.record("gateway.lock_server", "connected to the lock server")

    def lose(self, reason: str) -> None:
        if self.is_served:
            self.is_served, self.changed_ms = False, self._clock.now_ms()
            message = (
                f"lost the lock server ({reason}); requests are served, a takeover waits for it"
            )
            self._log.record("gateway.lock_server_lost", message, "warning")

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        if self.refusal != error.message:  # it is repeated at every attempt
            self.refusal = error.message
            message = f"the lock server refuses this gateway: {error.message}"
            self._log.record("gateway.refused", message, "error", {"error_code": error.code})


BY = "gateway"  # who wants it, in the engine's status and events
ANSWER_S = 3.0  # a supervisor answers within a millisecond, and is never blocked by its backend
# The upper bounds of the buckets of the wake: 10 ms with the reference engine, a relaunch from cold
# takes minutes.
WAKE_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class GatewayEngineLink(KeptLink):
    """One gateway's connection to the engine that requests go to. `problem`: why it cannot be
    heard, or does not do what it should."""

    def __init__(
        self, settings: GatewaySettings, exchange: GatewayExchange, clock: Clock, log: EventLog
    ) -> None:
        super().__init__("", GOAL_CATALOGUE)
        self.problem = None
        self.core = SleepDoor(settings.rest)
        self.said_ms = 0.0
        self.unheard_ms: float | None = None  # since when it cannot be heard
        self.goals: Counter[Tier] = Counter()  # sent
        self.wakes = Tally(WAKE_BUCKETS_S)
        self._directory = settings.directory
        self._exchange, self._clock, self._log = exchange, clock, log
        self._is_named = asyncio.Event()
        self._last_request = 0

    # ------------------------------------------------------------------ what happens outside

    def granted(self, engine: str, token: int) -> None:
        """The lock server names the holder; the exchange knows already."""
        is_another, said = engine != self.core.engine, self.core.said
        self._perform(self.core.holder_is(engine, token, self._clock.now_ms()))
        if is_another:
            self.path = engine_socket(self._directory, engine)
            self._is_named.set()
            self.drop("another engine holds the lock")
        elif said is not None:
            self._heard(said, is_answer=False)  # it may have spoken under this token before

    def count(self) -> None:
        """Tell the door what there is: every 500 ms or so, and when a request wants an engine."""
        load, quiet_ms = self._exchange.load(), self._exchange.quiet_ms
        wanting, now_ms = load.waiting + load.parked, self._clock.now_ms()
        self._perform(self.core.load(wanting, quiet_ms, now_ms))

    def look(self) -> None:
        """An answer is overdue, for which requests may wait."""
        self.drop(f"its supervisor has not answered for {ANSWER_S:g} s")

    # ------------------------------------------------------------------ the connection

    async def run(self) -> None:
        await self._is_named.wait()
        await super().run()

    async def _connect(self) -> None:
        engine = self.core.engine
        await super()._connect()
        if engine != self.core.engine:
            self.drop("another engine holds the lock")

    def begin(self, conn: Connection) -> None:
        self._ask(SetGoalMsg())

    def hear(self, message: Message, request_id: int) -> None:
        if isinstance(message, EngineReportMsg):
            self._heard(message, is_answer=self._is_answer(request_id))

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        if self._is_answer(request_id) and self.core.pending_goal is not None:
            self._perform(self.core.refused(error.message, self._clock.now_ms()))

    def lose(self, reason: str) -> None:
        self.forget_look()
        self._failed(f"the connection ended: {reason}")
        self._perform(self.core.lost(self._clock.now_ms()))

    def _failed(self, why: str) -> None:
        super()._failed(why)
        self.unheard_ms = self.unheard_ms or self._clock.now_ms()

    # ------------------------------------------------------------------ inside

    def _heard(self, said: EngineReportMsg, *, is_answer: bool) -> None:
        self.said_ms = self._clock.now_ms()
        self.unheard_ms, self.problem = None, said.fault or None
        self._perform(self.core.heard(said, self.said_ms, is_answer=is_answer))

    def _is_answer(self, request_id: int) -> bool:
        """Whether it answers the last question."""
        if request_id == self._last_request:
            self.forget_look()
        return request_id == self._last_request

    def _ask(self, question: SetGoalMsg) -> None:
        if self.conn is not None:
            self._last_request += 1
            self.look_soon(ANSWER_S)
            self.conn.send(question, self._last_request)

    def _perform(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case DoorSet():
                    self._exchange.told(effect)
                case SendGoal():
                    self.goals[effect.goal] += 1
                    self._ask(SetGoalMsg(effect.goal, BY))
                case Told(kind, message, severity, about):
                    if isinstance(woken_ms := about.get("duration_ms"), float):
                        self.wakes.observe(woken_ms / 1000)
                    data = {"engine_id": self.core.engine, "token": self.core.token, **about}
                    self._log.record(f"gateway.{kind}", message, severity, data)


class GatewayPoolLink(PoolLink):
    """One gateway's connection to the pool of its directory. Without a pool file: no models."""

    def __init__(
        self, settings: GatewaySettings, exchange: GatewayExchange, clock: Clock, log: EventLog
    ) -> None:
        super().__init__(settings.directory, exchange.demand)
        self.models = tuple(settings.lanes)
        self.changed_ms = clock.now_ms()  # connected, or lost
        self.refusal: str | None = None
        self._exchange, self._clock, self._log = exchange, clock, log

    @property
    def outage(self) -> str | None:
        """Why the pool is of no use now."""
        has_said = bool(self._exchange.endpoints.said)
        if not self.models or (self.is_connected and self.refusal is None and has_said):
            return None
        why = self.refusal or self.problem or "it has sent nothing yet"
        return f"no pool: {why}; awake models are still served, but no model switches"

    def doors_came(self, doors: DoorsMsg) -> None:
        self.refusal = None
        said = {model: doors.models.get(model) or _unknown(model) for model in self.models}
        self._exchange.set_model_doors(said)
        self.changed()

    def begin(self, conn: Connection) -> None:
        super().begin(conn)
        self.changed_ms = self._clock.now_ms()
        self._log.record("gateway.pool", "connected to the pool")

    def lose(self, reason: str) -> None:
        super().lose(reason)
        self._exchange.forget_door_numbers()
        self.changed_ms = self._clock.now_ms()
        message = f"lost the pool ({reason}); awake models are still served, but no model switches"
        self._log.record("gateway.pool_lost", message, "warning")

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        if self.refusal != error.message:  # it is repeated at every attempt
            self.refusal = error.message
            message = f"the pool refuses this gateway: {error.message}"
            self._log.record("gateway.pool_refused", message, "error", {"error_code": error.code})


def _unknown(model: str) -> PooledModel:
    sentence = f"the pool does not know {model}: its file has changed; restart the gateway"
    return PooledModel(0, RefusedDoor("model_not_found", sentence, None), ModelState.COLD)
