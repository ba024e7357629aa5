"""`gateway serve`: the process that accepts clients, and its control socket.

It owns no lock and nothing on disk. The lock server lends it the listening socket, engines get its
requests, and a pool, if there is one, opens and closes the doors of models. When it dies its
requests are lost, connections wait in the backlog of the socket, and its init starts another one.

A *successor* is a gateway that the init starts beside this one, on SIGHUP. It prepares everything
and asks the lock server for the socket. The lock server has the old gateway yield: it accepts no
more, closes its control socket and its HTTP port, which only one can have, and finishes its
requests. If the successor is lost before it has the socket, or afterwards, the old one gets it
again. Of two gateways each uses half of `--memory-bytes`.

Users ask the control socket for status, events and a successor; a drill announces there whom it
kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from gateway import messages as msg
from gateway import schema as doc
from gateway.core.events import DeathExpected
from gateway.core.machine import LaneTarget
from gateway.server.endpoints import counts_of
from gateway.server.exchange import GatewayExchange
from gateway.server.hop import HopDoor, fleet_security
from gateway.server.links import GatewayEngineLink, GatewayLockLink, GatewayPoolLink
from gateway.server.metrics import OfGateway
from gateway.server.program import GatewayProgram
from gateway.server.settings import MANUAL, ON_REQUEST, GatewaySettings
from lockserver.client.borrower import Stage
from plumbing.errors import UnderstudyError, UsageError, WaitTimeoutError
from plumbing.service.clock import Clock, moment
from plumbing.service.http import Probe
from plumbing.service.init import SUCCEEDS_ENV
from plumbing.text import duration, join_address
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message

COUNT_S = 0.5  # between two looks at whether the engine may sleep
FINISH_MS = 3_600_000.0  # a replaced gateway: a stream of an hour is rare, an endless one exists
SUCCEED_S = 60.0  # a successor waits this long for the socket; the old gateway serves meanwhile
OPEN_AGAIN_S = 0.02  # the old one closes its port in milliseconds, unless it hangs
UNHEARD_MS = 5_000.0  # a supervisor that is restarted listens again in less


class GatewayServer(GatewayProgram):
    """One gateway; see the head of this file. `predecessor`: the pid of the gateway that this one
    replaces, while that lives."""

    predecessor: int | None = None

    def __init__(self, settings: GatewaySettings, *, clock: Clock | None = None) -> None:
        """Raises:
        UsageError: a certificate, its key or the file of keys cannot be used.
        """
        super().__init__(settings, clock)
        self.exchange = exchange = GatewayExchange(
            settings, self.log.record, demand_changed=self._demand_changed
        )
        self.pool = GatewayPoolLink(settings, exchange, self.clock, self.log)
        self.engine = GatewayEngineLink(settings, exchange, self.clock, self.log)
        self.lock = GatewayLockLink(
            settings,
            exchange,
            self.clock,
            self.log,
            on_lent=lambda fd, address: self._turns.put_nowait(lambda: self._accept(fd, address)),
            on_yield=lambda: self._turns.put_nowait(self._yield),
            on_granted=self.engine.granted,
        )
        links = self.lock, self.engine, self.pool
        page = OfGateway(self.metrics, exchange, lambda: self.ready().ok, *links)
        self.metrics.refresh = page.refresh
        name, aliases = settings.pod_name, settings.aliases
        self.hop = HopDoor(exchange, name, aliases) if settings.hop is not None else None
        self._turns: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]] = asyncio.Queue()
        self._is_open = False  # it has the control socket and the HTTP port
        # Set by an init that can replace this gateway; the pid of the one that it replaces.
        succeeds = os.environ.pop(SUCCEEDS_ENV, None)
        self.is_replaceable = succeeds is not None
        self._is_successor = bool(succeeds)
        self._watch_predecessor(int(succeeds or 0))

    async def begin(self) -> list[Coroutine[Any, Any, None]]:
        if self._is_successor:
            self._loop.call_later(SUCCEED_S, self._give_up)
        else:
            await self.open()
        coroutines = [self.lock.run(), self.engine.run(), self._count(), self._take_turns()]
        return [*coroutines, self.pool.run()] if self.pool.models else coroutines

    # ------------------------------------------------------------------ the socket, turn by turn

    async def _take_turns(self) -> None:
        """One turn of the socket after the other: each has its waits."""
        while True:
            turn = await self._turns.get()
            await turn()

    async def _accept(self, fd: OwnedFd, address: str) -> None:
        """The lock server has lent the socket: accept from now on."""
        if self.is_stopping:
            fd.close()
            return
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
        self.exchange.accept(fd)
        self.lock.set_stage(Stage.ACCEPTS)
        self.accepting_ms = self.clock.now_ms()
        self._share_memory(self.predecessor is not None)
        self.log.record("gateway.accepting", f"accepts connections on {address}")
        said = ""
        while not self._is_open:
            try:
                await self.open()
            except UnderstudyError as error:
                if error.message != said:  # the old gateway hangs: its init kills it
                    said = error.message
                    self.log.record("gateway.not_open", said, "warning")
                await asyncio.sleep(OPEN_AGAIN_S)

    async def _yield(self) -> None:
        """A successor asks for the socket: let go of all that only one can have, and finish."""
        if self.lock.stage is not Stage.ACCEPTS:
            return
        self.exchange.release()
        await self.close()
        self.lock.set_stage(Stage.YIELDS)
        self._share_memory(True)
        in_flight = self.exchange.load().in_flight
        message = f"a successor takes over; finishing {in_flight} requests"
        self.log.record("gateway.replaced", message, data={"in_flight": in_flight})
        self._drain(FINISH_MS)

    async def open(self) -> None:
        try:
            await super().open()
            if self.hop is not None and self.settings.hop is not None:
                self.hop.start(*self.settings.hop, fleet_security(self.settings.fleet_tls))
        except BaseException:
            await super().close()
            raise
        self._is_open = True
        where = f"probes on {join_address(self.http.host, self.http.port)}"
        message = f"started in {self.settings.directory}, {where}"
        self.log.record("gateway.started", message, data={"http_port": self.http.port})

    async def close(self) -> None:
        self._is_open = False
        if self.hop is not None:
            self.hop.stop()
        await super().close()

    # ------------------------------------------------------------------ its predecessor

    def _watch_predecessor(self, pid: int) -> None:
        """Share memory with the gateway that this one replaces until that has ended."""
        try:
            pidfd = os.pidfd_open(pid) if pid else -1
        except OSError:
            return  # it has ended already
        if pid:
            self.predecessor = pid
            self.engine.core.has_predecessor = True
            self._loop.add_reader(pidfd, self._predecessor_gone, pidfd)

    def _predecessor_gone(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self.predecessor = None
        self.engine.core.has_predecessor = False
        self._share_memory(self.lock.stage is not Stage.ACCEPTS)

    def _share_memory(self, is_shared: bool) -> None:
        whole_bytes = self.settings.rules.memory_bytes_max
        self.exchange.limit_memory(whole_bytes // 2 if is_shared else whole_bytes)

    def _give_up(self) -> None:
        if self.lock.stage is Stage.ASKS and not self._exit_code.done():
            why = f"the lock server lent no socket for {SUCCEED_S:g} s: {self.lock.outage}"
            self._exit_code.set_exception(WaitTimeoutError("gateway.no_socket", why))

    # ------------------------------------------------------------------ for users

    @property
    def target(self) -> LaneTarget | None:
        """What is known of the engine that requests go to; None in a pool."""
        lane = self.exchange.core.alone
        return None if lane is None else lane.target

    def replace(self) -> int:
        """Have the init start a successor; the number of requests that are left to finish.

        Raises:
            UnderstudyError: it cannot; this gateway serves on.
        """
        serves_on = f"pid {os.getpid()} serves on"
        if not self.is_replaceable:
            raise UnderstudyError(
                "gateway.no_init",
                "only an init can start a successor, and this gateway has none: start it with"
                f" `understudy-init --replaceable gateway serve`; {serves_on}",
            )
        if self.is_stopping:
            raise UnderstudyError("gateway.stopping", "the gateway is stopping")
        if self.predecessor is not None:
            raise UnderstudyError(
                "gateway.restart_busy",
                f"pid {self.predecessor} still finishes requests of the last replacement;"
                " wait for it, or kill it",
            )
        try:
            self.settings.check_files()
        except UsageError as error:
            raise UnderstudyError(
                "gateway.restart_failed", f"{error.message}; {serves_on}"
            ) from error
        self.log.record("gateway.restarting", "the init starts a successor, as requested")
        os.kill(os.getppid(), signal.SIGHUP)
        return self.exchange.load().in_flight

    def stop(self) -> None:
        super().stop()
        if self.hop is not None:
            self.hop.leave(self.settings.drain_ms)
        self.lock.set_stage(Stage.ENDS)

    def leave(self, within_ms: float) -> msg.LeavingFleetMsg:
        """Have the fronts move their streams to other pods.

        Raises:
            UnderstudyError: `gateway.no_fleet`.
        """
        if self.hop is None:
            raise UnderstudyError(
                "gateway.no_fleet", "no front knows this pod: its gateway runs without --hop"
            )
        if self.hop.leave(within_ms):
            message = f"leaving the fleet within {duration(within_ms)}"
            self.log.record("gateway.leaving", message, data={"within_ms": within_ms})
        left_ms = round(self.hop.leaving_ms or 0)
        return msg.LeavingFleetMsg(left_ms, self.exchange.load().in_flight)

    def hang_up(self) -> None:
        """As `gateway replace`."""
        with contextlib.suppress(UnderstudyError):
            self.replace()

    # ------------------------------------------------------------------ the control socket

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        match message:
            case msg.ReplaceMsg():
                try:
                    in_flight = self.replace()
                except UnderstudyError as error:
                    conn.fault(error, request_id, close=False)
                else:
                    conn.send(msg.ReplacingMsg(os.getpid(), in_flight), request_id)
            case msg.LeaveFleetMsg(within_ms):
                try:
                    conn.send(self.leave(within_ms), request_id)
                except UnderstudyError as error:
                    conn.fault(error, request_id, close=False)
            case msg.ExpectDeathMsg(engine, token, model):
                what = f"{engine} (token {token}) is about to be killed on purpose"
                data = {"engine_id": engine, "token": token}
                self.log.record("gateway.death_expected", what, data=data)
                self.exchange.told(DeathExpected(engine, token, model))
                conn.send(message, request_id)
            case _:
                super().received(conn, message, request_id, fds)

    # ------------------------------------------------------------------ inside

    def _demand_changed(self) -> None:
        if self.pool.models:
            self.pool.changed()
        else:
            self._loop.call_soon(self.engine.count)

    async def _count(self) -> None:
        while True:
            self.engine.count()
            await asyncio.sleep(COUNT_S)

    # ------------------------------------------------------------------ status

    def ready(self) -> Probe:
        """It accepts, and a request would be answered."""
        if self.is_stopping or self.exchange.is_final:
            return Probe(False, "stopping")
        if not self.exchange.is_accepting:
            problems = [each for each in (*self.problems(), self.exchange.problem) if each]
            return Probe(False, "not_accepting", {"problems": problems})
        return self.exchange.endpoints.serves()

    def status(self) -> doc.GatewayStatus:
        lock, upstream, target = self.lock, self.exchange.upstream(), self.target
        idle = None if target is None else target.idle
        continuation = None if upstream is None else upstream.continuation
        return doc.GatewayStatus(
            **self.common(),
            stop=doc.GatewayStop(self.settings.drain_ms, continuation),
            service=doc.GatewayService(lock.address or None, bool(self.settings.tls_cert)),
            predecessor=self.predecessor,
            upstream=upstream,
            lock_server=doc.GatewayLockServer(
                lock.is_served, self.since(lock.changed_ms), lock.outage
            ),
            idle=None
            if idle is None or target is None
            else doc.GatewayIdle(idle, **moment(target.idle_ms, self.clock)),
            rest=_rest(self),
            pool=pool_of(self),
            hop=None if self.hop is None else self.hop.status(),
        )

    def problems(self) -> list[str | None]:
        lock, outage = self.lock, self.lock.outage
        if outage is not None:
            is_served = self.target is not None and self.target.grant is not None
            meanwhile = (
                "requests are served, a takeover waits" if is_served else "nothing is served"
            )
            outage = f"{outage}; {meanwhile}"
        elif not lock.address:
            outage = "the lock server has lent no socket yet; see `lockserver status`"
        hop = None if self.hop is None else self.hop.problem
        return [outage, self.pool.outage, _unheard(self), hop]


def _unheard(gateway: GatewayServer) -> str | None:
    """A takeover loses the engine for a moment; longer is a problem."""
    link, target = gateway.engine, gateway.target
    if target is None or target.idle is not None or link.unheard_ms is None:
        return None
    if gateway.clock.now_ms() - link.unheard_ms < UNHEARD_MS:
        return None
    return (
        f"{link.core.engine} does not report its state, so the gateway cannot put it to sleep or"
        f" wake it: {link.problem}"
    )


def _rest(gateway: GatewayServer) -> doc.GatewayRest:
    """What the engine that holds the lock says of itself, and what the gateway makes of it."""
    link, rules, said = gateway.engine, gateway.settings.rest, gateway.engine.core.said
    engine = None
    if said is not None:
        engine = doc.GatewayEngine(
            state=said.state,
            **moment(link.said_ms - said.since_ms, gateway.clock),
            goal=said.goal,
            goal_by=said.goal_by or None,
        )
    return doc.GatewayRest(
        sleep_after_ms=round(rules.keep_alive_ms),
        wake=ON_REQUEST if rules.wakes_on_request else MANUAL,
        door="open" if link.core.door is None else "shut",
        engine=engine,
        problem=link.problem,
    )


def pool_of(gateway: GatewayServer) -> doc.GatewayPool | None:
    """What the pool says of its models, and what there is for them; None without a pool file."""
    link = gateway.pool
    if not link.models:
        return None
    exchange, models = gateway.exchange, {}
    for model, demand in exchange.demand().items():
        said, lane = exchange.endpoints.said.get(model), exchange.core.lanes[model]
        models[model] = doc.GatewayModel(
            state=None if said is None else said.state,
            reason="" if said is None else said.reason,
            door=lane.door_word,
            engine=None if lane.target.grant is None else lane.target.grant.engine,
            **counts_of(demand),
        )
    since = moment(link.changed_ms, gateway.clock)
    return doc.GatewayPool(link.is_connected, **since, problem=link.problem, models=models)
