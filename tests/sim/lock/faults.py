"""The faults of a simulated pod, and how all of them are repaired in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.lock.engines import Conn, Said, Sup, Tree

if TYPE_CHECKING:
    from tests.sim.lock.world import World

STALL_MS = 60_000.0
NEVER_GRANTED = 1_000_000


class Faults:
    def __init__(self, world: World) -> None:
        self.world = world
        self.twins = 0

    def possible(self) -> list[tuple[Any, Any]]:
        world, server = self.world, self.world.server
        found: list[tuple[Any, Any]] = []
        for sup in world.sups:
            if sup.is_alive:
                found += [
                    (self.kill_supervisor, sup),
                    (self.go_on if sup.is_stopped else self.stop, sup),
                ]
                if sup.conn is not None:
                    found.append((self.cut, sup))
        for tree in world.living:
            if tree.coming:
                found.append((self.join, tree))
            if tree.holding > len(tree.workers) and not tree.is_doomed:
                found.append((self.kill_process, tree))
            if world.has_helpers and not tree.helpers and tree.holding and not tree.is_doomed:
                found.append((self.start_helper, tree))
            if tree.strays:
                found.append((self.end_stray, tree))
            elif tree.holding:
                found.append((self.stray, tree))
        if server.machine is None:
            found += [(self.lose_slot, slot) for slot in (0, 1) if server.slots[slot] is not None]
        else:
            found += [(self.kill_server, None), (self.stall_server, None)]
            if not server.dies_after_write:
                found.append((self.let_die_after_write, None))
            found += [(self.lie, conn) for conn in world.conns if conn.server_open and conn.up]
        found.append((self.repair_disk if server.disk_fails else self.fail_disk, None))
        found.append((self.end_shortage if server.is_short else self.run_short, None))
        if not self.twins:
            found += [(self.twin, sup) for sup in world.sups if sup.is_alive]
        if world.hand_overs is not None:
            found += world.serving.faults()
        if world.departures is not None:
            found += world.departures.faults()
        if world.kinds is not None:
            found = [move for move in found if move[0].__name__ in world.kinds]
        return found

    # ------------------------------------------------------------------ processes

    def kill_process(self, tree: Tree) -> None:
        tree.holding -= 1
        tree.is_hurt = True
        self.world.forget_dead(tree)

    def start_helper(self, tree: Tree) -> None:
        """A process of the tree without the witness, such as Python's resource tracker."""
        tree.helpers = 1

    def join(self, tree: Tree) -> None:
        """A late process opens the witness; if it is sealed or gone, it exits before it opens a
        device."""
        tree.coming -= 1
        if tree.is_sealed or tree.is_removed:
            tree.is_hurt = True
            self.world.forget_dead(tree)
        else:
            tree.holding += 1

    def kill_supervisor(self, sup: Sup) -> None:
        sup.is_alive = sup.is_stopped = False
        if sup.tree is not None:
            sup.tree.is_doomed = True  # killed by init, by PDEATHSIG, or by the kernel after PID 1
        self.cut(sup)

    def stop(self, sup: Sup) -> None:
        sup.is_stopped = True

    def go_on(self, sup: Sup) -> None:
        sup.is_stopped = False

    def stray(self, tree: Tree) -> None:
        """A process that is not killed with the tree holds the witness."""
        tree.strays = 1

    def end_stray(self, tree: Tree) -> None:
        tree.strays = 0
        self.world.forget_dead(tree)

    def twin(self, sup: Sup) -> None:
        """A second supervisor with the same engine id."""
        self.twins += 1
        self.world.new_sup(sup.engine)

    # ------------------------------------------------------------------ connections

    def cut(self, sup: Sup) -> None:
        """The supervisor's end closes; its earlier messages are still in flight, and so is the
        EOF."""
        if sup.conn is not None:
            sup.conn.client_open = False
            sup.conn.down.clear()
            sup.conn = None
            self.world.forget_closed()

    def lie(self, conn: Conn) -> None:
        """A want arrives with a token that was never granted to it."""
        machine = self.world.server.machine
        said: Said = conn.up.popleft()
        is_known = machine is not None and not machine.locks[conn.sup.active].is_unknown
        if is_known and said.tree is not None:
            old = self.world.promises.token_max
            said.token = NEVER_GRANTED if old % 2 else max(1, old - 1)
        self.world.server.hear(conn, said)

    # ------------------------------------------------------------------ the server

    def kill_server(self, _: None) -> None:
        self.world.server.kill()

    def let_die_after_write(self, _: None) -> None:
        self.world.server.dies_after_write = True

    def stall_server(self, _: None) -> None:
        """It is stopped for a minute and receives nothing."""
        self.world.promises.forgive(STALL_MS)
        self.world.now_ms += STALL_MS
        self.world.server.feed("time_passed")

    def lose_slot(self, slot: int) -> None:
        self.world.server.slots[slot] = None

    def fail_disk(self, _: None) -> None:
        self.world.server.disk_fails = True

    def repair_disk(self, _: None) -> None:
        self.world.server.disk_fails = False

    def run_short(self, _: None) -> None:
        """The server's process has no descriptor left: it can look at no witness."""
        self.world.server.is_short = True

    def end_shortage(self, _: None) -> None:
        self.world.server.is_short = False

    # ------------------------------------------------------------------ repair

    def repair_all(self) -> None:
        """Stopped and late processes continue, strays end, the disk works, no shortage; twins are
        removed."""
        world = self.world
        self.repair_disk(None)
        self.end_shortage(None)
        world.server.dies_after_write = False
        self.twins = 1
        for tree in [t for t in world.living if t.strays]:
            self.end_stray(tree)
        for tree in [t for t in world.living if t.coming]:
            self.join(tree)
        engines: set[str] = set()
        for sup in world.sups:
            if sup.is_alive and sup.engine in engines:
                self.kill_supervisor(sup)
            engines.add(sup.engine)
            sup.is_stopped = False
