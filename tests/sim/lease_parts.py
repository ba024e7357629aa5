"""The parts of a world of nodes: process trees, connections, and the constants that all share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.lease_node import Node

NEVER = float("inf")
LEASE_MS = 5000
DRIFT = 0.01  # how far a clock's rate may differ from true time
LASTS_MS = (50, 400, 2000, 3500, 6000, 12_000)  # how long a fault may last before it ends by itself

Queue = deque[tuple[float, Any]]  # messages, each with its time of arrival


@dataclass(slots=True, eq=False)
class Tree:
    """One member's backend. Times are true time."""

    incarnation: str
    token: int = 0  # the token it was told to serve under; 0: none yet
    dies_ms: float = NEVER
    is_dead: bool = False

    def die(self) -> None:
        self.is_dead = True


@dataclass(slots=True, eq=False)
class Line:
    """One TCP connection of a node to the server. Messages keep their order."""

    id: int
    node: Node
    up: Queue = field(default_factory=deque)
    down: Queue = field(default_factory=deque)
    client_open: bool = True
    server_open: bool = True
    is_known: bool = False  # the server has accepted it
    eof_up_ms: float = NEVER
    eof_down_ms: float = NEVER

    def has_for_server(self, true_ms: float) -> bool:
        """Whether a message or the end has arrived at the server, and it still listens."""
        if not self.server_open or self.node.is_cut_off:
            return False
        return self.eof_up_ms <= true_ms or (bool(self.up) and self.up[0][0] <= true_ms)
