"""Engines over several nodes around the pure lock machine, its members and its leases.

The world has clocks that run at different rates, a network that delays, withholds and cuts, kernels
that kill on time, and a server that dies, stalls and loses its disk; a seeded generator chooses.
Time is exact where safety depends on it: a kernel's timer and the end of a process tree happen at
their own moment, whatever else is late. The machine, the members, the leases and each node's keeper
of its lease are real.
After every step the law checks the result.

    lease_parts   records           lease_node    a supervisor        lease_server  the server
    lease_network connections       lease_faults  the faults          lease_law     what must hold
"""

from __future__ import annotations

import random
from collections.abc import Callable
from operator import itemgetter

from lockserver.client.lease import KILL_FRACTION, LeaseKeeper
from lockserver.members.leases import Leases
from tests.sim.lease_faults import Faults
from tests.sim.lease_law import Law
from tests.sim.lease_network import Network
from tests.sim.lease_node import Node
from tests.sim.lease_parts import LASTS_MS, LEASE_MS, NEVER, Tree
from tests.sim.lease_server import Server

# A fifth of the shortest lease in any test plus the margin, minus the difference of two clocks.
EXIT_MS_MAX = 1300
EXITS_MS = (0, 5, 50, 400, EXIT_MS_MAX)
STEPS_MS = (0, 1, 5, 20, 100, 250, 400)


class LeaseWorld:
    leases_ms = (LEASE_MS,)  # one is chosen at each start of the server
    # The rules. A subclass that changes them plants a bug.
    kill_fraction = KILL_FRACTION  # of a lease: when the kernel kills a supervisor
    margin_ms = 1000  # how long the server waits beyond a lease
    keeper_type: type[LeaseKeeper] = LeaseKeeper
    leases_type: type[Leases] = Leases

    def __init__(self, seed: int, *, engines: int = 2, members: int = 2) -> None:
        self.random = random.Random(seed)
        self.members = members  # members per engine
        self.true_ms = 0.0
        self.ids = 0
        self.trace: list[str] = []
        self.trees: list[Tree] = []
        self.woken = 0  # how many times a tree was told to serve
        self.law = Law(self)
        self.network = Network(self)
        self.faults = Faults(self)
        self.server = Server(self)
        self.server.start()
        self.places = [(f"engine-{e}", m) for e in range(engines) for m in range(members)]
        self.vacant: dict[tuple[str, int], float] = {}  # places without a supervisor: until when
        self.nodes = [Node(self, *place) for place in self.places]

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
        self.law.check()
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
        here = {node.place for node in self.nodes if node.is_alive and not node.is_lost_for_good}
        for place in self.places:
            if place in here:
                self.vacant.pop(place, None)
            elif place not in self.vacant:
                self.vacant[place] = self.true_ms + self.random.choice(LASTS_MS)
            elif self.true_ms >= self.vacant[place]:
                self.nodes.append(Node(self, *place))

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
        """Whether every member of the holding engine lives and was told that it holds."""
        machine = self.server.machine
        holder = machine.locks["active"].holder if machine is not None else None
        if holder is None or holder.lease is None:
            return False
        live = {
            n.tree.incarnation
            for n in self.nodes
            if n.is_alive and n.tree and n.tree.token == holder.token and n.tree.dies_ms == NEVER
        }
        return live == {who.incarnation for who in holder.lease.members}
