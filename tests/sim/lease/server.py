"""The server's shell around the machine: a clock, a disk, connections.

It does what `server.py`, `remote.py`, `prober.py` and `state_file.py` do. Without a `machine` it is
down; its disk and its clock continue.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lockserver.core import events as ev
from lockserver.core import recovery
from lockserver.core.machine import LockMachine
from lockserver.messages import GrantedMsg, RenewedMsg
from tests.sim.lease.network import DRIFT, LASTS_MS, Line

if TYPE_CHECKING:
    from tests.sim.lease.world import LeaseWorld

SILENT_MS = 3000.0
TICK_MS = 100.0
DIES_AFTER_WRITE = 0.02  # of all writes
LOCKS = frozenset({"active", "loader"})


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
        leases = world.leases_type(
            now_ms, lease_ms=lease_ms, margin_ms=world.margin_ms, listens=True
        )
        self.machine = LockMachine(record, now_ms, silent_ms=SILENT_MS, leases=leases)
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

    def feed(self, event: ev.Input) -> None:
        if self.machine is not None:
            self.perform(self.machine.handle(event, self.now()))

    def perform(self, effects: list[ev.LockEffect]) -> None:
        network = self.world.network
        for effect in effects:
            match effect:
                case _ if self.machine is None:
                    return
                case ev.Persist():
                    self.persist(effect.record)
                case ev.SendGrant():
                    network.send_down(effect.conn, granted(effect))
                case ev.Announce():
                    for each in self.machine.supervisors.values():
                        if each.conn is not None and each.id != effect.holder.supervisor:
                            network.send_down(each.conn, granted(effect))
                case ev.Renew():
                    answer = RenewedMsg(effect.progress, effect.lease_ms)
                    network.send_down(effect.conn, answer)
                case ev.RefuseConnection() | ev.Close():
                    network.send_down(effect.conn, effect)
                    line = network.lines.get(effect.conn)
                    if line is not None and line.server_open:
                        network.close_by_server(line)
                        self.closed.append(effect.conn)

    def persist(self, record: ev.LockRecord) -> None:
        if self.world.true_ms < self.disk_fails_until_ms:
            self.feed(ev.PersistFailed("a full disk"))
            return
        self.slots = [self.slots[1], record]
        self.world.promises.written(record)
        if self.world.random.random() < DIES_AFTER_WRITE:
            self.world.trace.append("server dies between writing and sending")
            self.kill()
        else:
            self.feed(ev.Persisted())

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
        jobs += [partial(self.feed, ev.ConnectionClosed(conn)) for conn in self.closed]
        self.closed.clear()
        self.world.random.shuffle(jobs)
        for job in [*jobs, self.probe]:
            if self.machine is not None:
                job()

    def tick(self) -> None:
        self.ticks_at_ms = self.now() + TICK_MS
        self.feed(ev.TimePassed())

    def read(self, line: Line) -> None:
        while self.machine is not None and line.server_open and line.up:
            arrives_ms, message = line.up[0]
            if arrives_ms > self.world.true_ms:
                return
            line.up.popleft()
            self.feed(message)
        if line.server_open and not line.up and line.eof_up_ms <= self.world.true_ms:
            line.server_open = False
            self.feed(ev.ConnectionClosed(line.id))

    def probe(self) -> None:
        assert self.machine is not None
        is_due = recovery.scan_is_due(self.machine.locks)
        if is_due and not self.machine.leases.may_have_strangers:
            self.feed(ev.DirectoryScanned(frozenset()))


def granted(effect: ev.SendGrant | ev.Announce) -> GrantedMsg:
    holder = effect.holder
    who = holder.engine, holder.incarnation, holder.token
    return GrantedMsg(effect.lock, *who, effect.era)
