"""Engines over several nodes around the pure lock machine, its members and its leases.

The world is clocks that run at different rates, a network that delays, holds back and cuts, kernels
that kill on time, and a server that dies, stalls and loses its disk; a seeded generator chooses.
Time is exact where safety hangs on it: a kernel's timer and the end of a process tree happen at
their own moment, whatever else is late. Only the machine, the members and the leases are real.

Checked after every step: all live process trees that were told to serve belong to one grant.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lockserver.core import events as ev
from lockserver.core import evidence
from lockserver.core import member_events as me
from lockserver.core.leases import Leases
from lockserver.core.machine import Machine
from lockserver.core.members import Members, is_virtual
from lockserver.witness import name_of

LEASE_MS, MARGIN_MS, SILENT_MS = 5000, 1000, 3000.0
BEAT_MS, TICK_MS = 500.0, 100.0
STOP, KILL, DEAF = 0.6, 0.8, 0.4  # of a lease: give up; the kernel's; a connection is suspect
DRIFT = 0.01
EXIT_MS_MAX = 1800  # a fifth of a lease and the margin, less what two clocks may differ by
NEVER = float("inf")
FAULTS = (
    *("tree", "sup", "stop", "stop", "part", "part", "gone", "cut"),
    *("server", "server", "lose", "stall", "disk", "race", "race"),
)
LASTS_MS = (50, 400, 2000, 3500, 6000, 12_000)  # how long a fault may last before it mends itself
OVER = ("lock.stale_claim", "lock.incarnation_ended")


@dataclass
class Tree:
    """One member's backend."""

    incarnation: str
    token: int = 0  # what it was told to serve under; 0: nothing yet
    dies_ms: float = NEVER  # true time
    is_dead: bool = False


@dataclass
class Line:
    """One TCP connection. Messages keep their order; each has the time it arrives at."""

    id: int
    node: Node
    up: deque[tuple[float, Any]] = field(default_factory=deque)
    down: deque[tuple[float, Any]] = field(default_factory=deque)
    client_open: bool = True
    server_open: bool = True
    is_known: bool = False  # the server has accepted it
    eof_up_ms: float = NEVER
    eof_down_ms: float = NEVER


@dataclass
class Node:
    """One member's supervisor, on a host with its own clock."""

    engine: str
    member: int
    supervisor: str
    rate: float
    is_alive: bool = True
    stopped_until_ms: float = 0.0  # true time
    cut_off_until_ms: float = 0.0
    is_lost_for_good: bool = False
    line: Line | None = None
    tree: Tree | None = None
    is_killing: bool = False
    is_ready: bool = False  # initialised: it wants `active`
    progress: int = 0
    sent: dict[int, float] = field(default_factory=dict)  # progress → its own clock
    lease: tuple[float, float] | None = None  # counted from, length; by its own clock
    kill_at_ms: float = NEVER  # by its own clock
    beat_at_ms: float = 0.0
    heard_ms: float = 0.0

    def now(self, true_ms: float) -> float:
        return true_ms * self.rate

    def true(self, own_ms: float) -> float:
        return own_ms / self.rate

    def is_cut_off(self, true_ms: float) -> bool:
        return true_ms < self.cut_off_until_ms

    @property
    def holds(self) -> bool:
        return self.tree is not None and self.tree.token > 0

    def lease_used(self, true_ms: float) -> float:
        """How much of the lease is used up, as a fraction; infinite without one."""
        if self.lease is None:
            return NEVER
        return (self.now(true_ms) - self.lease[0]) / self.lease[1]


class LeaseWorld:
    kill_fraction = KILL
    margin_ms = MARGIN_MS
    counts_from_receipt = False
    forgets_at_restart = False
    leases_type: type[Leases] = Leases

    def __init__(self, seed: int, *, engines: int = 2, members: int = 2) -> None:
        self.random = random.Random(seed)
        self.members_count = members
        self.true_ms = 0.0
        self.server_rate = 1 + self.random.uniform(-DRIFT, DRIFT)
        self.server_stalls_until_ms = 0.0
        self.server_ticks_at_ms = 0.0
        self.slots: list[ev.Record | None] = [ev.Record(), ev.Record()]
        self.disk_fails_until_ms = 0.0
        self.server_down_until_ms = 0.0
        self.vacant: dict[tuple[str, int], float] = {}  # places without a supervisor: until when
        self.machine: Machine | None = None
        self.closed: list[int] = []
        self.lines: dict[int, Line] = {}
        self.nodes: list[Node] = []
        self.trees: list[Tree] = []
        self.woken = 0
        self.granted: dict[int, str] = {}
        self.token_max = 0
        self.trace: list[str] = []
        self._ids = iter(range(1, 10_000_000))
        self.places = [(f"engine-{e}", m) for e in range(engines) for m in range(members)]
        self.start_server()
        for place in self.places:
            self.new_node(*place)

    def new_node(self, engine: str, member: int) -> None:
        rate = 1 + self.random.uniform(-DRIFT, DRIFT)
        self.nodes.append(Node(engine, member, f"{next(self._ids):016x}", rate))

    # ------------------------------------------------------------------ the server's shell

    def server_now(self) -> float:
        return self.true_ms * self.server_rate

    def start_server(self) -> None:
        record = self.slots[1]
        readable = [slot.token for slot in self.slots if slot is not None]
        if len(readable) < 2 or record is None:
            floor = max(readable, default=self.token_max)
            record = ev.Record(floor + 1, unknown=frozenset({"active", "loader"}))
            self.slots = [record, record]
        now_ms = self.server_now()
        self.machine = Machine(record, now_ms, silent_ms=SILENT_MS)
        self.leases = self.leases_type(now_ms, lease_ms=LEASE_MS, margin_ms=self.margin_ms)
        if self.forgets_at_restart:
            self.leases.presume = lambda *_: None  # type: ignore[method-assign]
        self.members = Members(self.leases, self.machine.locks, now_ms, silent_ms=SILENT_MS)
        self.perform(self.machine.begin())

    def kill_server(self) -> None:
        self.machine = None
        self.server_down_until_ms = self.true_ms + self.random.choice(LASTS_MS)
        self.closed.clear()
        for line in self.lines.values():
            if line.server_open and line.is_known:
                self.server_closes(line)

    def feed(self, event: ev.Input) -> None:
        if self.machine is not None:
            self.perform(self.machine.handle(event, self.server_now()))

    def perform(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.Persist):
                self.persist(effect.record)
            elif isinstance(effect, ev.Announce):
                holder = effect.holder
                for conn in self.members.audience(holder.engine):
                    who = (holder.engine, holder.incarnation, holder.token)
                    self.send(conn, me.SendGranted(conn, effect.lock, *who))
            elif is_virtual(getattr(effect, "conn", 0)):
                self.do(self.members.fan_out(effect))

    def persist(self, record: ev.Record) -> None:
        if self.true_ms < self.disk_fails_until_ms:
            self.feed(ev.PersistFailed("a full disk"))
            return
        self.slots = [self.slots[1], record]
        self.check_grant(record)
        if self.random.random() < 0.02:
            self.trace.append("server dies between writing and sending")
            self.kill_server()
        else:
            self.feed(ev.Persisted())

    def hear(self, event: me.MemberInput) -> None:
        if self.machine is not None:
            self.do(self.members.handle(event, self.server_now()))

    def do(self, outputs: list[me.MemberOutput]) -> None:
        for output in outputs:
            if self.machine is None:
                return
            if isinstance(output, me.Feed):
                self.feed(output.event)
            elif isinstance(output, ev.Refuse | ev.Close):
                self.send(output.conn, output)
                line = self.lines.get(output.conn)
                if line is not None and line.server_open:
                    self.server_closes(line)
                    self.closed.append(output.conn)  # the loop tells of it later
            elif not isinstance(output, ev.Happened):
                self.send(output.conn, output)

    def send(self, conn: int, message: Any) -> None:
        line = self.lines.get(conn)
        if line is not None and line.server_open:
            line.down.append((self.arrival(line.down), message))

    def arrival(self, queue: deque[tuple[float, Any]]) -> float:
        delay = self.random.choice((0, 1, 1, 2, 5, 30, 30, 200, 800, 3000))
        return max(self.true_ms + delay, queue[-1][0] if queue else 0.0)

    def server_closes(self, line: Line) -> None:
        """What was sent before still arrives: the kernel goes on trying."""
        line.server_open = False
        line.eof_down_ms = self.arrival(line.down)

    def server_step(self) -> None:
        """All that the server has to do by now, in some order."""
        if self.machine is None or self.true_ms < self.server_stalls_until_ms:
            return
        jobs: list[Any] = []
        if self.server_now() >= self.server_ticks_at_ms:
            jobs.append(self.tick)
        for line in self.lines.values():
            if line.server_open and not line.node.is_cut_off(self.true_ms):
                due = bool(line.up) and line.up[0][0] <= self.true_ms
                if due or line.eof_up_ms <= self.true_ms:
                    jobs.append(lambda line=line: self.read(line))
        jobs += [lambda c=c: self.hear(me.MemberClosed(c)) for c in self.closed]
        self.closed.clear()
        self.random.shuffle(jobs)
        for job in [*jobs, self.probe]:
            if self.machine is not None:
                job()

    def tick(self) -> None:
        self.server_ticks_at_ms = self.server_now() + TICK_MS
        self.hear(ev.Tick())
        self.feed(ev.Tick())

    def read(self, line: Line) -> None:
        if not line.is_known:
            line.is_known = True
            self.hear(me.MemberOpened(line.id))
        while self.machine is not None and line.server_open and line.up:
            arrives_ms, message = line.up[0]
            if arrives_ms > self.true_ms:
                return
            line.up.popleft()
            self.hear(message)
        if line.server_open and not line.up and line.eof_up_ms <= self.true_ms:
            line.server_open = False
            self.hear(me.MemberClosed(line.id))

    def probe(self) -> None:
        assert self.machine is not None
        locks, supervisors = self.machine.locks, self.machine.supervisors
        for lock, holder in evidence.probes_due(locks, supervisors):
            assert holder.lease is not None
            if self.leases.is_free(holder.lease):
                self.leases.seal(holder.lease)
                self.feed(ev.WitnessFree(lock, holder.incarnation))
        is_due = self.machine is not None and evidence.scan_is_due(locks)
        if is_due and self.leases.may_free_unknown(locks):
            self.feed(ev.DirectoryScanned(frozenset()))

    # ------------------------------------------------------------------ supervisors

    def say(self, node: Node, message: Any) -> None:
        """Only what was sent on this connection, for this incarnation, can be answered."""
        line = node.line
        if line is None:
            return
        node.sent[node.progress] = node.now(self.true_ms)
        line.up.append((self.arrival(line.up), message))

    def want(self, node: Node) -> None:
        if node.line is None:
            return
        node.progress += 1
        tree = node.tree
        locks: tuple[str, ...] = ()
        tokens: dict[str, int] = {}
        if tree is not None and node.is_ready:
            locks = ("active",)
            tokens = {"active": tree.token} if tree.token else {}
        incarnation = tree.incarnation if tree is not None else None
        self.say(
            node,
            me.MemberWanted(
                conn=node.line.id,
                supervisor=node.supervisor,
                engine=node.engine,
                member=node.member,
                members=self.members_count,
                incarnation=incarnation,
                witness=name_of(incarnation) if incarnation else None,
                locks=locks,
                tokens=tokens,
                progress=node.progress,
            ),
        )

    def node_step(self, node: Node) -> None:
        """All that a supervisor has to do by now."""
        if not node.is_alive or self.true_ms < node.stopped_until_ms:
            return
        now = node.now(self.true_ms)
        self.listen(node)
        if node.holds and not node.is_killing and node.lease_used(self.true_ms) >= STOP:
            self.kill_tree(node)
        tree, line = node.tree, node.line
        if line is None:
            self.connect(node)
        elif now >= node.beat_at_ms:
            node.beat_at_ms = now + BEAT_MS
            if now - node.heard_ms > DEAF * LEASE_MS:
                self.hang_up(node)
            else:
                node.progress += 1
                self.say(node, me.MemberBeaten(line.id, node.progress))
        if tree is None:
            incarnation = f"{node.engine}-{next(self._ids):016x}"
            node.tree, node.is_ready, node.is_killing = Tree(incarnation), False, False
            self.trees.append(node.tree)
            self.forget_lease(node)
            self.want(node)
        elif node.is_killing and tree.is_dead:
            node.tree, node.is_killing, node.kill_at_ms = None, False, NEVER
            self.forget_lease(node)
            self.want(node)
        elif tree.is_dead:
            node.is_killing = True
        elif not node.is_ready and not node.is_killing and self.random.random() < 0.3:
            node.is_ready = True
            self.want(node)

    def forget_lease(self, node: Node) -> None:
        node.lease = None
        node.sent.clear()

    def connect(self, node: Node) -> None:
        if self.machine is not None and not node.is_cut_off(self.true_ms):
            node.line = Line(next(self._ids), node)
            self.lines[node.line.id] = node.line
            node.heard_ms = node.now(self.true_ms)
            node.sent.clear()
            self.want(node)

    def hang_up(self, node: Node) -> None:
        """What was said before still arrives, and may arrive after what a newer line says."""
        line = node.line
        assert line is not None
        line.client_open, node.line = False, None
        line.eof_up_ms = self.arrival(line.up)
        line.down.clear()
        node.sent.clear()

    def listen(self, node: Node) -> None:
        line = node.line
        is_cut_off = node.is_cut_off(self.true_ms)
        while line is not None and not is_cut_off and line.down:
            if line.down[0][0] > self.true_ms:
                return
            node.heard_ms = node.now(self.true_ms)
            self.told(node, line.down.popleft()[1])
        if line is not None and not is_cut_off and line.eof_down_ms <= self.true_ms:
            self.hang_up(node)

    def told(self, node: Node, message: Any) -> None:
        tree = node.tree
        if isinstance(message, me.SendRenewed):
            self.renewed(node, message)
        elif tree is None or node.is_killing:
            return
        elif isinstance(message, me.SendGranted) and message.lock == "active":
            if message.incarnation == tree.incarnation:
                self.woken_by(node, tree, message.token)
            elif tree.token and message.token > tree.token:
                self.kill_tree(node)
        elif isinstance(message, me.SendMemberLost):
            if message.incarnation == tree.incarnation:
                self.kill_tree(node)
        elif isinstance(message, ev.Refuse) and message.code in OVER:
            self.kill_tree(node)

    def renewed(self, node: Node, message: me.SendRenewed) -> None:
        sent_ms = node.sent.pop(message.progress, None)
        if sent_ms is None or node.tree is None:
            return
        if node.holds and node.lease_used(self.true_ms) >= 1.0:
            return  # too late: the server may have answered before it gave up
        if self.counts_from_receipt:
            sent_ms = node.now(self.true_ms)
        node.lease = (sent_ms, float(message.lease_ms))
        if node.holds:
            self.arm(node)

    def arm(self, node: Node) -> None:
        assert node.lease is not None
        node.kill_at_ms = node.lease[0] + self.kill_fraction * node.lease[1]

    def woken_by(self, node: Node, tree: Tree, token: int) -> None:
        if node.lease_used(self.true_ms) >= STOP or tree.is_dead or tree.dies_ms < NEVER:
            self.want(node)
            return
        if tree.token != token:
            tree.token = token
            self.woken += 1
            self.arm(node)
            self.want(node)

    def kill_tree(self, node: Node) -> None:
        assert node.tree is not None
        node.is_killing = True
        self.doom(node.tree)

    def doom(self, tree: Tree) -> None:
        exit_ms = self.random.choice((0, 5, 50, 400, EXIT_MS_MAX))
        tree.dies_ms = min(tree.dies_ms, self.true_ms + exit_ms)

    def kill_node(self, node: Node) -> None:
        node.is_alive, node.kill_at_ms = False, NEVER
        if node.tree is not None:
            self.doom(node.tree)
        if node.line is not None:
            self.hang_up(node)

    # ------------------------------------------------------------------ what befalls them

    def fault(self) -> str:
        kind, lasts_ms = self.random.choice(FAULTS), self.random.choice(LASTS_MS)
        until_ms = self.true_ms + lasts_ms
        if kind == "server" and self.machine is not None:
            self.kill_server()
        elif kind == "lose":
            self.kill_server()
            self.slots[self.random.randrange(2)] = None
        elif kind == "stall":
            self.server_stalls_until_ms = until_ms
        elif kind == "disk":
            self.disk_fails_until_ms = until_ms
        elif self.nodes:
            node = self.random.choice(self.nodes)
            self.befall(kind, node, until_ms)
            return f"{kind} {node.engine}.{node.member} for {lasts_ms}"
        return f"{kind} for {lasts_ms}"

    def befall(self, kind: str, node: Node, until_ms: float) -> None:
        if kind == "tree" and node.tree is not None and not node.tree.is_dead:
            self.doom(node.tree)
        elif kind == "sup" and node.is_alive:
            self.kill_node(node)
        elif kind == "stop":
            node.stopped_until_ms = max(until_ms, node.stopped_until_ms)
        elif kind == "part":
            node.cut_off_until_ms = max(until_ms, node.cut_off_until_ms)
        elif kind == "gone" and node.is_alive and not node.is_lost_for_good:
            node.cut_off_until_ms, node.is_lost_for_good = NEVER, True
        elif kind == "cut" and node.line is not None:
            self.hang_up(node)
        elif kind == "race":
            self.race(node, until_ms)

    def race(self, node: Node, until_ms: float) -> None:
        """Who holds dies at the moment at which the network of somebody who waits goes away."""
        for other in self.nodes:
            if other.holds and other.tree is not None and other.engine != node.engine:
                self.doom(other.tree)
                node.cut_off_until_ms = max(until_ms, node.cut_off_until_ms)

    def restart_dead(self) -> None:
        """A supervisor is started anew while what the last one started may still be dying."""
        if self.machine is None and self.true_ms >= self.server_down_until_ms:
            self.start_server()
        here = {(n.engine, n.member) for n in self.nodes if n.is_alive and not n.is_lost_for_good}
        for place in self.places:
            if place in here:
                self.vacant.pop(place, None)
            elif place not in self.vacant:
                self.vacant[place] = self.true_ms + self.random.choice(LASTS_MS)
            elif self.true_ms >= self.vacant[place]:
                self.new_node(*place)

    def step(self, fault_rate: float) -> None:
        self.pass_time(self.random.choice((0, 1, 5, 20, 100, 250, 400)))
        if self.random.random() < fault_rate:
            self.trace.append(f"{self.true_ms:.0f} {self.fault()}")
        self.restart_dead()
        order = [self.server_step, *(lambda n=n: self.node_step(n) for n in self.nodes)]
        self.random.shuffle(order)
        for each in order:
            each()
        self.check()
        self.sweep()

    def pass_time(self, ms: float) -> None:
        """Kernels act on time: each timer and each death at its own moment."""
        end_ms = self.true_ms + ms
        while True:
            moments = [(t.dies_ms, 0, t) for t in self.trees if not t.is_dead]
            moments += [(n.true(n.kill_at_ms), 1, n) for n in self.nodes if n.is_alive]
            at_ms, kind, what = min(moments, default=(NEVER, 0, None), key=lambda m: m[:2])
            if at_ms > end_ms:
                break
            self.true_ms = max(self.true_ms, at_ms)
            if kind == 0:
                what.is_dead = True
            else:
                self.trace.append(
                    f"{self.true_ms:.0f} the kernel kills {what.engine}.{what.member}"
                )
                self.kill_node(what)
        self.true_ms = end_ms

    def sweep(self) -> None:
        self.trees = [t for t in self.trees if not t.is_dead or t.dies_ms > self.true_ms - 1]
        self.nodes = [n for n in self.nodes if n.is_alive or (n.tree and not n.tree.is_dead)]
        self.lines = {k: v for k, v in self.lines.items() if v.client_open or v.server_open}

    def settle(self, minutes: float = 4.0) -> bool:
        """No more faults; what is lost for good stays so. Does somebody serve?"""
        end_ms = self.true_ms + minutes * 60_000
        while self.true_ms < end_ms:
            self.step(0.0)
            if self.is_served_by_somebody():
                return True
        return False

    def is_served_by_somebody(self) -> bool:
        holder = self.machine.locks["active"].holder if self.machine is not None else None
        if holder is None or holder.lease is None:
            return False
        live = {
            n.tree.incarnation
            for n in self.nodes
            if n.is_alive and n.tree and n.tree.token == holder.token and n.tree.dies_ms == NEVER
        }
        return live == {who.incarnation for who in holder.lease.members}

    # ------------------------------------------------------------------ what must always hold

    def serving(self) -> list[Tree]:
        return [tree for tree in self.trees if tree.token and not tree.is_dead]

    def check(self) -> None:
        tokens = {tree.token: tree.incarnation for tree in self.serving()}
        assert len(tokens) <= 1, f"two grants are served: {tokens}"

    def check_grant(self, record: ev.Record) -> None:
        holder = record.holders.get("active")
        if holder is None or holder.token <= self.token_max:
            return
        self.token_max = holder.token
        others = [tree.incarnation for tree in self.serving() if tree.token != holder.token]
        assert not others, f"granted to {holder.incarnation} while {others} live"
        known = self.granted.setdefault(holder.token, holder.incarnation)
        assert known == holder.incarnation, f"token {holder.token} was granted twice"
