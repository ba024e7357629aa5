"""A device's KV memory, its servers one after the other, and the processes of engines that come
and die: the real machine under random schedules.

The model around it is small on purpose. A process locks the pool's file before it asks for memory,
and keeps lock and memory until it is reaped, some time after its connection has ended. The driver
completes calls when it likes. The lock server's fence is left out: an engine may claim while
another is alive, stopped or dying, and the machine alone must keep them apart. An engine may also
hand its pool over and claim it again under a later token, or rest, which gives its memory up; and
an operator drops what nobody uses.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gms import messages as msg
from gms.core import events as ev
from gms.core.events import Claimant
from gms.core.kv import KvMachine
from gms.core.region import RegionPhase
from plumbing.errors import UnderstudyError
from tests.sim.gms_device import told

SIZES = (64, 64, 64, 128)
INDEX = 8
WAIT_MS = 50_000


@dataclass
class Memory:
    """A pool's physical memory; `written` lists who wrote to it since it was zero."""

    pool: str
    size: int
    written: list[Claimant] = field(default_factory=list)
    is_bad: bool = False  # its holder said so, and the server has heard it


@dataclass
class Process:
    claimant: Claimant
    size: int
    conn: int | None = None
    inbox: deque[ev.Effect | tuple[ev.SendRegion, Memory]] = field(default_factory=deque)
    flock: str | None = None
    memory: Memory | None = None
    slabs: int = 0
    mark: str = ""
    discarded: str = ""
    is_stopped: bool = False
    is_dying: bool = False  # killed; what it holds goes later


class KvWorld:
    """One schedule, drawn from `seed`."""

    is_marking = True  # whether the mark of a discarded pool reaches its file

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.trace: list[str] = []
        self.now_ms = 0.0
        self.pool_ids, self.conn_ids = itertools.count(1), itertools.count(1)
        self.processes: list[Process] = []
        self.token, self.era, self.incarnations = 0, "e0", 0
        self.claims: list[Claimant] = []  # that a server has accepted, with its disk
        self.disk: tuple[Claimant, ...] = ()
        self.files: dict[str, bool] = {}  # by pool: whether it is marked as discarded
        self.machine: KvMachine | None = None
        self.vault: dict[str, Memory] = {}  # what the server holds
        self.offered: dict[int, Memory] = {}
        self.watched: set[str] = set()
        self.calls: deque[Callable[[], None]] = deque()  # of the driver, of this server
        self.is_full = False
        self.takeovers = self.lent = self.handed_over = self.freed = self.dropped = 0
        self.boot()

    # ------------------------------------------------------------------ the schedule

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.check()
        self.settle()

    def step(self) -> None:
        rng = self.rng
        self.now_ms += rng.choice((0, 1, 5, 200))
        choice = rng.random()
        alive = [p for p in self.processes if not p.is_dying]
        if choice < 0.04:
            self.launch()
        elif choice < 0.06:
            self.crash_server()
        elif choice < 0.10 and alive:
            self.kill(rng.choice(alive))
        elif choice < 0.13 and alive:
            process = rng.choice(alive)
            process.is_stopped = not process.is_stopped
            self.note(f"{'stop' if process.is_stopped else 'continue'} {process.claimant}")
        elif choice < 0.15:
            self.is_full = not self.is_full
        elif choice < 0.16:
            self.drop_pool()
        elif choice < 0.25:
            self.reap()
        elif choice < 0.40:
            self.look()
        elif choice < 0.55 and self.calls:
            self.calls.popleft()()
        elif choice < 0.60:
            self.tell("deadline_passed")
        elif self.machine is None:
            self.boot()
        elif alive:
            self.advance(rng.choice(alive))

    def launch(self) -> None:
        """A process: of a new grant, of the newest incarnation, or of one that lost the lock."""
        kind = self.rng.choice(("new", "new", "mate", "mate", "stale"))
        known = [p.claimant for p in self.processes]
        if kind == "mate" and known:
            mate = self.rng.choice(self.processes)
            self.processes.append(Process(mate.claimant, mate.size))
            return
        if kind == "stale" and self.token > 1:
            stale = Claimant("old", f"old-{len(self.processes)}", self.token - 1, self.era)
            self.processes.append(Process(stale, self.rng.choice(SIZES)))
            return
        if self.rng.random() < 0.1:
            self.era, self.token = f"e{int(self.era[1:]) + 1}", 0
        self.token += 1
        self.incarnations += 1
        claimant = Claimant("new", f"new-{self.incarnations}", self.token, self.era)
        self.processes.append(Process(claimant, self.rng.choice(SIZES)))

    def drop_pool(self) -> None:
        """An operator's command. The shell asks the kernel first whether anybody maps it."""
        if self.machine is None:
            return
        pool = self.machine.current
        users = [p for p in self.processes if pool is not None and p.flock == pool.id]
        if users and not self.machine.all_holders:
            return
        try:
            self.tell(ev.Received(next(self.conn_ids), 1, msg.DropMsg(is_kv=True), 9))
        except UnderstudyError:
            return
        assert pool is not None, "no pool was dropped"
        assert not users, f"a pool was dropped that {users[0].claimant} maps"
        self.note(f"drop {pool.id}")
        self.dropped += 1
        self.vault[pool.id].is_bad = True  # and is never lent again

    def kill(self, process: Process) -> None:
        self.note(f"kill {process.claimant}")
        process.is_dying = True

    def reap(self) -> None:
        """One step of a death: the connection, and what it held last."""
        for process in [p for p in self.processes if p.is_dying]:
            if process.conn is not None and self.rng.random() < 0.7:
                self.disconnect(process)
            elif self.rng.random() < 0.5:
                self.disconnect(process)
                process.flock = process.memory = None
                self.processes.remove(process)
                self.note(f"gone {process.claimant}")
            return

    def look(self) -> None:
        """The server's watch tries a file."""
        for pool in sorted(self.watched):
            if not any(p.flock == pool for p in self.processes):
                self.watched.discard(pool)
                self.tell("region_free", pool)
                return

    # ------------------------------------------------------------------ one process

    def advance(self, process: Process) -> None:
        if process.is_stopped:
            return
        if process.conn is None:
            self.connect(process)
        elif process.inbox:
            self.read(process)
        elif process.memory is not None:
            self.use(process, process.memory)

    def connect(self, process: Process) -> None:
        if self.machine is None:
            return
        if process.memory is None:
            process.inbox.clear()
            process.flock = None
        process.conn = next(self.conn_ids)
        c = process.claimant
        if process.memory is not None:
            self.offered[process.conn] = process.memory
            held = msg.HeldPool(
                c.token, c.era, process.size, INDEX, process.mark, process.discarded
            )
            memory = process.memory
            message: msg.BorrowPoolMsg | msg.HandBackMsg = msg.HandBackMsg(
                c.engine, c.incarnation, memory.pool, (memory.size,), pool=held
            )
        else:
            message = msg.BorrowPoolMsg(
                c.engine, c.incarnation, c.token, c.era, process.size, INDEX, WAIT_MS
            )
        self.send(process, message)

    def send(self, process: Process, message: msg.Message) -> bool:
        """What the shell does with a message: refusals answer and close. Whether it was heard."""
        if process.conn is None:
            return False
        self.note(f"{process.claimant} {message.TYPE}")
        try:
            self.tell(ev.Received(process.conn, 1, message, 7))
        except UnderstudyError as error:
            self.note(f"refused: {error.code}")
            process.inbox.append(ev.RefuseRequest(process.conn, 1, error))
            return False
        if isinstance(message, msg.BorrowPoolMsg):
            self.claims.append(process.claimant)
        return True

    def read(self, process: Process) -> None:
        got = process.inbox.popleft()
        match got:
            case ev.SendMessage(message=msg.PoolGrantedMsg(pool)):
                if pool not in self.files:
                    self.disconnect(process)
                    return
                process.flock = pool
                self.send(process, msg.TakeMsg())
            case (ev.SendRegion(), Memory() as memory):
                process.memory = memory
                self.takeovers += bool(memory.written) and memory.written[-1] != process.claimant
            case ev.SendMessage(message=msg.PoolFreedMsg() as said):
                assert said.pool not in self.vault, "memory that the server holds was called free"
                held = [p.claimant for p in self.processes if p.flock == said.pool]
                assert not held, f"memory that {held[0]} maps was called free"
                self.freed += 1
                self.disconnect(process)
            case ev.RefuseRequest():
                self.disconnect(process)
                is_gone = got.error.code == "gms.kv_pool_gone"
                if process.memory is None or is_gone:  # an engine that cannot wake ends
                    self.kill(process)

    def use(self, process: Process, memory: Memory) -> None:
        do = self.rng.random()
        if do < 0.5:
            for mark in ("begun", self.rng.choice(("begun", "adopting", "adopted"))):
                process.mark = mark
                self.send(process, msg.MarkMsg(mark))
            memory.written.append(process.claimant)
        elif do < 0.65:
            process.discarded = "bad"
            memory.is_bad |= self.send(process, msg.DiscardMsg("bad"))
        elif do < 0.7:
            process.memory = process.flock = None
            self.disconnect(process)
            self.kill(process)
        elif do < 0.75:
            self.hand_over(process)
        elif do < 0.8:
            self.rest(process, memory)
        elif process.mark:
            memory.written.append(process.claimant)

    def hand_over(self, process: Process) -> None:
        """Give the lease back, live on, and claim again under the token of a later grant."""
        process.memory = process.flock = None
        process.mark = process.discarded = ""
        self.disconnect(process)
        self.token += 1
        c = process.claimant
        process.claimant = Claimant(c.engine, c.incarnation, self.token, self.era)
        self.handed_over += 1

    def rest(self, process: Process, memory: Memory) -> None:
        """Unmap, leave the file, and have the memory freed; later claim again. Whose token is stale
        ends, and the memory stays for whoever has the newer one."""
        process.memory = process.flock = None
        process.mark = process.discarded = ""
        if self.send(process, msg.GiveUpMsg(WAIT_MS)):
            mine = process.claimant
            for claim in self.claims:
                is_newer = claim.era == mine.era and claim.token > mine.token
                assert not is_newer, f"{mine} freed what {claim} had claimed"
            memory.is_bad = True

    def disconnect(self, process: Process) -> None:
        conn, process.conn = process.conn, None
        process.inbox = deque(each for each in process.inbox if isinstance(each, tuple))
        if conn is not None and self.machine is not None:
            self.offered.pop(conn, None)
            self.tell("closed", conn)

    # ------------------------------------------------------------------ the server

    def boot(self) -> None:
        held = {p.flock for p in self.processes}
        self.files = {pool: marked for pool, marked in self.files.items() if pool in held}
        self.watched.clear()
        self.machine = KvMachine(
            new_pool_id=lambda: f"pool{next(self.pool_ids)}",
            orphans=self.files,
            newest=self.disk,
        )
        self.note(f"boot, orphans {sorted(self.files)}")
        self.tell("deadline_passed")

    def crash_server(self) -> None:
        self.note("server crashes")
        self.machine = None
        self.vault, self.offered = {}, {}
        self.calls.clear()
        for process in self.processes:
            process.conn = None
            process.inbox = deque(each for each in process.inbox if isinstance(each, tuple))
            if process.inbox and not process.is_dying:
                self.read(process)  # what the dead server had sent is still in its socket

    def tell(self, *said: Any, **named: Any) -> None:
        if self.machine is not None:
            for effect in told(self.machine, self.now_ms, *said, **named):
                self.perform(effect)

    def perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.SendMessage(session, _, msg.PoolGrantedMsg(pool)):
                self.granted(session, pool)
                self.answer(session, effect)
            case ev.SendRegion(session, _, pool, msg.PoolTakenMsg(is_fresh=is_fresh)):
                memory = self.vault[pool]
                assert not (is_fresh and memory.written), "fresh memory was written before"
                self.answer(session, (effect, memory))
            case ev.SendMessage(session) | ev.RefuseRequest(session):
                self.answer(session, effect)
            case ev.MakePool():
                self.calls.append(lambda: self.make(effect))
            case ev.Release():
                self.calls.append(lambda: self.release(effect))
            case ev.TakeBack():
                memory = self.offered.get(effect.session)
                self.calls.append(lambda: self.take_back(effect, memory))
            case ev.Watch(pool, ends):
                (self.watched.discard if ends is None else self.watched.add)(pool)
            case ev.MarkRetired(pool):
                self.files[pool] = self.is_marking
            case ev.KeepTokens(newest):
                self.disk = newest

    def answer(self, conn: int, what: ev.Effect | tuple[ev.SendRegion, Memory]) -> None:
        for process in self.processes:
            if process.conn == conn:
                process.inbox.append(what)

    def make(self, call: ev.MakePool) -> None:
        if self.is_full:
            full = UnderstudyError("gms.device_full", "the device is full")
            self.tell("done", call, error=full)
            return
        alive = {id(m) for m in self.memories()}
        assert not alive, "a second pool was made beside one that lives"
        self.files[call.region] = False
        self.vault[call.region] = Memory(call.region, call.size_bytes)
        self.tell("done", call, (call.size_bytes,))

    def release(self, call: ev.Release) -> None:
        pool = call.region
        assert not any(p.flock == pool for p in self.processes), "a mapped pool was released"
        self.files.pop(pool, None)
        self.vault.pop(pool, None)
        self.tell("done", call)

    def take_back(self, call: ev.TakeBack, memory: Memory | None) -> None:
        error = None
        if memory is None or self.rng.random() < 0.1:
            error = UnderstudyError("gms.bad_slab", "the driver refuses it")
        else:
            self.vault[call.region] = memory
        self.tell("done", call, error=error)

    # ------------------------------------------------------------------ what must hold

    def memories(self) -> list[Memory]:
        sent = [e[1] for p in self.processes for e in p.inbox if isinstance(e, tuple)]
        held = [p.memory for p in self.processes if p.memory is not None]
        return [*self.vault.values(), *held, *sent]

    def granted(self, conn: int, pool: str) -> None:
        self.lent += 1
        process = next(p for p in self.processes if p.conn == conn)
        mine = process.claimant
        for other in self.processes:
            is_other = other.claimant != mine
            assert not (is_other and other.memory is not None), f"{mine} beside {other.claimant}"
            assert not (is_other and other.flock == pool), f"{mine} beside {other.claimant}"
        for claim in self.claims:
            is_newer = claim.era == mine.era and claim.token > mine.token
            assert not is_newer, f"{mine} was granted after {claim} had claimed"
        memory = self.vault[pool]
        assert not memory.is_bad, "a discarded pool was lent"
        assert memory.size == process.size, "a pool of another size was lent"

    def check(self) -> None:
        users = {p.claimant for p in self.processes if p.memory is not None}
        assert len(users) <= 1, f"{users} have KV memory at the same time"
        assert len({id(m) for m in self.memories()}) <= 1, "two pools at the same time"

    def settle(self) -> None:
        """Everybody dies; then a new engine gets the memory, whatever happened before."""
        self.is_full = False
        for process in self.processes:
            process.is_dying = True
        while self.processes:
            self.reap()
        if self.machine is None:
            self.boot()
        self.token += 1
        last = Process(Claimant("last", "last-1", self.token, self.era), 64)
        self.processes.append(last)
        for _ in range(60):
            self.now_ms += 200
            if last.memory is None:
                self.advance(last)
            self.look()
            while self.calls:
                self.calls.popleft()()
            self.tell("deadline_passed")
            self.check()
        assert last.memory is not None, "the last engine was never lent the memory"
        phases = {pool.phase for pool in self.machine.regions.values()}
        assert phases == {RegionPhase.SERVED}

    def note(self, text: str) -> None:
        self.trace.append(text)
