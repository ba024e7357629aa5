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
from plumbing.service.clock import Timer
from plumbing.wire.connection import Connection, KeptConnection
from plumbing.wire.messages import Catalogue, Message
from pool.core.events import ModelDemand
from pool.messages import CATALOGUE, DemandMsg, DoorsMsg


class KeptLink(KeptConnection):
    """One that runs as a task. `look_soon` calls `look` once, for all that happens until then."""

    def __init__(self, path: str, catalogue: Catalogue) -> None:
        """Connect later, in `start` or `run`."""
        super().__init__(path, catalogue)
        self.problem = "not connected yet"
        self._looks = Timer(lambda: self.look())
        self.look_soon, self.forget_look = self._looks.soon, self._looks.cancel

    def look(self) -> None:
        """Ask how things are, if it is connected."""

    def start(self) -> asyncio.Task[None]:
        """Stay connected until the task is cancelled."""
        return asyncio.get_running_loop().create_task(self.run())


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
