"""What nodes and server share: process trees, and a network that delays messages, but loses none of
a living connection."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.lease.node import Node
    from tests.sim.lease.world import LeaseWorld

NEVER = float("inf")
LEASE_MS = 5000
DRIFT = 0.01  # how far a clock's rate may differ from true time
LASTS_MS = (50, 400, 2000, 3500, 6000, 12_000)  # how long a fault may last before it ends by itself
DELAYS_MS = (0, 1, 1, 2, 5, 30, 30, 200, 800, 3000)

Queue = deque[tuple[float, Any]]  # messages, each with its time of arrival


@dataclass(slots=True, eq=False)
class Tree:
    """One engine's backend. Times are true time."""

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
    eof_up_ms: float = NEVER
    eof_down_ms: float = NEVER

    def has_for_server(self, true_ms: float) -> bool:
        """Whether a message or the end has arrived at the server, and it still listens."""
        if not self.server_open or self.node.is_cut_off:
            return False
        return self.eof_up_ms <= true_ms or (bool(self.up) and self.up[0][0] <= true_ms)


class Network:
    def __init__(self, world: LeaseWorld) -> None:
        self.world = world
        self.lines: dict[int, Line] = {}

    def connect(self, node: Node) -> Line:
        line = Line(self.world.random.getrandbits(40), node)  # accepted in any order
        self.lines[line.id] = line
        return line

    def send_up(self, line: Line, message: Any) -> None:
        line.up.append((self.arrival(line.up), message))

    def send_down(self, conn: int, message: Any) -> None:
        line = self.lines.get(conn)
        if line is not None and line.server_open:
            line.down.append((self.arrival(line.down), message))

    def arrival(self, queue: Queue) -> float:
        delay_ms = self.world.random.choice(DELAYS_MS)
        return max(self.world.true_ms + delay_ms, queue[-1][0] if queue else 0.0)

    def close_by_client(self, line: Line) -> None:
        """Earlier messages still arrive, perhaps after messages of a newer line."""
        line.client_open = False
        line.eof_up_ms = self.arrival(line.up)
        line.down.clear()

    def close_by_server(self, line: Line) -> None:
        """Earlier messages still arrive: the kernel keeps trying."""
        line.server_open = False
        line.eof_down_ms = self.arrival(line.down)

    def forget_closed(self) -> None:
        self.lines = {k: v for k, v in self.lines.items() if v.client_open or v.server_open}
