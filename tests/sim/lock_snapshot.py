"""One world as a plain value: two worlds are equal if the same can happen in both.

It leaves out what is only displayed, absolute times, and the numbers in names: supervisors,
incarnations and connections are named by engine and by order. The two engines are interchangeable,
so of the two ways to order them the smaller value is taken.
"""

from __future__ import annotations

from typing import Any

from lockserver.core import events as ev
from tests.sim.lock_parts import Conn, Said, Sup, Tree
from tests.sim.lock_world import STEP_MS, World

WAIT_MS = 4 * STEP_MS


def snapshot(world: World) -> str:
    return min(Names(world, order).value() for order in ((0, 1), (1, 0)))


class Names:
    """Names of everything, with the engines in this order."""

    def __init__(self, world: World, order: tuple[int, int]) -> None:
        self.world = world
        self.engine = {f"engine-{number}": order[number] for number in (0, 1)}
        trees, sups = self.referenced()
        self.tree_names = self.by_engine(
            {tree.incarnation: int(tree.incarnation[-16:], 16) for tree in trees},
            {tree.incarnation: tree.sup.engine for tree in trees},
        )
        sups |= {tree.sup for tree in trees}
        self.sup_names = self.by_engine(
            {sup.id: sup.number for sup in sups}, {sup.id: sup.engine for sup in sups}
        )
        self.conn_names = {conn.id: place for place, conn in enumerate(world.conns)}

    def by_engine(self, numbers: dict[str, int], engines: dict[str, str]) -> dict[str, Any]:
        names: dict[str, Any] = {}
        counts = [0, 0]
        for name in sorted(numbers, key=numbers.__getitem__):
            engine = self.engine[engines[name]]
            names[name] = engine * 100 + counts[engine]
            counts[engine] += 1
        return names

    def referenced(self) -> tuple[set[Tree], set[Sup]]:
        world = self.world
        trees, sups = set(world.living), set(world.sups)
        sups.update(world.shell.watched.values(), world.law.known.values())
        for conn in world.conns:
            sups.add(conn.sup)
            trees.update(said.tree for said in conn.up if said.tree is not None)
        trees.update(said.tree for said, _ in world.shell.unseen.values() if said.tree is not None)
        trees.update(sup.tree for sup in sups if sup.tree is not None)
        incarnations = {
            holder.incarnation
            for slot in world.shell.slots
            if slot is not None
            for holder in slot.holders.values()
        }
        machine = world.shell.machine
        if machine is not None:
            for lock in machine.locks.values():
                if lock.holder is not None:
                    incarnations.add(lock.holder.incarnation)
                incarnations.update(waiter.incarnation for waiter in lock.waiters)
            incarnations.update(
                known.incarnation for known in machine.supervisors.values() if known.incarnation
            )
        trees.update(world.trees[incarnation] for incarnation in incarnations)
        trees |= {tree for tree, _ in world.law.last.values()}
        return trees, sups

    # ------------------------------------------------------------------ values

    def value(self) -> str:
        world, shell = self.world, self.world.shell
        by_name = self.sup_names
        sups = sorted((by_name[sup.id], self.sup(sup)) for sup in world.sups)
        trees = sorted((name, self.tree(world.trees[key])) for key, name in self.tree_names.items())
        return repr(
            (
                sups,
                trees,
                [self.conn(conn) for conn in world.conns],
                [self.record(slot) for slot in shell.slots],
                (shell.disk_fails, shell.is_short, shell.dies_after_write, world.faults.twins),
                world.hand_overs,
                [(self.conn_names[c.id], self.said(each)) for c, (each, _) in shell.unseen.items()],
                sorted(by_name[each] for each in shell.watched),
                [self.conn_names.get(conn.id) for conn in shell.closing],
                self.machine(),
                self.law(),
            )
        )

    def holder(self, holder: ev.Holder | None) -> Any:
        if holder is None:
            return None
        name = self.tree_names.get(holder.incarnation)
        if self.world.hand_overs is None or name is None:
            return name, holder.token
        return name, holder.token, holder.serving == self.world.trees[holder.incarnation].serving

    def sup(self, sup: Sup) -> Any:
        silence = int((self.world.now_ms - sup.heard_ms) / WAIT_MS)
        return (
            sup.is_alive,
            sup.is_stopped,
            sup.is_patient,
            sup.is_killing,
            sup.is_known_gone,
            sup.launches,
            min(2, silence),
            self.conn_names.get(sup.conn.id) if sup.conn else None,
            self.conn_names.get(sup.served.id) if sup.served else None,
            self.tree_names[sup.tree.incarnation] if sup.tree else None,
            sup.tokens,
        )

    def tree(self, tree: Tree) -> Any:
        flags = (
            tree.is_doomed,
            tree.is_hurt,
            tree.is_sealed,
            tree.is_removed,
            tree.is_told,
            tree.was_held,
            tree.is_disowned,
        )
        name = self.sup_names[tree.sup.id]
        here = (name, tree.holding, tree.coming, tree.strays, tree.helpers, flags)
        return (*here, self.serving(tree)) if tree.made else here

    def serving(self, tree: Tree) -> Any:
        """What a hand-over in place depends on."""
        workers = [
            (
                (each.place, each.held, each.used, each.is_child, each.is_dying),
                each.file == tree.serving,
                list(each.orders),
            )
            for each in tree.workers
        ]
        overs = (tree.over, tree.heard_over, tree.freed)
        is_own = tree.serving == tree.made
        return (workers, is_own, tree.length, tree.is_serving, tree.is_resting, overs)

    def conn(self, conn: Conn) -> Any:
        up = [self.said(each) for each in conn.up]
        down = [
            self.holder(m.holder) if isinstance(m, ev.SendGrant) else getattr(m, "code", "close")
            for m in conn.down
        ]
        known = (
            machine.supervisors.get(conn.sup.id) if (machine := self.world.shell.machine) else None
        )
        is_replaced = known is not None and conn.id < known.newest
        ends = (conn.client_open, conn.server_open, is_replaced, conn.id < conn.sup.newest)
        return (self.sup_names[conn.sup.id], up, down, ends)

    def said(self, said: Said) -> Any:
        name = self.tree_names[said.tree.incarnation] if said.tree else None
        return (name, said.tokens, said.over)

    def record(self, record: ev.LockRecord | None) -> Any:
        if record is None:
            return None
        holders = [self.holder(holder) for holder in record.holders.values()]
        return (record.token, holders, sorted(record.unknown))

    def machine(self) -> Any:
        machine = self.world.shell.machine
        if machine is None:
            return None
        known = sorted(
            (
                self.sup_names.get(each.id, each.engine),
                self.conn_names.get(each.conn) if each.conn is not None else None,
                self.tree_names[each.incarnation] if each.incarnation else None,
                each.locks,
                dict(each.tokens),
                dict(each.over),
                each.is_silent,
            )
            for each in machine.supervisors.values()
        )
        locks = [
            (
                lock.state.value,
                self.holder(lock.holder),
                [self.tree_names[waiter.incarnation] for waiter in lock.waiters],
                (lock.is_ended, lock.is_handed_over),
            )
            for lock in machine.locks.values()
        ]
        ledger = machine.ledger
        ended = sorted(
            self.tree_names.get(tree.incarnation, -1)
            for tree in self.world.trees.values()
            if tree.witness.name in ledger._ended
        )
        return (known, locks, ledger.token, ledger.problem is None, ledger._writes_due, ended)

    def law(self) -> Any:
        law = self.world.law
        asked = sorted((at, tree.incarnation) for tree, at in law.asked.values())
        return (
            law.token_max,
            sorted(law.sent_max.items()),
            sorted((token, self.tree_names.get(who[1])) for token, who in law.sent.items()),
            sorted(law.old_tokens),
            *((self.tree_names[tree.incarnation], token) for tree, token in law.last.values()),
            [self.tree_names.get(incarnation) for _, incarnation in asked],
            sorted(self.sup_names[sup.id] for sup in law.known.values()),
        )
