"""Engines on several nodes around the pure lock machine and its leases.

The world has clocks that run at different rates, a network that delays, withholds and cuts, kernels
that kill on time, and a server that dies, stalls and loses its disk; a seeded generator chooses.
Time is exact where safety depends on it: a kernel's timer and the end of a process tree happen at
their own moment, whatever else is late. The machine, the leases and each node's keeper of its
lease are real.
After every step the promises are checked.

    network  trees and connections    node  a supervisor    server  the lock server
"""

from __future__ import annotations

import random
from collections.abc import Callable
from operator import itemgetter

from lockserver.client.lease import KILL_FRACTION, LeaseKeeper
from lockserver.core import events as ev
from lockserver.core.leases import Leases
from tests.sim.lease.network import LASTS_MS, LEASE_MS, NEVER, Network, Tree
from tests.sim.lease.node import Node
from tests.sim.lease.server import Server

# A fifth of the shortest lease in any test plus the margin, minus the difference of two clocks.
EXIT_MS_MAX = 1300
EXITS_MS = (0, 5, 50, 400, EXIT_MS_MAX)
STEPS_MS = (0, 1, 5, 20, 100, 250, 400)
FAULTS = (
    *("tree", "sup", "stop", "stop", "part", "part", "gone", "cut"),
    *("server", "server", "lose", "stall", "disk", "race", "race"),
)


class LeaseWorld:
    leases_ms = (LEASE_MS,)  # one is chosen at each start of the server
    # The rules. A subclass that changes them plants a bug.
    kill_fraction = KILL_FRACTION  # of a lease: when the kernel kills a supervisor
    margin_ms = 1000  # how long the server waits beyond a lease
    keeper_type: type[LeaseKeeper] = LeaseKeeper
    leases_type: type[Leases] = Leases

    def __init__(self, seed: int, *, engines: int = 3) -> None:
        self.random = random.Random(seed)
        self.true_ms = 0.0
        self.ids = 0
        self.trace: list[str] = []
        self.trees: list[Tree] = []
        self.woken = 0  # how many times a tree was told to serve
        self.promises = Promises(self)
        self.network = Network(self)
        self.faults = Faults(self)
        self.server = Server(self)
        self.server.start()
        self.engines = [f"engine-{number}" for number in range(engines)]
        self.vacant: dict[str, float] = {}  # engines without a supervisor: until when
        self.nodes = [Node(self, engine) for engine in self.engines]

    def next_id(self) -> int:
        self.ids += 1
        return self.ids

    def note(self, what: str) -> None:
        self.trace.append(f"{self.true_ms:.0f} {what}")

    # ------------------------------------------------------------------ process trees

    def new_tree(self, engine: str) -> Tree:
        tree = Tree(f"{engine}-{self.next_id():016x}")
        self.trees.append(tree)
        return tree

    def doom(self, tree: Tree) -> None:
        """SIGKILL is sent: it takes a while until no process is left."""
        tree.dies_ms = min(tree.dies_ms, self.true_ms + self.random.choice(EXITS_MS))

    def wake(self, tree: Tree, token: int) -> None:
        """It is told to serve."""
        tree.token = token
        self.woken += 1

    # ------------------------------------------------------------------ time

    def step(self, fault_rate: float) -> None:
        self.pass_time(self.random.choice(STEPS_MS))
        if self.random.random() < fault_rate:
            self.faults.strike()
        self.server.restart_if_due()
        self.replace_lost()
        turns = [self.server.step, *(node.step for node in self.nodes)]
        self.random.shuffle(turns)
        for take_turn in turns:
            take_turn()
        self.promises.check()
        self.sweep()

    def pass_time(self, ms: float) -> None:
        """Kernels act on time: each death of a tree and each timer has its own moment."""
        end_ms = self.true_ms + ms
        while True:
            due: list[tuple[float, Callable[[], None]]]
            due = [(t.dies_ms, t.die) for t in self.trees if not t.is_dead and t.dies_ms <= end_ms]
            due += [(n.killed_ms, n.be_killed) for n in self.nodes if n.killed_ms <= end_ms]
            if not due:
                break
            at_ms, happen = min(due, key=itemgetter(0))
            self.true_ms = max(self.true_ms, at_ms)
            happen()
        self.true_ms = end_ms

    def replace_lost(self) -> None:
        """A new supervisor starts while processes of the last one may still be dying."""
        here = {node.engine for node in self.nodes if node.is_alive and not node.is_lost_for_good}
        for engine in self.engines:
            if engine in here:
                self.vacant.pop(engine, None)
            elif engine not in self.vacant:
                self.vacant[engine] = self.true_ms + self.random.choice(LASTS_MS)
            elif self.true_ms >= self.vacant[engine]:
                self.nodes.append(Node(self, engine))

    def sweep(self) -> None:
        self.trees = [t for t in self.trees if not t.is_dead or t.dies_ms > self.true_ms - 1]
        self.nodes = [n for n in self.nodes if n.is_alive or (n.tree and not n.tree.is_dead)]
        self.network.forget_closed()

    # ------------------------------------------------------------------ the end of all faults

    def settle(self, minutes: float = 4.0) -> bool:
        """No more faults; permanent losses stay. Does an engine serve?"""
        end_ms = self.true_ms + minutes * 60_000
        while self.true_ms < end_ms:
            self.step(0.0)
            if self.is_served():
                return True
        return False

    def is_served(self) -> bool:
        """Whether the holder lives and was told that it holds."""
        machine = self.server.machine
        holder = machine.locks["active"].holder if machine is not None else None
        return holder is not None and any(
            n.is_alive and n.tree and n.tree.token == holder.token and n.tree.dies_ms == NEVER
            for n in self.nodes
        )


class Promises:
    """Only one grant is served at a time, over all nodes, and tokens are unique."""

    def __init__(self, world: LeaseWorld) -> None:
        self.world = world
        self.granted: dict[int, str] = {}  # token → incarnation
        self.token_max = 0

    def serving(self) -> list[Tree]:
        return [tree for tree in self.world.trees if tree.token and not tree.is_dead]

    def check(self) -> None:
        tokens = {tree.token: tree.incarnation for tree in self.serving()}
        assert len(tokens) <= 1, f"two grants are served: {tokens}"

    def written(self, record: ev.LockRecord) -> None:
        """A grant counts from when it is on disk: the previous holder must be dead by then."""
        holder = record.holders.get("active")
        if holder is None or holder.token <= self.token_max:
            return
        self.token_max = holder.token
        others = [tree.incarnation for tree in self.serving() if tree.token != holder.token]
        assert not others, f"granted to {holder.incarnation} while {others} live"
        known = self.granted.setdefault(holder.token, holder.incarnation)
        assert known == holder.incarnation, f"token {holder.token} was granted twice"


class Faults:
    """Each lasting fault ends by itself, except `gone`."""

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
            whom = f" {node.engine}"
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
