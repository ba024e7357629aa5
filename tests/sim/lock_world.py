"""A whole pod around the pure lock machine: supervisors, trees, witnesses, connections, a disk.

The world does what kernels, networks and users do, in an order that a seeded generator chooses. It
checks after every step that there is never a second live engine that was told it is active, and at
every send that the token is on disk. Only the machine is real; nothing here sleeps.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lockserver.core import events as ev
from lockserver.core import evidence
from lockserver.core.machine import Machine
from lockserver.witness import Probe, WitnessFile, name_of


@dataclass
class Tree:
    """A backend: processes that hold the witness, and ones that are still on their way to it."""

    incarnation: str
    witness: WitnessFile
    holding: int = 1
    coming: int = 1
    is_doomed: bool = False
    is_woken: bool = False
    is_sealed: bool = False
    is_loaded: bool = False

    @property
    def is_alive(self) -> bool:
        return self.holding > 0


@dataclass
class Conn:
    id: int
    supervisor: str
    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    client_open: bool = True
    server_open: bool = True


@dataclass
class Sup:
    id: str
    engine: str
    is_alive: bool = True
    is_stopped: bool = False
    conn: int | None = None
    tree: Tree | None = None
    is_killing: bool = False
    tokens: dict[str, int] = field(default_factory=dict)
    beats: int = 0


class World:
    def __init__(
        self, seed: int, *, engines: int = 2, in_container: bool = True, has_pidfd: bool = True
    ) -> None:
        self.random = random.Random(seed)
        self.in_container, self.has_pidfd = in_container, has_pidfd
        self.now_ms = 0.0
        self.slots: list[ev.Record | None] = [ev.Record(), ev.Record()]
        self.machine: Machine | None = None
        self.conns: dict[int, Conn] = {}
        self.sups: list[Sup] = []
        self.trees: list[Tree] = []
        self.sent: dict[int, str] = {}
        self.disk_fails = False
        self.unreported_deaths: set[str] = set()
        self.closed: deque[int] = deque()
        self._ids = iter(range(1, 1_000_000))
        self.trace: list[str] = []
        self.token_sent_max = 0
        self.start_server()
        for number in range(engines):
            self.new_sup(f"engine-{number}")

    # ------------------------------------------------------------------ the server's shell

    def start_server(self) -> None:
        record = self.slots[1]
        readable = [slot.token for slot in self.slots if slot is not None]
        if len(readable) < 2 or record is None:  # what the state file does when a slot is lost
            floor = max(readable, default=self.token_sent_max)
            record = ev.Record(floor + 1, unknown=frozenset({"active", "loader"}))
            self.slots = [record, record]
        self.machine = Machine(record, self.now_ms)
        self.perform(self.machine.begin())

    def kill_server(self) -> None:
        self.machine = None
        self.closed.clear()
        for conn in self.conns.values():
            conn.server_open = False
            conn.up.clear()

    def feed(self, event: ev.Input) -> None:
        assert self.machine is not None
        self.perform(self.machine.handle(event, self.now_ms))

    def perform(self, effects: list[ev.Effect]) -> None:
        for index, effect in enumerate(effects):
            if isinstance(effect, ev.Persist):
                assert index == len(effects) - 1
                if self.disk_fails:
                    self.feed(ev.PersistFailed("a full disk"))
                    return
                self.slots = [self.slots[1], effect.record]
                self.check_grant(effect.record)
                if self.random.random() < 0.02:
                    self.trace.append("server dies between writing and sending")
                    self.kill_server()
                    return
                self.feed(ev.Persisted())
            elif isinstance(effect, ev.SendGrant):
                self.send(effect.conn, effect)
                self.check_sent(effect.holder)
            elif isinstance(effect, ev.Announce):
                for conn in list(self.conns.values()):
                    if conn.supervisor != effect.holder.supervisor:
                        self.send(conn.id, ev.SendGrant(conn.id, effect.lock, effect.holder))
            elif isinstance(effect, ev.Refuse | ev.Close):
                self.send(effect.conn, effect)
                self.conns[effect.conn].server_open = False
                self.closed.append(effect.conn)  # the loop tells of it later

    def send(self, conn_id: int, message: Any) -> None:
        conn = self.conns[conn_id]
        if conn.client_open and conn.server_open:
            conn.down.append(message)

    def server_step(self) -> None:
        """One thing that the server could do now, of those there are."""
        choices: list[Any] = []
        for conn in self.conns.values():
            if conn.server_open and conn.up:
                choices.append(lambda conn=conn: self.receive(conn))
            elif conn.server_open and not conn.client_open:
                choices.append(lambda conn=conn: self.notice_close(conn))
        choices += [lambda s=s: self.notice_death(s) for s in sorted(self.unreported_deaths)]
        if self.closed:
            choices.append(lambda: self.feed(ev.ConnectionClosed(self.closed.popleft())))
        choices += [self.probe, self.scan]
        self.random.choice(choices)()

    def receive(self, conn: Conn) -> None:
        event = conn.up.popleft()
        if isinstance(event, ev.Wanted):
            tree = next((t for t in self.trees if t.incarnation == event.incarnation), None)
            state = Probe.UNPROVEN
            if tree is not None:
                state = Probe.HELD if tree.is_alive else Probe.FREE
                state = Probe.UNPROVEN if tree.is_sealed else state
            sup = next(s for s in self.sups if s.id == event.supervisor)
            if not sup.is_alive:  # its last words: the pidfd that came with them tells soon
                self.unreported_deaths.add(sup.id)
            event = ev.Wanted(
                event.conn, event.supervisor, event.engine, event.incarnation, event.witness,
                event.locks, event.tokens, tree.witness if tree else None, state, 1,
                "SO_PEERPIDFD" if self.has_pidfd else "none",
            )  # fmt: skip
        self.feed(event)

    def notice_close(self, conn: Conn) -> None:
        conn.server_open = False
        self.feed(ev.ConnectionClosed(conn.id))

    def notice_death(self, supervisor: str) -> None:
        sup = next(s for s in self.sups if s.id == supervisor)
        if self.has_pidfd and self.is_process_gone(sup):
            self.unreported_deaths.discard(supervisor)
            self.feed(ev.ProcessGone(supervisor))

    def is_process_gone(self, sup: Sup) -> bool:
        """The pidfd of PID 1 of a container is readable once its whole tree is dead."""
        tree_alive = self.in_container and sup.tree is not None and sup.tree.is_alive
        return not sup.is_alive and not tree_alive

    def probe(self) -> None:
        assert self.machine is not None
        for lock, holder in evidence.probes_due(self.machine.locks, self.machine.supervisors):
            tree = next(t for t in self.trees if t.incarnation == holder.incarnation)
            if not tree.is_alive:
                tree.is_sealed = True
                self.feed(ev.WitnessFree(lock, holder.incarnation))
                return

    def scan(self) -> None:
        assert self.machine is not None
        locks, supervisors = self.machine.locks, self.machine.supervisors
        held = frozenset(t.witness.name for t in self.trees if t.is_alive)
        if evidence.scan_is_due(locks) and evidence.scan_frees(locks, supervisors, held):
            kept = evidence.kept_witnesses(supervisors)
            for tree in self.trees:
                if not tree.is_alive and tree.witness.name not in kept:
                    tree.is_sealed = True
            self.feed(ev.DirectoryScanned(held))

    # ------------------------------------------------------------------ supervisors

    def new_sup(self, engine: str) -> None:
        self.sups.append(Sup(f"{next(self._ids):016x}", engine))

    def want_of(self, sup: Sup) -> ev.Wanted:
        tree = sup.tree
        assert sup.conn is not None
        if tree is None:
            return ev.Wanted(sup.conn, sup.id, sup.engine, None, None, (), {})
        locks = ("active",) if tree.is_loaded else ("loader",)
        tokens = {lock: token for lock, token in sup.tokens.items() if lock in locks}
        return ev.Wanted(
            sup.conn, sup.id, sup.engine, tree.incarnation, tree.witness.name, locks, tokens
        )

    def say(self, sup: Sup) -> None:
        if sup.conn is not None and self.conns[sup.conn].server_open:
            self.conns[sup.conn].up.append(self.want_of(sup))

    def sup_step(self, sup: Sup) -> None:
        if not sup.is_alive or sup.is_stopped:
            return
        conn = self.conns.get(sup.conn) if sup.conn is not None else None
        tree = sup.tree
        if conn is not None and conn.down:
            self.hear(sup, conn.down.popleft())
        elif conn is not None and not conn.server_open:
            conn.client_open, sup.conn = False, None
        elif conn is None and self.machine is not None:
            fresh = Conn(next(self._ids), sup.id)
            self.conns[fresh.id] = fresh
            sup.conn = fresh.id
            self.say(sup)
        elif tree is None:
            incarnation = f"{sup.engine}-{next(self._ids):016x}"
            witness = WitnessFile(name_of(incarnation), 1, next(self._ids))
            sup.tree = Tree(incarnation, witness)
            self.trees.append(sup.tree)
            self.say(sup)
        elif not sup.is_killing and not tree.is_alive:
            sup.is_killing = tree.is_doomed = True
        elif sup.is_killing and not tree.is_alive:
            sup.tree, sup.is_killing = None, False
            sup.tokens.clear()
            self.say(sup)
        elif conn is not None and len(conn.up) < 4:
            sup.beats += 1
            conn.up.append(ev.Beaten(conn.id, sup.beats))

    def hear(self, sup: Sup, message: Any) -> None:
        tree = sup.tree
        if isinstance(message, ev.Refuse):
            if message.code in ("lock.stale_claim", "lock.incarnation_ended"):
                self.give_up(sup)
        elif isinstance(message, ev.SendGrant) and tree is not None and not sup.is_killing:
            if message.holder.incarnation != tree.incarnation:
                if message.lock in sup.tokens and message.holder.token > sup.tokens[message.lock]:
                    self.give_up(sup)
            elif message.lock == "active":
                sup.tokens["active"] = message.holder.token
                tree.is_woken = True
            elif not tree.is_loaded:  # it loads in no time, then gives the loader lock up
                tree.is_loaded = True
                sup.tokens.pop("loader", None)
                self.say(sup)

    def give_up(self, sup: Sup) -> None:
        if sup.tree is not None:
            sup.tree.is_doomed = True
            sup.is_killing = True

    # ------------------------------------------------------------------ what befalls them

    def tree_step(self) -> None:
        tree = self.random.choice(self.trees) if self.trees else None
        if tree is None:
            return
        if tree.is_doomed:
            tree.coming = 0
            tree.holding = max(0, tree.holding - 1)
        elif tree.coming and tree.is_sealed:
            tree.coming = 0  # it finds the seal and exits
        elif tree.coming and tree.is_alive:
            tree.coming, tree.holding = tree.coming - 1, tree.holding + 1

    def kill_sup(self, sup: Sup) -> None:
        sup.is_alive = False
        if sup.tree is not None:
            sup.tree.is_doomed = True  # PID 1 of its namespace, or PDEATHSIG
        if sup.conn is not None:
            self.conns[sup.conn].client_open = False
            sup.conn = None
        self.unreported_deaths.add(sup.id)

    def fault(self) -> str:
        sup = self.random.choice(self.sups)
        kind = self.random.choice(
            ("proc", "sup", "stop", "stop", "cut", "cut", "server", "lose", "disk", "rest")
        )
        if kind == "proc" and sup.tree is not None and sup.tree.is_alive:
            sup.tree.holding -= 1
            sup.tree.is_doomed = self.random.random() < 0.5 or sup.tree.is_doomed
            if sup.is_alive and not sup.is_stopped:
                self.give_up(sup)
        elif kind == "sup" and sup.is_alive:
            self.kill_sup(sup)
        elif kind == "stop" and sup.is_alive:
            sup.is_stopped = not sup.is_stopped
        elif kind == "cut" and sup.conn is not None:
            self.conns[sup.conn].client_open = False
            self.conns[sup.conn].down.clear()
            sup.conn = None
        elif kind == "server" and self.machine is not None:
            self.kill_server()
        elif kind == "lose" and self.machine is None:
            self.slots[self.random.randrange(2)] = None
        elif kind == "disk":
            self.disk_fails = not self.disk_fails
        elif kind == "rest":
            self.restart_dead()
        return kind

    def restart_dead(self) -> None:
        """What a kubelet does; in a container the old tree is dead before the new one starts."""
        if self.machine is None:
            self.start_server()
        for sup in list(self.sups):
            has_successor = any(s.is_alive and s.engine == sup.engine for s in self.sups)
            if self.is_process_gone(sup) and not has_successor:
                self.new_sup(sup.engine)

    def step(self, fault_rate: float) -> None:
        self.now_ms += self.random.choice((0, 1, 5, 50, 400, 900))
        if self.machine is not None and self.random.random() < 0.7:
            self.feed(ev.Tick())
        roll = self.random.random()
        if roll < fault_rate:
            self.trace.append(self.fault())
        elif roll < 0.45 and self.machine is not None:
            self.server_step()
        elif roll < 0.8:
            self.sup_step(self.random.choice(self.sups))
        else:
            self.tree_step()
        self.check()

    def settle(self, steps: int = 3000) -> bool:
        """No more faults, everything dead is started again: does somebody become active?"""
        self.disk_fails = False
        for _ in range(steps):
            for sup in self.sups:
                sup.is_stopped = False
            self.restart_dead()
            self.step(0.0)
            if self.is_served():
                return True
        return False

    def is_served(self) -> bool:
        if self.machine is None:
            return False
        holder = self.machine.locks["active"].holder
        return holder is not None and any(
            sup.is_alive
            and sup.tree is not None
            and sup.tree.incarnation == holder.incarnation
            and sup.tree.is_alive
            and sup.tree.is_woken
            and not sup.tree.is_doomed
            and sup.tokens.get("active") == holder.token
            for sup in self.sups
        )

    # ------------------------------------------------------------------ what must always hold

    def check(self) -> None:
        woken = [t.incarnation for t in self.trees if t.is_woken and t.is_alive]
        assert len(woken) <= 1, f"two active engines: {woken}"

    def check_grant(self, record: ev.Record) -> None:
        holder = record.holders.get("active")
        if holder is None or holder.token <= self.token_sent_max:
            return
        others = [
            t.incarnation
            for t in self.trees
            if t.is_woken and t.is_alive and t.incarnation != holder.incarnation
        ]
        assert not others, f"granted to {holder.incarnation} while {others} live"

    def check_sent(self, holder: ev.Holder) -> None:
        assert self.sent.setdefault(holder.token, holder.incarnation) == holder.incarnation, (
            f"token {holder.token} was sent to {self.sent[holder.token]} and {holder.incarnation}"
        )
        self.token_sent_max = max(self.token_sent_max, holder.token)
