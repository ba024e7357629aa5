"""Engines on several nodes around the pure lock machine and its leases.

The world has clocks that run at different rates, a network that delays, withholds and cuts, kernels
that kill on time, and a server that dies, stalls and loses its disk; a seeded generator chooses.
Time is exact where safety depends on it: a kernel's timer and the end of a process tree happen at
their own moment, whatever else is late. The machine, the leases and each node's keeper of its
lease are real. After every step the promises are checked.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

from lockserver.client.lease import KILL_FRACTION, LeaseKeeper
from lockserver.core import events as ev
from lockserver.core import recovery
from lockserver.core.leases import Leases
from lockserver.core.machine import LockMachine
from lockserver.core.supervisors import LEASE
from lockserver.messages import GrantedMsg, RenewedMsg, WantMsg

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


BEAT_MS = 500.0
DEAF = 0.4  # of a lease: a connection is suspect
READY = 0.3  # the probability that a tree is initialised in a step
OVER = ("lock.stale_claim", "lock.incarnation_ended")  # refusals that end an incarnation


class Node:
    """Times are by its own clock, unless stated otherwise."""

    def __init__(self, world: LeaseWorld, engine: str) -> None:
        self.world, self.engine = world, engine
        self.rate = 1 + world.random.uniform(-DRIFT, DRIFT)
        self.supervisor = f"{world.next_id():016x}"
        self.is_alive = True
        self.stopped_until_ms = 0.0  # true time
        self.cut_off_until_ms = 0.0  # true time
        self.is_lost_for_good = False
        self.line: Line | None = None
        self.heard_ms = 0.0
        self.beat_at_ms = 0.0
        self.progress = 0
        self.tree: Tree | None = None
        self.is_ready = False  # initialised: it wants `active`
        self.is_killing = False
        self.keeper = LeaseKeeper(self.now)
        self.kill_at_ms = NEVER

    def now(self) -> float:
        return self.world.true_ms * self.rate

    @property
    def killed_ms(self) -> float:
        """When its kernel kills it, in true time."""
        return self.kill_at_ms / self.rate

    @property
    def is_cut_off(self) -> bool:
        return self.world.true_ms < self.cut_off_until_ms

    @property
    def holds(self) -> bool:
        return self.tree is not None and self.tree.token > 0

    def step(self) -> None:
        """Everything that is due by now."""
        if not self.is_alive or self.world.true_ms < self.stopped_until_ms:
            return
        self.listen()
        if self.keeper.must_stop() and not self.is_killing:
            self.kill_tree()
        self.keep_connected()
        self.keep_tree()

    # ------------------------------------------------------------------ its connection

    def keep_connected(self) -> None:
        now_ms, line = self.now(), self.line
        if line is None:
            self.connect()
        elif now_ms >= self.beat_at_ms:
            self.beat_at_ms = now_ms + BEAT_MS
            if now_ms - self.heard_ms > DEAF * LEASE_MS:
                self.hang_up()
            else:
                self.progress += 1
                self.say(line, ("beaten", line.id, self.progress))

    def connect(self) -> None:
        if self.world.server.machine is not None and not self.is_cut_off:
            self.line = self.world.network.connect(self)
            self.heard_ms = self.now()
            self.want()

    def hang_up(self) -> None:
        line, self.line = self.line, None
        assert line is not None
        self.world.network.close_by_client(line)
        self.keeper.cut()

    def say(self, line: Line, message: Any) -> None:
        if self.tree is not None:
            self.keeper.sent(self.progress)
        self.world.network.send_up(line, message)

    def want(self) -> None:
        line, tree = self.line, self.tree
        if line is None:
            return
        self.progress += 1
        is_ready = tree is not None and self.is_ready
        want = WantMsg(
            supervisor=self.supervisor,
            engine=self.engine,
            incarnation=tree.incarnation if tree else None,
            lock="active",
            is_wanted=is_ready,
            token=tree.token if tree and is_ready else 0,
            progress=self.progress,
        )
        self.say(line, ("wanted", ev.Wanted(line.id, want, process=LEASE)))

    # ------------------------------------------------------------------ receiving

    def listen(self) -> None:
        line = self.line
        if line is None or self.is_cut_off:
            return
        while line.down:
            if line.down[0][0] > self.world.true_ms:
                return
            self.heard_ms = self.now()
            self.told(line.down.popleft()[1])
        if line.eof_down_ms <= self.world.true_ms:
            self.hang_up()

    def told(self, message: Any) -> None:
        tree = self.tree
        if isinstance(message, RenewedMsg):
            if self.keeper.renewed(message.progress, message.lease_ms) and self.holds:
                self.arm()
        elif tree is None or self.is_killing:
            return
        elif isinstance(message, GrantedMsg) and message.lock == "active":
            if message.incarnation == tree.incarnation:
                self.woken(tree, message.token)
            elif tree.token and message.token > tree.token:
                self.kill_tree()
        elif isinstance(message, ev.RefuseConnection) and message.code in OVER:
            self.kill_tree()

    def woken(self, tree: Tree, token: int) -> None:
        if not self.keeper.may_act() or tree.is_dead or tree.dies_ms < NEVER:
            self.want()
        elif tree.token != token:
            self.keeper.hold()
            self.world.wake(tree, token)
            self.arm()
            self.want()

    def arm(self) -> None:
        assert self.keeper.lease_ms is not None
        self.kill_at_ms = self.keeper.at_ms(self.world.kill_fraction)

    # ------------------------------------------------------------------ its tree, and its own end

    def keep_tree(self) -> None:
        tree = self.tree
        if tree is None:
            self.is_ready = self.is_killing = False
            self.change_tree(self.world.new_tree(self.engine))
        elif tree.is_dead and self.is_killing:
            self.is_killing, self.kill_at_ms = False, NEVER
            self.change_tree(None)
        elif tree.is_dead:
            self.is_killing = True
        elif not self.is_ready and not self.is_killing and self.world.random.random() < READY:
            self.is_ready = True
            self.want()

    def change_tree(self, tree: Tree | None) -> None:
        self.tree = tree
        self.keeper.begin()
        self.want()

    def kill_tree(self) -> None:
        assert self.tree is not None
        self.is_killing = True
        self.world.doom(self.tree)

    def be_killed(self) -> None:
        """By its kernel, on time."""
        self.world.note(f"the kernel kills {self.engine}")
        self.die()

    def die(self) -> None:
        self.is_alive, self.kill_at_ms = False, NEVER
        if self.tree is not None:
            self.world.doom(self.tree)
        if self.line is not None:
            self.hang_up()


SILENT_MS = 3000.0
TICK_MS = 100.0
DIES_AFTER_WRITE = 0.02  # of all writes
LOCKS = frozenset({"active"})


class DiedError(Exception):
    """The server has died in the middle of an event."""


class Server:
    def __init__(self, world: LeaseWorld) -> None:
        self.world = world
        self.rate = 1 + world.random.uniform(-DRIFT, DRIFT)
        self.machine: LockMachine | None = None
        self.slots: list[ev.LockRecord | None] = [
            ev.LockRecord(),
            ev.LockRecord(),
        ]  # the newest is the last
        self.closed: list[int] = []  # closed by the server; the loop reports it later
        self.ticks_at_ms = 0.0  # by its own clock
        self.down_until_ms = 0.0  # true time, like the next ones
        self.stalls_until_ms = 0.0
        self.disk_fails_until_ms = 0.0

    def now(self) -> float:
        return self.world.true_ms * self.rate

    # ------------------------------------------------------------------ its life

    def start(self) -> None:
        record = self.slots[1]
        readable = [slot.token for slot in self.slots if slot is not None]
        if len(readable) < 2 or record is None:  # like the state file: one bad slot is a lost slot
            floor = max(readable, default=self.world.promises.token_max)
            record = ev.LockRecord(floor + 1, unknown=LOCKS)
            self.slots = [record, record]
        world, now_ms = self.world, self.now()
        lease_ms = world.random.choice(world.leases_ms)
        leases = Leases(now_ms, lease_ms=lease_ms, margin_ms=world.margin_ms, listens=True)
        self.machine = LockMachine(record, self.write, now_ms, silent_ms=SILENT_MS, leases=leases)
        self.perform(self.machine.begin())

    def kill(self) -> None:
        self.machine = None
        self.down_until_ms = self.world.true_ms + self.world.random.choice(LASTS_MS)
        self.closed.clear()
        for line in self.world.network.lines.values():
            if line.server_open:  # also what waited to be accepted: the next server is not asked
                self.world.network.close_by_server(line)
                line.up.clear()

    def restart_if_due(self) -> None:
        if self.machine is None and self.world.true_ms >= self.down_until_ms:
            self.start()

    # ------------------------------------------------------------------ the machine and its effects

    def feed(self, event: str, *said: Any) -> None:
        """`event`: an entry of the machine."""
        if self.machine is not None:
            try:
                self.perform(getattr(self.machine, event)(self.now(), *said))
            except DiedError:
                self.kill()

    def perform(self, effects: list[ev.LockEffect]) -> None:
        network = self.world.network
        for effect in effects:
            match effect:
                case _ if self.machine is None:
                    return
                case ev.Send():
                    network.send_down(effect.conn, effect.message)
                case ev.Announce():
                    for each in self.machine.supervisors.values():
                        if each.conn is not None and each.id != effect.supervisor:
                            network.send_down(each.conn, effect.message)
                case ev.RefuseConnection() | ev.Close():
                    network.send_down(effect.conn, effect)
                    line = network.lines.get(effect.conn)
                    if line is not None and line.server_open:
                        network.close_by_server(line)
                        self.closed.append(effect.conn)

    def write(self, record: ev.LockRecord) -> str | None:
        if self.world.true_ms < self.disk_fails_until_ms:
            return "a full disk"
        self.slots = [self.slots[1], record]
        self.world.promises.written(record)
        if self.world.random.random() < DIES_AFTER_WRITE:
            self.world.trace.append("server dies between writing and sending")
            raise DiedError
        return None

    # ------------------------------------------------------------------ its loop

    def step(self) -> None:
        """Everything that is due by now, in some order."""
        true_ms = self.world.true_ms
        if self.machine is None or true_ms < self.stalls_until_ms:
            return
        jobs: list[Callable[[], None]] = []
        if self.now() >= self.ticks_at_ms:
            jobs.append(self.tick)
        lines = self.world.network.lines.values()
        jobs += [partial(self.read, line) for line in lines if line.has_for_server(true_ms)]
        jobs += [partial(self.feed, "connection_closed", conn) for conn in self.closed]
        self.closed.clear()
        self.world.random.shuffle(jobs)
        for job in [*jobs, self.probe]:
            if self.machine is not None:
                job()

    def tick(self) -> None:
        self.ticks_at_ms = self.now() + TICK_MS
        self.feed("time_passed")

    def read(self, line: Line) -> None:
        while self.machine is not None and line.server_open and line.up:
            arrives_ms, message = line.up[0]
            if arrives_ms > self.world.true_ms:
                return
            line.up.popleft()
            self.feed(*message)
        if line.server_open and not line.up and line.eof_up_ms <= self.world.true_ms:
            line.server_open = False
            self.feed("connection_closed", line.id)

    def probe(self) -> None:
        assert self.machine is not None
        is_due = recovery.scan_is_due(self.machine.locks)
        if is_due and not self.machine.leases.may_have_strangers:
            self.feed("directory_scanned", frozenset())


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
    # Rules: one that is changed plants a bug.
    kill_fraction = KILL_FRACTION  # of a lease: when the kernel kills a supervisor
    margin_ms = 1000  # how long the server waits beyond a lease

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
