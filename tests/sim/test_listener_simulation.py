"""Gateways that come, go and replace each other at one listening socket, in virtual time.

The arbiter is the lock server's own (`lockserver.core.listener`). Around it are models of what it
meets: a kernel that keeps a socket for as long as somebody has a copy, the server that binds, lends
and restarts, gateways, their init, and clients. `Law` says what may never happen.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from lockserver.core import listener
from lockserver.core.listener import YIELD_MS, Acceptor, Listener, ListenerOrders
from lockserver.messages import Stage
from tests.sim.kit import replayable, seeds

STEP_MS = 5.0
TICK_MS = 100.0  # of the lock server
DELAYS_MS = (5.0, 10.0, 20.0)  # of a message
HOLD_MS = 10_000.0
PREPARE_MS = 400.0  # imports, certificates
RESTART_MS = 300.0  # the lock server
RECONNECT_MS = 50.0
SILENT_MS = 3_000.0  # the watchdog of init
WAIT_MS = 1_000.0  # a connection waits no longer for the next gateway after a death
SETTLE_MS = 300.0  # in which a restarted server hears of all its gateways


@dataclass(eq=False)
class GatewayModel:
    """One process. `listening`: it has a copy of the socket and accepts."""

    name: str
    ready_ms: float
    stage: Stage = Stage.ASKS
    listening: bool = False
    has_copy: bool = False  # its borrower's, to hand back
    is_ready: bool = False  # its init knows that it accepts
    is_stopped: bool = False
    was_stopped: bool = False
    stopped_ms: float = 0.0
    is_connected: bool = False
    connect_ms: float = 0.0
    requests: list[float] = field(default_factory=list)  # when each ends
    inbox: list[tuple[float, str]] = field(default_factory=list)

    def lent(self, world: ListenerWorld) -> None:
        if self.stage is Stage.ENDS:
            return
        self.listening = self.has_copy = self.is_ready = True
        self.say(world, Stage.ACCEPTS)

    def told_to_yield(self, world: ListenerWorld) -> None:
        if self.stage is Stage.ACCEPTS:
            self.listening = False
            self.say(world, Stage.YIELDS)

    def say(self, world: ListenerWorld, stage: Stage) -> None:
        self.stage = stage
        self.has_copy = self.has_copy and stage is Stage.ACCEPTS
        world.to_server(self)


class ListenerWorld:
    """One pod; `faults`: by name, how often each happens in a second."""

    def __init__(self, seed: int, faults: dict[str, float], *, has_watchdog: bool = True) -> None:
        self.random = random.Random(seed)
        self.faults, self.has_watchdog = faults, has_watchdog
        self.now_ms = 0.0
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()
        self.gateways: list[GatewayModel] = []
        self.backlog: list[float] = []  # when each connected
        self.server: Listener | None = Listener(HOLD_MS, 0.0)
        self.known: dict[str, Acceptor] = {}  # to the server, in the order of their connections
        self.server_has_copy = True
        self.server_back_ms = 0.0
        self.server_since_ms = 0.0
        self.messages: list[tuple[float, GatewayModel, Stage, bool]] = []  # to the server
        self.restart_ms: float | None = 0.0  # of the gateway
        self.nobody_ms = 0.0  # since when no gateway could accept,
        self.gone_ms = 0.0  # and since when there is none
        self.able_ms = math.inf  # since when a gateway could accept
        self.stops_ms = -1e9  # the last time that one was stopped
        self.number = 0

    # ------------------------------------------------------------------ one step

    def run(self, ms: float) -> None:
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            self.step()

    def step(self) -> None:
        self.now_ms += STEP_MS
        for name, per_second in self.faults.items():
            if self.random.random() < per_second * STEP_MS / 1000:
                getattr(self, name)()
        self._init()
        self._server()
        for gateway in list(self.gateways):
            self._gateway(gateway)
        if self.random.random() < 0.05:
            self.connect()
        self.check()

    def note(self, what: str) -> None:
        self.trace.append(f"{self.now_ms:.0f} {what}")

    # ------------------------------------------------------------------ kernel and clients

    @property
    def is_listening(self) -> bool:
        return self.server_has_copy or any(each.listening for each in self.gateways)

    def connect(self) -> None:
        if self.is_listening:
            self.backlog.append(self.now_ms)
            return
        self.counts["refused"] += 1
        self.note("refused")
        idle_ms = self.now_ms - self.nobody_ms
        assert idle_ms >= HOLD_MS - TICK_MS or "kill_server" in self.faults, f"{idle_ms:.0f} ms"

    def _close(self) -> None:
        """Somebody has closed a copy: without another one the backlog is lost."""
        if not self.is_listening:
            self.backlog.clear()

    # ------------------------------------------------------------------ init

    def _init(self) -> None:
        if self.restart_ms is not None and self.now_ms >= self.restart_ms:
            self.restart_ms = None
            self.start()
        for each in list(self.gateways):
            hangs = each.is_stopped and self.now_ms - each.stopped_ms > SILENT_MS
            if hangs and self.has_watchdog:
                self.die(each)

    def start(self) -> GatewayModel:
        self.number += 1
        made = GatewayModel(f"g{self.number}", self.now_ms + PREPARE_MS)
        self.gateways.append(made)
        self.note(f"start {made.name}")
        return made

    def die(self, gateway: GatewayModel) -> None:
        self.note(f"{gateway.name} dies")
        self.counts["lost"] += len(gateway.requests)
        ready = [each for each in self.gateways if each.is_ready]
        is_main = gateway is (ready[-1:] or self.gateways[:1])[0]
        self._leave(gateway)
        if is_main and all(each.is_ready for each in self.gateways):
            self.restart_ms = self.now_ms

    def _leave(self, gateway: GatewayModel) -> None:
        self.gateways.remove(gateway)
        self.messages = [each for each in self.messages if each[1] is not gateway]
        if gateway.is_connected:
            self._forget(gateway)
        self._close()

    # ------------------------------------------------------------------ gateways

    def _gateway(self, gateway: GatewayModel) -> None:
        if gateway.is_stopped or self.now_ms < gateway.ready_ms:
            return
        if not gateway.is_connected and self.server and self.now_ms >= gateway.connect_ms:
            gateway.is_connected = True
            self.to_server(gateway)
        due = [each for each in gateway.inbox if each[0] <= self.now_ms]
        gateway.inbox = [each for each in gateway.inbox if each[0] > self.now_ms]
        for _, message in due:
            getattr(gateway, message)(self)
        if gateway.listening:
            self.counts["accepted"] += len(self.backlog)
            for _ in self.backlog:
                gateway.requests.append(self.now_ms + self.random.choice((10, 100, 3000)))
            self.backlog.clear()
        gateway.requests = [end_ms for end_ms in gateway.requests if end_ms > self.now_ms]
        has_finished = gateway.stage is Stage.YIELDS and not gateway.requests and not gateway.inbox
        if has_finished and len(self.gateways) > 1:
            self.note(f"{gateway.name} has finished")
            self._leave(gateway)

    def to_server(self, gateway: GatewayModel) -> None:
        if gateway.is_connected:
            last = max((at for at, who, _, _ in self.messages if who is gateway), default=0.0)
            at_ms = max(last, self.now_ms + self.random.choice(DELAYS_MS))
            self.messages.append((at_ms, gateway, gateway.stage, gateway.has_copy))

    # ------------------------------------------------------------------ the server

    def _server(self) -> None:
        if self.server is None:
            if self.now_ms >= self.server_back_ms:
                self.server, self.known = Listener(HOLD_MS, self.now_ms), {}
                self.server_since_ms = self.now_ms
                self.server_has_copy = not self.is_listening  # else the address is in use
            return
        due = sorted((each for each in self.messages if each[0] <= self.now_ms), key=lambda m: m[0])
        self.messages = [each for each in self.messages if each[0] > self.now_ms]
        for _, gateway, stage, hands_back in due:
            if gateway not in self.gateways:
                continue
            self.server_has_copy |= hands_back and gateway.listening
            found = Acceptor(gateway.name, gateway.ready_ms)
            self.known.setdefault(gateway.name, found).say(stage)
            self._settle()
        if self.now_ms % TICK_MS < STEP_MS:
            self._settle()

    def _settle(self) -> None:
        if self.server is None:
            return
        orders = self.server.settle(tuple(self.known.values()), self.now_ms)
        if orders != ListenerOrders():
            self.note(str(orders))
        for each in orders.have_yield:
            self._send(each.id, "told_to_yield")
        if orders.lend_to is not None:
            is_elsewhere = any(each.listening for each in self.gateways)
            if not self.server_has_copy and is_elsewhere:
                orders.lend_to.is_lent = False
            else:
                self.server_has_copy = True  # bound anew if it was closed
                self._send(orders.lend_to.id, "lent")
        if orders.close:
            self.server_has_copy = False
            self._close()

    def _forget(self, gateway: GatewayModel) -> None:
        self.known.pop(gateway.name, None)
        self._settle()

    def _send(self, name: str, message: str) -> None:
        for each in self.gateways:
            if each.name == name and each.is_connected:
                last = max((at for at, _ in each.inbox), default=0.0)
                at_ms = max(last, self.now_ms + self.random.choice(DELAYS_MS))
                each.inbox.append((at_ms, message))

    # ------------------------------------------------------------------ faults

    def kill(self) -> None:
        if self.gateways:
            self.die(self.random.choice(self.gateways))

    def replace(self) -> None:
        if len(self.gateways) == 1 and self.restart_ms is None:
            self.counts["replaced"] += 1
            self.start()

    def stop(self) -> None:
        running = [each for each in self.gateways if not each.is_stopped]
        if running:
            chosen = self.random.choice(running)
            chosen.is_stopped = chosen.was_stopped = True
            chosen.stopped_ms = self.stops_ms = self.now_ms
            self.note(f"{chosen.name} is stopped")

    def resume(self) -> None:
        for each in self.gateways:
            each.is_stopped = False

    def cut(self) -> None:
        """The connection of a gateway to the server ends."""
        for each in self.gateways[:1]:
            if each.is_connected and self.server is not None:
                self._disconnect(each)
                self.server_since_ms = self.now_ms
                self._forget(each)

    def kill_server(self) -> None:
        if self.server is None:
            return
        self.note("the server dies")
        self.server, self.server_has_copy = None, False
        self.server_back_ms = self.now_ms + RESTART_MS
        for each in self.gateways:
            self._disconnect(each)
        self._close()

    def _disconnect(self, gateway: GatewayModel) -> None:
        gateway.is_connected = False
        gateway.connect_ms = self.now_ms + RECONNECT_MS
        gateway.inbox.clear()
        self.messages = [each for each in self.messages if each[1] is not gateway]

    # ------------------------------------------------------------------ the law

    def check(self) -> None:
        """One gateway accepts, connections are taken in time, and nobody waits for nobody."""
        accepting = [each for each in self.gateways if each.listening and not each.is_stopped]
        is_settled = self.server is not None and self.now_ms - self.server_since_ms > SETTLE_MS
        if is_settled and len(accepting) > 1:
            assert any(each.was_stopped for each in accepting), [each.name for each in accepting]
        able = [
            each
            for each in self.gateways
            if not each.is_stopped and each.is_connected and self.now_ms >= each.ready_ms
        ]
        if able or accepting:
            self.nobody_ms = self.now_ms
        if self.gateways:
            self.gone_ms = self.now_ms
        self.able_ms = min(self.able_ms, self.now_ms) if able else math.inf
        waited_ms = self.now_ms - max(self.backlog[0], self.able_ms) if self.backlog else 0.0
        patience_ms = WAIT_MS
        if any(each.was_stopped for each in self.gateways) or self.now_ms - self.stops_ms < 5000:
            patience_ms += SILENT_MS + YIELD_MS
        if not is_settled or "kill_server" in self.faults:
            patience_ms += RESTART_MS + SETTLE_MS
        assert waited_ms <= patience_ms, f"a connection waits for {waited_ms:.0f} ms"
        if self.now_ms - self.gone_ms > HOLD_MS + 2 * TICK_MS and self.server is not None:
            assert not self.server_has_copy, "connections wait for no gateway"


Faults = dict[str, float]
PLANNED: Faults = {"replace": 0.5}
DEATHS: Faults = {"replace": 0.3, "kill": 0.3}
RACES: Faults = {"replace": 1.0, "kill": 1.0}
WILD: Faults = {"replace": 0.3, "kill": 0.2, "stop": 0.2, "resume": 0.2, "cut": 0.2}
HANGS: Faults = {"replace": 0.5, "stop": 0.1}
SERVERS: Faults = {"replace": 0.3, "kill": 0.1, "kill_server": 0.2}
RUN_MS = 20_000.0


def run(faults: Faults, runs: int, **how: bool) -> Counter[str]:
    """The counts of all schedules together."""
    counts: Counter[str] = Counter()
    for seed in seeds(runs):
        world = ListenerWorld(seed, faults, **how)
        with replayable(seed, lambda world=world: world.trace):
            world.run(RUN_MS)
        counts += world.counts
    return counts


def test_planned_replacements_lose_and_refuse_nothing():
    counts = run(PLANNED, 20)
    assert counts["replaced"] > 50
    assert (counts["lost"], counts["refused"]) == (0, 0)


def test_deaths_lose_what_is_in_the_dead_one_and_refuse_nothing():
    counts = run(DEATHS, 20) + run(RACES, 50)
    assert counts["lost"] > 20
    assert counts["refused"] == 0


@pytest.mark.parametrize(("faults", "has_watchdog"), [(WILD, True), (WILD, False), (HANGS, False)])
def test_stopped_gateways_and_cut_connections_refuse_nothing(faults, has_watchdog):
    assert run(faults, 20, has_watchdog=has_watchdog)["accepted"] > 1000


def test_a_lock_server_that_restarts_gets_its_socket_back():
    assert run(SERVERS, 20)["accepted"] > 1000


def test_without_a_gateway_clients_are_refused_and_the_next_one_is_lent_the_address():
    """Goal: no client waits for nobody. Method: none for longer than the hold, then one."""
    world = ListenerWorld(1, {})
    world.restart_ms = None
    world.run(HOLD_MS + 2000)
    assert world.counts["refused"] > 0
    world.start()
    world.run(2000)
    refused = world.counts["refused"]
    world.run(2000)
    assert world.counts["refused"] == refused
    assert world.counts["accepted"] > 0


# ---------------------------------------------------------------------- planted

REAL_NEWEST, REAL_SETTLE = listener._newest, Listener.settle
Seen = Sequence[Acceptor]


def never_orders(name: str, nothing: object) -> tuple[object, str, object]:
    """The arbiter's order `name` is never given."""

    def settle(self: Listener, seen: Seen, now_ms: float) -> ListenerOrders:
        orders = REAL_SETTLE(self, seen, now_ms)
        setattr(orders, name, nothing)
        return orders

    return Listener, "settle", settle


def yielded_first(seen: Seen, *stages: Stage) -> Acceptor | None:
    """A gateway that finishes its requests gets it before its successor."""
    return REAL_NEWEST(seen, Stage.YIELDS) or REAL_NEWEST(seen, *stages)


def never_yielded(seen: Seen, *stages: Stage) -> Acceptor | None:
    """One that has yielded does not get it back."""
    return None if Stage.YIELDS in stages else REAL_NEWEST(seen, *stages)


def closes_early(self: Listener, seen: Seen, now_ms: float) -> ListenerOrders:
    self._hold_ms = 100.0
    return REAL_SETTLE(self, seen, now_ms)


only_lent = property(lambda self: self.is_lent)  # who hands the socket back is not believed
# By rule: what takes the place of what, and the test or the schedules that catch it.
PLANTED = {
    "yield-first": ((listener, "YIELD_MS", 0.0), test_planned_replacements_lose_and_refuse_nothing),
    "have-yield": (
        never_orders("have_yield", []),
        test_planned_replacements_lose_and_refuse_nothing,
    ),
    "one-that-hangs": (
        (listener, "YIELD_MS", 1e12),
        lambda: run(HANGS, 20, has_watchdog=False),
    ),
    "hold": ((Listener, "settle", closes_early), lambda: run(DEATHS, 20)),
    "close": (
        never_orders("close", False),
        test_without_a_gateway_clients_are_refused_and_the_next_one_is_lent_the_address,
    ),
    "given-back": ((listener, "_newest", never_yielded), lambda: run(RACES, 50)),
    "handed-back": ((Acceptor, "has_it", only_lent), lambda: run(SERVERS, 20)),
    "newest": (
        (listener, "_newest", yielded_first),
        test_planned_replacements_lose_and_refuse_nothing,
    ),
}


@pytest.mark.parametrize("rule", PLANTED)
def test_every_planted_rule_is_caught(rule: str, monkeypatch: pytest.MonkeyPatch):
    planted, caught_by = PLANTED[rule]
    monkeypatch.setattr(*planted)
    with pytest.raises(AssertionError):
        caught_by()
