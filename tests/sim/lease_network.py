"""The network between nodes and server: it delays messages, but loses none of a living
connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.lease_parts import Line, Queue

if TYPE_CHECKING:
    from tests.sim.lease_node import Node
    from tests.sim.lease_world import LeaseWorld

DELAYS_MS = (0, 1, 1, 2, 5, 30, 30, 200, 800, 3000)


class Network:
    def __init__(self, world: LeaseWorld) -> None:
        self.world = world
        self.lines: dict[int, Line] = {}

    def connect(self, node: Node) -> Line:
        line = Line(self.world.next_id(), node)
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
