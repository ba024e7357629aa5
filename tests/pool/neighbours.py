"""Stand-ins for the pool's neighbours, on the real sockets: engines, memory, gateway.

They run on the loop of a test and do at once what the pool says; the pool is a process of its own.
Engines hold real witnesses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from gms.client import messages as weights_messages
from lockserver import witness
from plumbing.pod.messages import (
    GOAL_CATALOGUE,
    EngineReportMsg,
    SetGoalMsg,
    StatusMsg,
    StatusReplyMsg,
    Tier,
    WatchMsg,
)
from plumbing.pod.paths import engine_socket, gms_socket
from plumbing.wire.connection import Handler
from plumbing.wire.server import Server
from pool.client.link import PoolLink
from pool.core.events import ModelDemand, OpenDoor, Ticket
from tests.helpers import auntil, free_port

MIB = 1 << 20
DEVICE = "HOST-0"
USER = {"engine": "an engine", "mode": "ro"}


class Memory:
    """One kind of memory of a place; `held` bytes."""

    def __init__(self, place):
        self.place, self.held, self.drops, self.is_mapped = place, 0, 0, False
        self.state, self.sessions, self.used_bytes = "committed", None, None

    def set(self, held, *, is_mapped):
        self.held, self.is_mapped = held, is_mapped
        for conn in self.place.conns:
            conn.send(weights_messages.EventMsg({}))

    def drop(self):
        self.drops += 1
        self.state = "empty"
        self.set(0, is_mapped=False)


class StandInPlace(Handler):
    """One memory server: of a model, or of a copy of its weights."""

    def __init__(self, directory, place, capacity_bytes):
        self.weights, self.kv, self.capacity_bytes = Memory(self), Memory(self), capacity_bytes
        self.conns = set()
        catalogue = weights_messages.CATALOGUE
        self.server = Server(gms_socket(directory, place), catalogue, self, service="gms")

    def document(self):
        kv, weights = self.kv, self.weights
        names = ("staging_bytes", "superseded_bytes", "releasing_bytes")
        state = "empty" if not kv.held else "lent" if kv.is_mapped else "idle"
        return {
            "kv": {"state": state, "pool_bytes": kv.held},
            "state": weights.state,
            "committed_bytes": weights.held,
            **dict.fromkeys(names, 0),
            "sessions": weights.sessions or ([USER] if weights.is_mapped else []),
            "capacity_bytes": self.capacity_bytes,
            "device_used_bytes": weights.used_bytes,
        }

    def received(self, conn, message, request_id, fds):
        match message:
            case WatchMsg() | StatusMsg():
                self.conns.add(conn)
                conn.send(StatusReplyMsg(self.document()), request_id)
            case weights_messages.DropMsg(is_kv=is_kv):
                (self.kv if is_kv else self.weights).drop()
                conn.send(weights_messages.DroppedMsg("e"), request_id)

    def closed(self, conn, reason):
        self.conns.discard(conn)


class StandInEngine(Handler):
    """One engine's supervisor."""

    def __init__(self, world, name, model):
        self.world, self.name, self.model = world, name, model
        self.conns = set()
        self.generation, self.goal = None, Tier.COLD
        self.incarnation, self.token, self.state, self.tier = "", 0, "dead", Tier.COLD
        self.witness_fd = None
        path = engine_socket(world.directory, name)
        self.server = Server(path, GOAL_CATALOGUE, self, service="engine")

    def am(self):
        sizes = {DEVICE: MIB} if self.incarnation else {}
        return EngineReportMsg(
            engine=self.name,
            incarnation=self.incarnation,
            token=self.token,
            state=self.state,
            tier=self.tier,
            goal=self.goal,
            goal_by="pool",
            since_ms=0,
            in_flight=0,
            can_rest=True,
            model=self.model,
            generation=self.generation,
            base_bytes=sizes,
            weights_bytes=dict.fromkeys(sizes, 10 * MIB),
            kv_bytes=dict.fromkeys(sizes, 20 * MIB),
            can_resume=True,
        )

    def received(self, conn, message, request_id, fds):
        assert isinstance(message, SetGoalMsg)
        wanted = message.pool
        seen = self.generation
        if message.goal is not None and (
            seen is None or seen.era != wanted.generation.era or seen.is_older(wanted.generation)
        ):
            self.generation, self.goal = wanted.generation, message.goal
            self._obey()
        conn.send(self.am(), request_id)
        self.conns.add(conn)

    def closed(self, conn, reason):
        self.conns.discard(conn)

    def _obey(self):
        place = self.world.memory[self.model]
        kv, weights = place.kv, place.weights
        if self.goal is Tier.COLD:
            self.die()
            kv.set(kv.held, is_mapped=False)
            weights.set(weights.held, is_mapped=False)
            return
        if not self.incarnation:
            self._launch()
            weights.set(10 * MIB, is_mapped=True)
        if not self.token:
            self.world.tokens += 1
            self.token = self.world.tokens
        is_awake = self.goal is Tier.AWAKE
        self.state, self.tier = ("active", Tier.AWAKE) if is_awake else ("resting", Tier.WARM)
        kv.set(20 * MIB if is_awake else 0, is_mapped=is_awake)

    def _launch(self):
        self.incarnation = witness.new_incarnation(self.name)
        _, self.witness_fd = witness.create(self.world.directory, self.incarnation)

    def die(self):
        """Its processes end; the supervisor says so."""
        if self.witness_fd is not None:
            os.close(self.witness_fd)
        self.witness_fd, self.incarnation, self.token = None, "", 0
        self.state, self.tier = "dead", Tier.COLD


class PoolProcess:
    """`pool serve`; `start` after its end is a restart."""

    def __init__(self, directory, file):
        self.directory, self.file = directory, file
        self.http_port = free_port()
        self.log_path = os.path.join(directory, "pool.txt")
        self.process = None

    def start(self):
        words = [sys.executable, "-m", "pool.cli", "serve", "--dir", self.directory]
        words += ["--file", self.file, "--http-port", str(self.http_port)]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                words,
                stderr=log,
                stdout=log,
                env={**os.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
            )
        return self.process

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def linked(directory, demand, on_doors=lambda doors: None, on_lost=lambda reason: None):
    """A gateway's link that calls these."""

    class Link(PoolLink):
        def doors_came(self, doors):
            on_doors(doors)

        def lose(self, reason):
            super().lose(reason)
            on_lost(reason)

    return Link(directory, demand)


class World:
    """All neighbours of a pool with the models of `models`, on one device."""

    def __init__(self, directory, models, capacity_bytes):
        self.directory = directory
        self.tokens = 0  # granted so far
        self.memory = {
            model: StandInPlace(directory, f"{DEVICE}.{model}", capacity_bytes) for model in models
        }
        self.engines = {model: StandInEngine(self, f"{model}-0", model) for model in models}
        self.demand, self.doors = {}, {}
        self.link = linked(directory, lambda: self.demand, self._doors, self._lost)
        self._running = None

    async def __aenter__(self):
        for each in (*self.memory.values(), *self.engines.values()):
            await each.server.start()
        self._running = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *_):
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        for each in (*self.memory.values(), *self.engines.values()):
            await each.server.close()
        for engine in self.engines.values():
            engine.die()

    def _doors(self, message):
        """Obey at once: nothing is ever in flight here."""
        self.doors = message.models
        for name, model in message.models.items():
            has = self.demand.get(name, ModelDemand())
            is_open = isinstance(model.door, OpenDoor)
            tickets = () if is_open else has.tickets
            self.demand[name] = ModelDemand(
                tickets, last_request_ms=has.last_request_ms, door=model.number
            )
        self.link.changed()

    def _lost(self, _reason):
        self.doors = {}

    async def loses_the_pool(self):
        """Wait until the last word of a pool that was killed has been read."""
        await auntil(lambda: not self.doors, "the gateway to lose the pool")

    def ask(self, model, now_ms):
        """A request comes."""
        has = self.demand.get(model, ModelDemand())
        tickets = (*has.tickets, Ticket(len(has.tickets) + 1, now_ms))
        self.demand[model] = ModelDemand(tickets, last_request_ms=now_ms, door=has.door)
        self.link.changed()

    async def until_open(self, model):
        await auntil(lambda: self.is_open(model), f"the door of {model} to open")

    def is_open(self, model):
        found = self.doors.get(model)
        return found is not None and isinstance(found.door, OpenDoor)


@contextlib.contextmanager
def pool_process(directory, file) -> Iterator[PoolProcess]:
    pool = PoolProcess(directory, file)
    pool.start()
    try:
        yield pool
    finally:
        if pool.process.poll() is None:
            pool.kill()
