"""The server around the machine, as the simulation has it: a disk, probes, connections.

It does what `server.py`, `prober.py` and `state_file.py` do, and has each act of
the machine checked (`promises.py`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from lockserver.core import events as ev
from lockserver.core import recovery
from lockserver.core.lock import locks_of
from lockserver.core.machine import LockMachine
from lockserver.core.names import ServingFile, WitnessState
from lockserver.core.recovery import DueEvidence
from lockserver.messages import GrantedMsg, StandbyMsg, WantMsg
from tests.sim.lock.engines import CONTINUATION, Conn, Said, Sup, Tree

if TYPE_CHECKING:
    from tests.sim.lock.world import World

FIRST_ERA = f"{1:016x}"
NO_MACHINE = "the server is down"


class DiedError(Exception):
    """The server has died in the middle of an event."""


class Server:
    def __init__(self, world: World, models: tuple[str, ...]) -> None:
        self.world, self.models = world, models
        self.machine: LockMachine | None = None
        self.slots: list[ev.LockRecord | None] = [
            ev.LockRecord(era=FIRST_ERA),
            ev.LockRecord(era=FIRST_ERA),
        ]  # the newest is the last
        self.starts = 1  # after a loss: a new era each, in names
        self.disk_fails = False
        self.is_short = False  # of descriptors: no witness can be looked at
        self.dies_after_write = False
        self.watched: dict[str, Sup] = {}  # supervisors whose pidfd this server has
        self.closing: deque[Conn] = deque()  # closed by the server; the loop reports it later

    # ------------------------------------------------------------------ its life

    def start(self) -> None:
        record = self.slots[1]
        readable = [slot for slot in self.slots if slot is not None]
        if len(readable) < 2 or record is None:  # like the state file: one bad slot is a lost slot
            self.starts += 1
            record = ev.LockRecord(
                max((slot.token for slot in readable), default=0) + 1,
                unknown=frozenset(locks_of(self.models)),
                era=readable[0].era if readable else f"{self.starts:016x}",
            )
            self.slots = [record, record]
            self.world.promises.state_lost(is_whole=not readable)
        is_first = not self.world.promises.eras
        self.world.promises.era_began(record.era, is_new=is_first or not readable)
        self.machine = LockMachine(record, self.write, self.world.now_ms, models=self.models)
        self.world.promises.server_started()
        self.perform(self.machine.begin())

    def kill(self) -> None:
        self.machine = None
        self.dies_after_write = False
        self.watched.clear()
        self.closing.clear()
        for conn in self.world.conns:
            conn.server_open = False
            conn.up.clear()
        self.world.forget_closed()

    def feed(self, event: str, *said: Any) -> None:
        """`event`: an entry of the machine."""
        assert self.machine is not None, NO_MACHINE
        try:
            self.perform(getattr(self.machine, event)(self.world.now_ms, *said))
        except DiedError:
            self.kill()

    # ------------------------------------------------------------------ effects

    def perform(self, effects: list[ev.LockEffect]) -> None:
        promises = self.world.promises
        for effect in effects:
            if isinstance(effect, ev.Happened):
                continue
            if isinstance(effect, ev.Send):
                if isinstance(effect.message, GrantedMsg):
                    grant = effect.message
                    promises.granted(grant.lock, self.holder_of(grant.lock), grant.era)
                elif isinstance(effect.message, StandbyMsg) and self.world.departures is not None:
                    token = self.holder_of(effect.message.lock).token
                    promises.told_of_standby(effect.message, token)
                elif isinstance(effect.message, StandbyMsg):
                    continue
                self.send(effect.conn, effect.message)
            elif isinstance(effect, ev.Announce):
                self.announce(effect)
            elif isinstance(effect, ev.RefuseConnection | ev.Close):
                self.close(effect)
            elif isinstance(effect, ev.Forget):
                self.watched.pop(effect.supervisor, None)

    def announce(self, effect: ev.Announce) -> None:
        assert self.machine is not None, NO_MACHINE
        for known in self.machine.supervisors.values():
            if known.conn is not None and known.id != effect.supervisor:
                self.send(known.conn, effect.message)

    def write(self, record: ev.LockRecord) -> str | None:
        if self.disk_fails:
            return "a full disk"
        self.slots = [self.slots[1], record]
        self.world.promises.written(record)
        if self.dies_after_write:
            self.world.trace.append("the server dies between writing and sending")
            raise DiedError
        self.remove_dead(record)
        return None

    def remove_dead(self, record: ev.LockRecord) -> None:
        """The witnesses that no process holds, but those on file and of connected supervisors."""
        assert self.machine is not None, NO_MACHINE
        kept = {holder.witness.name for holder in record.holders.values()}
        kept |= recovery.kept_witnesses(self.machine.supervisors)
        for tree in self.world.trees.values():
            if not tree.is_alive and tree.witness.name not in kept:
                tree.is_removed = True

    def conn_of(self, conn_id: int) -> Conn | None:
        return next((conn for conn in self.world.conns if conn.id == conn_id), None)

    def send(self, conn_id: int, message: Any) -> None:
        conn = self.conn_of(conn_id)
        if conn is not None and conn.client_open and conn.server_open:
            conn.down.append(message)

    def close(self, effect: ev.RefuseConnection | ev.Close) -> None:
        conn = self.conn_of(effect.conn)
        if conn is None or not conn.server_open:
            return
        if isinstance(effect, ev.RefuseConnection):
            self.send(conn.id, effect)
            self.world.promises.refused(conn)
        conn.server_open = False
        conn.up.clear()
        self.closing.append(conn)

    # ------------------------------------------------------------------ possible moves

    def moves(self) -> list[tuple[Any, Any]]:
        """What could happen next in the server, in any order."""
        machine = self.machine
        if machine is None:
            return [(self.restart, None)]
        found: list[tuple[Any, Any]] = []
        for conn in self.world.conns:
            if conn.server_open:
                if conn.up:
                    found.append((self.receive, conn))
                elif not conn.client_open:
                    found.append((self.see_eof, conn))
        if self.closing:
            found.append((self.finish_close, None))
        found += [(self.see_exit, s) for s in self.watched.values() if not s.is_alive]
        if self.is_short:
            return found
        trees = self.world.trees
        due = recovery.evidence_due(machine.locks, machine.supervisors)
        for lock in machine.locks.values():
            if lock.holder is None:
                if lock.is_unknown and recovery.scan_frees(
                    machine.locks, machine.supervisors, self.held(), self.serving_held()
                ):
                    found.append((self.scan, None))
            elif not trees[lock.holder.incarnation].is_alive:
                tree = trees[lock.holder.incarnation]
                is_due = DueEvidence(lock.name, tree.incarnation, lock.holder.witness) in due
                if is_due and not tree.is_removed:
                    found.append((self.probe, (lock.name, tree)))
        for name, incarnation, file, _ in due:
            tree = trees[incarnation]
            is_serving = isinstance(file, ServingFile)
            if is_serving and self.is_filed(tree, file) and not self.is_serving_held(tree):
                found.append((self.probe_serving, (name, tree)))
        return found

    def restart(self, _: None) -> None:
        self.start()

    def receive(self, conn: Conn) -> None:
        self.hear(conn, conn.up.popleft())

    def look(self, tree: Tree | None) -> WitnessState:
        if tree is not None and not tree.is_sealed and not tree.is_removed:
            return WitnessState.HELD if tree.is_alive else WitnessState.FREE
        return WitnessState.UNPROVEN

    def hear(self, conn: Conn, said: Said) -> None:
        """A `want` arrives; the server looks at the witness that it names."""
        sup, tree = conn.sup, said.tree
        if tree is not None and self.is_short:
            self.close(ev.RefuseConnection(conn.id, "lock.witness_unseen", "ask again"))
            self.finish(self.closing.pop())
            return
        event = ev.Wanted(
            conn.id,
            WantMsg(
                sup.id,
                sup.engine,
                incarnation=tree.incarnation if tree else None,
                lock=sup.active,
                is_wanted=tree is not None and said.is_wanted,
                token=said.token,
                over=said.over,
                continuation=CONTINUATION if self.world.departures is not None else "",
                is_leaving=said.is_leaving,
                succeeds=said.succeeds,
                progress=said.progress,
            ),
            witness_file=tree.witness if tree and not tree.is_removed else None,
            witness_state=self.look(tree),
            pid=sup.number,
            process=self.world.process,
            serving=tree.serving if tree else None,
        )
        self.judge(conn, said, event)

    def judge(self, conn: Conn, said: Said, event: ev.Wanted) -> None:
        sup = conn.sup
        machine, promises = self.machine, self.world.promises
        assert machine is not None, NO_MACHINE
        holders = {name: lock.holder for name, lock in machine.locks.items()}
        effects: list[ev.LockEffect] = []
        try:
            effects = machine.wanted(self.world.now_ms, event)
        except DiedError:
            self.kill()
        codes = [
            e.code for e in effects if isinstance(e, ev.RefuseConnection) and e.conn == conn.id
        ]
        owed = promises.heard(conn, said, holders, codes, event)
        if self.machine is None:
            return  # it died between write and send
        self.perform(effects)
        known = self.machine.supervisors.get(sup.id)
        if known is not None and known.conn == conn.id and self.world.has_pidfd:
            self.watched[sup.id] = sup
        promises.answered(owed)

    def see_eof(self, conn: Conn) -> None:
        conn.server_open = False
        self.finish(conn)

    def finish_close(self, _: None) -> None:
        self.finish(self.closing.popleft())

    def finish(self, conn: Conn) -> None:
        self.world.promises.closed(conn)
        self.feed("connection_closed", conn.id)
        self.world.forget_closed()

    def see_exit(self, sup: Sup) -> None:
        """The pidfd of PID 1 of a container is readable once its whole tree is dead."""
        if self.world.is_process_gone(sup):
            del self.watched[sup.id]
            self.world.promises.gone(sup)
            self.feed("process_gone", sup.id)

    def probe(self, subject: tuple[str, Tree]) -> None:
        lock, tree = subject
        self.seal(tree)
        self.world.promises.freed_by_witness(tree, self.holder_of(lock).token)
        self.feed("evidence_gone", DueEvidence(lock, tree.incarnation, tree.witness))

    def holder_of(self, lock: str) -> ev.Holder:
        holder = self.machine.locks[lock].holder if self.machine is not None else None
        assert holder is not None
        return holder

    def probe_serving(self, subject: tuple[str, Tree]) -> None:
        lock, tree = subject
        token = self.holder_of(lock).token
        self.seal_serving(tree, token)
        self.world.promises.freed_by_serving_file(tree, token)
        file = self.holder_of(lock).serving
        assert file is not None
        self.feed("evidence_gone", DueEvidence(lock, tree.incarnation, file, token))

    def is_filed(self, tree: Tree, file: ServingFile) -> bool:
        return tree.serving == file

    def is_serving_held(self, tree: Tree) -> bool:
        """Whether a process holds the file that has the name of this tree's serving file."""
        return any(worker.held and worker.file == tree.serving for worker in tree.workers)

    def serving_held(self) -> frozenset[str]:
        held = (t.serving for t in self.world.living if t.serving and self.is_serving_held(t))
        return frozenset(file.name for file in held)

    def held(self) -> frozenset[str]:
        return frozenset(t.witness.name for t in self.world.living if t.is_alive)

    def scan(self, _: None) -> None:
        assert self.machine is not None, NO_MACHINE
        kept = recovery.kept_witnesses(self.machine.supervisors)
        for tree in self.world.trees.values():
            if not tree.is_alive and tree.witness.name not in kept:
                self.seal(tree)
        self.feed("directory_scanned", self.held(), self.serving_held(), self.seal_all_serving())

    def seal_all_serving(self) -> int:
        """Where that frees a lock: the token at which every serving file is sealed."""
        assert self.machine is not None, NO_MACHINE
        held = self.held(), self.serving_held()
        if not recovery.scan_frees(self.machine.locks, self.machine.supervisors, *held):
            return 0
        kept = recovery.kept_serving(self.machine.locks)
        trees = self.world.trees.values()
        token = max(self.machine.ledger.token, *(t.length for t in trees), 0)
        for tree in trees:
            file = tree.serving
            if file is not None and file.name not in kept and not self.is_serving_held(tree):
                self.seal_serving(tree, token)
        return token

    def seal(self, tree: Tree) -> None:
        tree.is_sealed = True

    def seal_serving(self, tree: Tree, token: int) -> None:
        tree.length = max(tree.length, token)
