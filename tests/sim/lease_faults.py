"""The faults of the nodes and the server. Each lasting fault ends by itself, except `gone`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.lease_node import Node
from tests.sim.lease_parts import LASTS_MS, NEVER

if TYPE_CHECKING:
    from tests.sim.lease_world import LeaseWorld

FAULTS = (
    *("tree", "sup", "stop", "stop", "part", "part", "gone", "cut"),
    *("server", "server", "lose", "stall", "disk", "race", "race"),
)


class Faults:
    def __init__(self, world: LeaseWorld) -> None:
        self.world = world

    def strike(self) -> None:
        world = self.world
        kind, lasts_ms = world.random.choice(FAULTS), world.random.choice(LASTS_MS)
        until_ms = world.true_ms + lasts_ms
        whom = ""
        if not self.befall_server(kind, until_ms) and world.nodes:
            node = world.random.choice(world.nodes)
            self.befall_node(kind, node, until_ms)
            whom = f" {node.engine}.{node.member}"
        world.note(f"{kind}{whom} for {lasts_ms}")

    def befall_server(self, kind: str, until_ms: float) -> bool:
        """Whether this is a fault of the server, and it could be injected."""
        server = self.world.server
        if kind == "server" and server.machine is not None:
            server.kill()
        elif kind == "lose":
            server.kill()
            server.slots[self.world.random.randrange(2)] = None
        elif kind == "stall":
            server.stalls_until_ms = until_ms
        elif kind == "disk":
            server.disk_fails_until_ms = until_ms
        else:
            return False
        return True

    def befall_node(self, kind: str, node: Node, until_ms: float) -> None:
        if kind == "tree" and node.tree is not None and not node.tree.is_dead:
            self.world.doom(node.tree)
        elif kind == "sup" and node.is_alive:
            node.die()
        elif kind == "stop":
            node.stopped_until_ms = max(until_ms, node.stopped_until_ms)
        elif kind == "part":
            node.cut_off_until_ms = max(until_ms, node.cut_off_until_ms)
        elif kind == "gone" and node.is_alive and not node.is_lost_for_good:
            node.cut_off_until_ms, node.is_lost_for_good = NEVER, True
        elif kind == "cut" and node.line is not None:
            node.hang_up()
        elif kind == "race":
            self.race(node, until_ms)

    def race(self, node: Node, until_ms: float) -> None:
        """The holder dies at the moment when a waiter's network fails."""
        for other in self.world.nodes:
            if other.holds and other.tree is not None and other.engine != node.engine:
                self.world.doom(other.tree)
                node.cut_off_until_ms = max(until_ms, node.cut_off_until_ms)
