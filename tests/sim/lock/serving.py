"""The engines' side of a hand-over in place: processes that join and leave a serving file.

A tree of such a pod has two workers: one accepts requests, one maps KV memory. Each obeys orders,
which may come late. The rules of the engine are class attributes, so that a test can leave one out;
all of them together are what `lockserver/serving.py` and a supervisor must do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from lockserver.core.names import ServingFile, serving_name_of
from lockserver.messages import GrantedMsg
from tests.sim.lock.engines import Conn, Said, Sup, Tree, Worker

if TYPE_CHECKING:
    from tests.sim.lock.world import World

WAKE, REST = "wake", "rest"
DEVICE = 2
Move = tuple[Any, Any]


class Serving:
    joins_first = True  # lock the file, then accept or map
    knows_its_file = True  # joins only the file that was made with its incarnation
    leaves_last = True  # lets go of the file after it has stopped
    closes = True  # never LOCK_UN, which drops the lock for every copy
    on_low_descriptor = True  # a dying process lets go of the file after its device
    accepter_joins = True  # the process that accepts joins, too
    looks_in_proc = True  # before it is active, the supervisor looks who holds the file
    only_when_active = True  # a wake that is broken off ends by the tree's death
    ignores_old_grants = True
    gives_way = True  # not freed within the budget: the tree is killed
    says_over = True  # in each want, for the rest of the incarnation's life

    def __init__(self, world: World) -> None:
        self.world = world

    def equip(self, tree: Tree) -> None:
        """A tree is launched: its serving file is made, and its workers begin."""
        tree.workers = [Worker(0), Worker(1)]
        tree.holding = len(tree.workers)
        self.make_file(tree)
        tree.made = tree.serving

    def make_file(self, tree: Tree) -> None:
        name = serving_name_of(tree.incarnation)
        tree.serving, tree.length = ServingFile(name, DEVICE, self.world.next_number()), 0

    # ------------------------------------------------------------------ moves

    def moves(self) -> list[Move]:
        found: list[Move] = []
        for tree in self.world.living:
            for worker in tree.workers:
                if worker.is_dying:
                    found.append((self.end_worker, (tree, worker)))
                elif worker.orders:
                    found.append((self.obey, (tree, worker)))
        for sup in self.world.sups:
            tree_of = sup.tree
            if tree_of is None or not tree_of.workers or sup.is_killing or tree_of.is_hurt:
                continue
            if sup.is_alive and not sup.is_stopped:
                found += self.supervise(sup, tree_of)
        return found

    def supervise(self, sup: Sup, tree: Tree) -> list[Move]:
        own = [worker for worker in tree.workers if not worker.is_child]
        if tree.is_resting:
            is_idle = not any(each.held or each.used or each.orders for each in own)
            return [(self.hand_on, sup)] if is_idle else []
        if tree.is_serving:
            return [(self.hand_over, sup)] if self.world.hand_overs else []
        if tree.is_told:
            is_up = all(worker.used == sup.token for worker in own)
            return [(self.begin_serving, sup)] if is_up else []
        if self.gives_way and tree.over and self.is_unproven(tree):
            return [(self.world.supervisors.give_up, sup)]
        return []

    def is_unproven(self, tree: Tree) -> bool:
        """It handed over, and the server may wait for its serving file for ever."""
        is_held = any(worker.held or worker.used for worker in tree.workers)
        return is_held or tree.serving != tree.made

    # ------------------------------------------------------------------ a supervisor

    def wake(self, tree: Tree, token: int) -> None:
        for worker in tree.workers:
            if not worker.is_child:
                worker.orders.append((WAKE, token))

    def begin_serving(self, sup: Sup) -> None:
        tree = sup.tree
        assert tree is not None
        blind = any(not each.held and self.must_join(each) for each in tree.workers)
        if blind and self.looks_in_proc:
            self.world.supervisors.give_up(sup)
        else:
            tree.is_serving = True

    def hand_over(self, sup: Sup) -> None:
        """It is asked to: its workers rest."""
        tree = sup.tree
        assert tree is not None
        self.world.hand_overs -= 1
        tree.is_serving, tree.is_resting = False, True
        for worker in tree.workers:
            if not worker.is_child:
                worker.orders.append((REST, sup.token))

    def hand_on(self, sup: Sup) -> None:
        """It says so, and is a standby again."""
        tree = sup.tree
        assert tree is not None
        tree.over, sup.token = sup.token, 0
        tree.is_told = tree.is_serving = tree.is_resting = False
        if not self.says_over and sup.conn is not None:
            sup.conn.up.append(Said(tree, 0, is_wanted=False, progress=sup.beats))
        self.world.supervisors.say(sup)

    # ------------------------------------------------------------------ workers

    def must_join(self, worker: Worker) -> bool:
        return worker.place > 0 or self.accepter_joins

    def obey(self, subject: tuple[Tree, Worker]) -> None:
        """One step of its first order."""
        tree, worker = subject
        what, token = worker.orders[0]
        if what == WAKE:
            self.step_up(tree, worker, token)
            is_done = worker.used and (worker.held or not self.must_join(worker))
        else:
            self.step_down(tree, worker)
            is_done = not worker.used and not worker.held
        if is_done and worker.orders:
            worker.orders.popleft()

    def step_up(self, tree: Tree, worker: Worker, token: int) -> None:
        is_other = any(each not in (0, token) for each in (worker.held, worker.used))
        must_join = self.must_join(worker) and not worker.held
        if is_other:
            self.fail(tree, worker)
        elif must_join and (self.joins_first or worker.used):
            is_wrong = self.knows_its_file and tree.serving != tree.made
            if tree.length >= token or is_wrong:
                self.fail(tree, worker)
            else:
                worker.held, worker.file = token, tree.serving
        else:
            worker.used = token

    def fail(self, tree: Tree, worker: Worker) -> None:
        """It reports an error; its supervisor kills the tree."""
        worker.orders.clear()
        tree.is_hurt = True

    def step_down(self, tree: Tree, worker: Worker) -> None:
        if worker.used and (self.leaves_last or not worker.held):
            worker.used = 0
        elif worker.held:
            for each in tree.workers:
                if each is worker or (not self.closes and each.place == worker.place):
                    each.held = 0

    def end_worker(self, subject: tuple[Tree, Worker]) -> None:
        """A killed process closes its descriptors; what it maps or accepts goes with them."""
        tree, worker = subject
        if worker.held and not self.on_low_descriptor:
            worker.held, worker.is_dying = 0, True
            worker.orders.clear()
            return
        tree.workers.remove(worker)
        tree.holding -= 1
        self.world.forget_dead(tree)

    # ------------------------------------------------------------------ faults

    def faults(self) -> list[Move]:
        sups = [sup for sup in self.world.sups if self.may_pretend(sup)]
        found: list[Move] = [(self.pretend, sup) for sup in sups]
        for tree in self.world.living:
            if not tree.workers:
                continue
            found.append((self.replace_file, tree))
            has_child = any(worker.is_child for worker in tree.workers)
            for worker in tree.workers:
                here = (tree, worker)
                if not (tree.is_doomed or worker.is_dying):
                    found.append((self.kill_worker, here))
                if worker.held and worker.used and not has_child:
                    found.append((self.fork, here))
                if tree.over and not (worker.orders or worker.held or worker.used):
                    found.append((self.wake_late, here))
                order = (WAKE, tree.sup.token)
                is_waking = worker.orders and worker.orders[0] == order
                if is_waking and not (worker.held or worker.used):
                    found.append((self.skip, here))
        found += [
            (self.repeat_grant, conn)
            for conn in self.world.conns
            if any(isinstance(message, GrantedMsg) for message in conn.down)
        ]
        return found

    def may_pretend(self, sup: Sup) -> bool:
        tree = sup.tree
        if tree is None or not tree.is_told or not sup.is_alive or sup.is_killing:
            return False
        return tree.is_serving or tree.is_resting or not self.only_when_active

    def pretend(self, sup: Sup) -> None:
        """It says that it has handed over, while its processes serve on."""
        self.hand_on(sup)

    def kill_worker(self, subject: tuple[Tree, Worker]) -> None:
        subject[0].is_hurt = True
        self.end_worker(subject)

    def fork(self, subject: tuple[Tree, Worker]) -> None:
        """A child shares descriptor and mapping, and is told nothing."""
        tree, worker = subject
        child = Worker(worker.place, worker.held, worker.file, worker.used, is_child=True)
        tree.workers.append(child)
        tree.holding += 1

    def wake_late(self, subject: tuple[Tree, Worker]) -> None:
        """An order to wake, under a token that is over, arrives now."""
        tree, worker = subject
        worker.orders.append((WAKE, tree.over))

    def skip(self, subject: tuple[Tree, Worker]) -> None:
        """It never joins: a hook is missing."""
        _, worker = subject
        worker.used = worker.orders.popleft()[1]

    def replace_file(self, tree: Tree) -> None:
        self.make_file(tree)

    def repeat_grant(self, conn: Conn) -> None:
        """A grant is heard twice."""
        message = next(each for each in conn.down if isinstance(each, GrantedMsg))
        conn.down.append(replace(message))
