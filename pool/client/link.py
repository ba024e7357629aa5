"""A gateway's connection to the pool: its demand goes there, the doors of all models come back.

The surprising things: the demand is the first message on every connection, and is asked for when it
is sent, so that any number of changes at once cost one message, and none that leaves everything as
the pool knows it; and a lost connection changes nothing, since the last doors count until newer
ones come.

A full queue takes a millisecond to send, and the pool half of one to judge, so on average one
message goes out each 5 ms. A message that follows from an event goes out at once: a request comes,
its model's victim gets another door, the gateway obeys that door, the last answer ends. Spaced
evenly, these would make a switch wait for 5 ms.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping

from plumbing.pod.paths import pool_socket
from plumbing.wire.connection import Connection, Handler, connect, keep_connected
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Catalogue, FaultMsg, Message
from pool.core.events import ModelDemand
from pool.messages import CATALOGUE, DemandMsg, DoorsMsg


class KeptLink(Handler):
    """A connection that is made again whenever it ends: `begin` is called on each, `hear` with each
    message, `refused` with each error, and `lose` after it. `problem`: why its server cannot be
    heard. `look_soon` calls `look` once, for all that happens until then."""

    def __init__(self, path: str, catalogue: Catalogue) -> None:
        """Connect later, in `start` or `run`."""
        self.problem: str | None = "not connected yet"
        self.conn: Connection | None = None
        self.path, self._catalogue = path, catalogue
        self._ended = asyncio.Event()
        self._due: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    @property
    def is_connected(self) -> bool:
        return self.conn is not None

    def begin(self, conn: Connection) -> None:
        """It is connected."""

    def hear(self, message: Message, request_id: int) -> None:
        """A message of its server."""

    def refused(self, error: FaultMsg, request_id: int) -> None:
        """An error of its server; `problem` has its sentence."""

    def lose(self, reason: str) -> None:
        """It is connected no more."""

    def look(self) -> None:
        """Ask how things are, if it is connected."""

    def look_soon(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time() + delay_s
        if self._due is None or at_s < self._due_s:
            self.forget_look()
            self._due, self._due_s = loop.call_at(at_s, self._look_now), at_s

    def _look_now(self) -> None:
        self.forget_look()
        self.look()

    def forget_look(self) -> None:
        """What was to be looked at has been, or is no more."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def start(self) -> asyncio.Task[None]:
        """Stay connected until the task is cancelled."""
        return asyncio.get_running_loop().create_task(self.run())

    async def run(self) -> None:
        """Stay connected until cancelled."""
        try:
            await keep_connected(self._connect, self._ended, self._failed)
        finally:
            self.forget_look()
            conn, self.conn = self.conn, None
            if conn is not None:
                conn.close("its program is ending")

    def drop(self, reason: str) -> None:
        """End this connection, for another one."""
        if self.conn is not None:
            self.conn.close(reason)
            self._forget(self.conn, reason)

    async def _connect(self) -> None:
        await connect(self.path, self._catalogue, self)

    def _failed(self, why: str) -> None:
        self.problem = why

    def _forget(self, conn: Connection | None, reason: str) -> None:
        if conn is not None and conn is self.conn:
            self.conn, self.problem = None, f"the connection ended: {reason}"
            self.lose(reason)

    def opened(self, conn: Connection) -> None:
        self.conn = conn
        self.begin(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        if conn is not self.conn:
            return
        if isinstance(message, FaultMsg):
            self.problem = message.message
            self.refused(message, request_id)
        else:
            self.hear(message, request_id)

    def closed(self, conn: Connection, reason: str) -> None:
        self._forget(conn, reason)
        self._ended.set()


DEMAND_S = 0.005  # between two messages, on average
AHEAD = 4  # messages that may be sent before their time


class PoolLink(KeptLink):
    """Keeps one gateway's connection to the pool of `directory`. `refused` is called where the pool
    refuses this gateway, or what it said: retried with back-off."""

    def __init__(self, directory: str, demand: Callable[[], Mapping[str, ModelDemand]]) -> None:
        """Connect later, in `run`. `demand`: what this gateway has, by model; called whenever it is
        sent."""
        super().__init__(pool_socket(directory), CATALOGUE)
        self.gateway = secrets.token_hex(8)  # this process
        self._demand = demand
        self._sent: dict[str, ModelDemand] | None = None  # on this connection, last
        self._even_s = 0.0  # when the next message is due if all are evenly spaced

    def doors_came(self, doors: DoorsMsg) -> None:
        """All models. The same may come again."""

    def changed(self) -> None:
        """The demand may be another one: send it if so, with what changes in the next moment."""
        if self.conn is not None:
            now_s = asyncio.get_running_loop().time()
            self.look_soon(max(0.0, self._even_s - AHEAD * DEMAND_S - now_s))

    def begin(self, conn: Connection) -> None:
        self.look()

    def lose(self, reason: str) -> None:
        self._sent = None
        self.forget_look()

    def look(self) -> None:
        demand = dict(self._demand())
        if self.conn is not None and demand != self._sent:
            self._sent = demand
            self._even_s = max(asyncio.get_running_loop().time(), self._even_s) + DEMAND_S
            self.conn.send(DemandMsg(self.gateway, demand))

    def hear(self, message: Message, request_id: int) -> None:
        if isinstance(message, DoorsMsg):
            self.problem = None
            self.doors_came(message)

    def closed(self, conn: Connection, reason: str) -> None:
        refusal = self.problem
        super().closed(conn, reason)
        self.problem = refusal or self.problem
