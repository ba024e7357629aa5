"""What must always hold in a simulated pod: the promises of docs/lock.md, as the world sees them.

It keeps its own records (who asked when, what was sent) of what the server receives and sends. It
reads the machine only to ask which witness it would try, and whether a free lock is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lockserver.core import events as ev
from lockserver.core import recovery
from lockserver.core.lock import LockState
from lockserver.core.machine import SILENT_MS
from lockserver.core.names import WitnessState
from lockserver.messages import StandbyMsg
from tests.sim.lock.engines import Conn, Said, Sup, Tree

if TYPE_CHECKING:
    from tests.sim.lock.world import World

# These refusals mean that the sender is not who it claims to be: its message does not count.
IDENTITY = {"lock.engine_id_taken", "lock.identity_changed", "lock.too_many_waiters"}
IDENTITY |= {"lock.bad_want"}  # likewise: it contradicts itself
UNPROVEN = "lock.witness_unproven"
Owed = list[tuple[str, ev.Holder]]


class Promises:
    def __init__(self, world: World) -> None:
        self.world = world
        self.sent: dict[int, tuple[str, str]] = {}  # token → lock and incarnation
        self.old_tokens: set[int] = set()  # sent before the file that named them was lost
        self.token_max = 0  # the largest on disk
        self.sent_max: dict[str, int] = {}  # the largest that was sent, by lock
        self.eras: list[str] = []  # the last one is that of the present file
        self.last: dict[str, tuple[Tree, int]] = {}  # by lock, `active` of each model: who was
        # granted it last, and its token
        self.asked: dict[tuple[str, Sup], tuple[Tree, int]] = {}  # each waiter and its place
        self.known: dict[str, Sup] = {}  # engine → the supervisor that this server knows for it
        self.questions = 0
        self.filed: Mapping[str, ev.Holder] = {}
        self.owed: Owed = []  # grants that the last want must be answered with
        self.leavers: set[str] = set()  # supervisors that told this server that they leave
        self.vouched: set[tuple[str, int]] = set()  # a supervisor, and the holder's token

    # ------------------------------------------------------------------ the server's life

    def server_started(self) -> None:
        self.asked.clear()
        self.known.clear()
        self.leavers.clear()
        for sup in self.world.sups:
            sup.is_known_gone, sup.served = False, None
        for tree in self.world.living:
            tree.heard_over = 0

    def state_lost(self, *, is_whole: bool) -> None:
        """Holders are no longer on file; if both slots are lost, nor is any token."""
        self.last.clear()
        if is_whole:
            self.old_tokens.update(self.sent)
            self.token_max, self.sent_max = 0, {}

    def era_began(self, era: str, *, is_new: bool) -> None:
        """The server starts with `era`, which is a new one if no slot could be read."""
        assert (era not in self.eras) if is_new else (era == self.eras[-1]), f"era {era}"
        self.eras += [era] if is_new else []

    # ------------------------------------------------------------------ what the server receives

    def heard(
        self,
        conn: Conn,
        said: Said,
        holders: Mapping[str, ev.Holder | None],
        codes: Sequence[str],
        event: ev.Wanted,
    ) -> Owed:
        """A want arrived; returns the grants that it must be answered with.

        Args:
            holders: of all locks, before it arrived.
            codes: why it is refused, if it is.
            event: with what the server saw of its witness.
        """
        sup, tree = conn.sup, said.tree
        self.owed = []
        other = self.known.get(sup.engine)
        if not IDENTITY.isdisjoint(codes):
            return self.owed
        holds = any(holder and holder.supervisor == sup.id for holder in holders.values())
        if other is sup and conn.id < sup.newest:
            return self.owed  # a connection that was replaced: outdated
        if codes and other is not sup and not self.holds(sup):
            if other is not None and not self.is_known(other):  # it was a holder: its twin must go
                self.leave(other)
                self.forget(other)
            return self.owed  # it is forgotten at once
        assert other in (None, sup) or holds, f"two supervisors of {sup.engine} are known"
        if conn.id < sup.newest:
            # It has exited and is forgotten, and an older want arrives: what that says is all that
            # the server knows of an incarnation that holds nothing.
            self.leavers.discard(sup.id)
            if tree is not None and all(
                holder is None or holder.incarnation != tree.incarnation
                for holder in holders.values()
            ):
                tree.is_disowned = False
        self.known[sup.engine] = sup
        sup.is_known_gone = False  # sent before it died: its pidfd will report the death again
        sup.served, sup.newest = conn, conn.id
        sup.heard_ms = self.world.now_ms
        if said.is_leaving:
            self.leavers.add(sup.id)
        for lock, holder in holders.items():
            key = (lock, sup)
            if tree is not None:
                tree.heard_over = max(tree.heard_over, said.over)
            if holder is not None and holder.supervisor == sup.id:
                past = self.world.trees[holder.incarnation]
                past.is_disowned |= past is not tree
            holds = tree and holder is not None and holder.incarnation == tree.incarnation
            is_wanted = tree is not None and said.is_wanted and lock == sup.active
            if not is_wanted or (said.is_leaving and not holds):
                self.asked.pop(key, None)
            elif (
                holder is not None
                and holder.incarnation == tree.incarnation
                and not self.has_handed_over(tree, holder.token)
            ):
                if not tree.is_disowned:
                    self.owed.append((lock, holder))
            elif key not in self.asked or self.asked[key][0] is not tree:
                self.asked.pop(key, None)
                self.questions += 1
                self.asked[key] = (tree, self.questions)
                tree.was_held = event.witness_state is WitnessState.HELD
        return self.owed

    def is_known(self, sup: Sup) -> bool:
        machine = self.world.server.machine
        return machine is not None and sup.id in machine.supervisors

    def holds(self, sup: Sup) -> bool:
        assert self.world.server.machine is not None
        locks = self.world.server.machine.locks.values()
        return any(lock.holder is not None and lock.holder.supervisor == sup.id for lock in locks)

    def answered(self, owed: Owed) -> None:
        """That want has been dealt with."""
        assert not owed, f"the holder asked and was not given its grant again: {owed}"

    def forgive(self, stalled_ms: float) -> None:
        """The server itself is stopped: no supervisor becomes silent by that."""
        for sup in {*self.world.sups, *self.known.values()}:
            if self.silence_ms(sup) <= SILENT_MS:
                sup.heard_ms = self.world.now_ms + stalled_ms

    def refused(self, conn: Conn) -> None:
        if conn is conn.sup.served:
            self.leave(conn.sup)

    def closed(self, conn: Conn) -> None:
        sup = conn.sup
        if conn is sup.served:
            sup.served = None
            self.leave(sup)
            if not self.world.has_pidfd:
                self.forget(sup)

    def gone(self, sup: Sup) -> None:
        sup.is_known_gone = True
        self.leave(sup)
        self.forget(sup)

    def leave(self, sup: Sup) -> None:
        self.asked = {key: place for key, place in self.asked.items() if key[1] is not sup}

    def forget(self, sup: Sup) -> None:
        if self.known.get(sup.engine) is sup:
            del self.known[sup.engine]

    # ------------------------------------------------------------------ what the server does

    def written(self, record: ev.LockRecord) -> None:
        """A grant is on disk; from now on it counts, whether or not it is ever sent."""
        for lock, holder in record.holders.items():
            if holder != self.filed.get(lock) and self.sent.get(holder.token) is None:
                assert holder.token > self.token_max, f"{holder.token} after {self.token_max}"
        assert record.token >= self.token_max, f"{record.token} after {self.token_max}"
        self.filed, self.token_max = record.holders, record.token
        for lock, holder in record.holders.items():
            self.filed_active(lock, holder)

    def filed_active(self, lock: str, active: ev.Holder) -> None:
        """Nobody else of the model may be alive, or it has proven that it cannot serve."""
        last, last_token = self.last.get(lock, (None, 0))
        if last is not None and last_token == active.token:
            return
        tree = self.world.trees[active.incarnation]
        for other in self.world.living:
            name = other.incarnation
            if other.sup.model != tree.sup.model:
                continue
            if other is not tree and other.uses_device:
                is_over = other is not last or other.freed >= last_token
                assert is_over, f"granted while the last holder {name} lives"
                assert not other.is_told, f"granted while {name} lives and believes it is active"
            own = active.token if other is tree else 0  # a claim: it serves already
            used = [worker.used for worker in other.workers if worker.used not in (0, own)]
            assert not used, f"granted while {name} serves under {used}"
        self.last[lock] = tree, active.token

    def granted(self, lock: str, holder: ev.Holder, era: str) -> None:
        """A grant is about to be sent to its holder, or repeated to anybody."""
        assert era == self.eras[-1], f"{lock} is granted in era {era}, not {self.eras[-1]}"
        newest = self.sent_max.get(lock, 0)
        assert holder.token >= newest, f"{lock}: token {holder.token} is repeated after {newest}"
        who = (lock, holder.incarnation)
        is_owed = (lock, holder) in self.owed
        if is_owed:
            self.owed.remove((lock, holder))
        tree = self.world.trees[holder.incarnation]
        if self.sent.get(holder.token) == who:
            if self.asked.get((lock, tree.sup), (None, 0))[0] is tree:
                del self.asked[lock, tree.sup]  # its claim was accepted
            return
        is_news = holder.token not in self.sent or holder.token in self.old_tokens
        assert is_news, f"token {holder.token} is sent to a second one"
        self.old_tokens.discard(holder.token)
        before = self.sent_max.get(lock, 0)
        assert holder.token > before, f"{lock}: token {holder.token} is sent after {before}"
        slot = self.world.server.slots[1]
        on_disk = slot.holders.get(lock) if slot is not None else None
        assert on_disk == holder, f"{who} is not on disk"
        assert is_owed or holder.supervisor not in self.leavers, f"{who} is granted, and leaves"
        self.sent[holder.token], self.sent_max[lock] = who, holder.token
        if not is_owed:
            self.in_line(lock, holder)

    def in_line(self, lock: str, holder: ev.Holder) -> None:
        """It asked, is not known to be dead, and no earlier waiter is heard."""
        place = {
            sup.id: (sup, tree, at)
            for (name, sup), (tree, at) in self.asked.items()
            if name == lock
        }
        assert holder.supervisor in place, f"{holder.incarnation} does not wait, or is known dead"
        sup, tree, mine = place[holder.supervisor]
        assert tree.incarnation == holder.incarnation, f"{holder.incarnation} no longer asks"
        assert not self.is_silent(sup), f"{tree.incarnation} is granted in its silence"
        assert tree.was_held, f"{tree.incarnation} asked with a free witness"
        for other, _, at in place.values():
            assert at >= mine or not self.is_heard(other), f"{other.engine} was there before"
        del self.asked[lock, sup]

    # ------------------------------------------------------------------ who was told to end

    def vouches(self, sup: Sup, token: int) -> None:
        assert not sup.is_leaving, f"{sup.engine} vouches, and was told to end"
        self.vouched.add((sup.id, token))

    def told_of_standby(self, news: StandbyMsg, token: int) -> None:
        """A holder that leaves hears of an engine that vouched, and is not known to leave."""
        if news.is_settled and news.is_ready:
            stay = {who for who, what in self.vouched if what == token} - self.leavers
            assert stay, f"{news.incarnation} hears of a successor, and none vouched"

    def left_streams(self, sup: Sup, token: int) -> None:
        """It leaves its streams: another engine knew of its order, and had none itself."""
        others = {who for who, what in self.vouched if what == token} - {sup.id}
        assert others, f"{sup.engine} leaves its streams, and no engine vouched for them"

    # ------------------------------------------------------------------ evidence

    def freed_by_serving_file(self, tree: Tree, token: int) -> None:
        name = tree.incarnation
        assert self.has_handed_over(tree, token), f"{name} loses the lock without its word"
        tree.freed = token

    def obeys(self, tree: Tree, token: int) -> None:
        assert token > tree.over, f"{tree.incarnation} acts on token {token}, which is over"

    def freed_by_witness(self, tree: Tree, token: int) -> None:
        """The witness of the holder of `active` is free; one more piece of evidence is required."""
        assert self.is_over(tree, token) or not self.is_heard(tree.sup), (
            f"{tree.incarnation} loses the lock while its supervisor lives and is heard"
        )

    # ------------------------------------------------------------------ after every step

    def check(self) -> None:
        for model in self.world.models:
            living = [tree for tree in self.world.living if tree.sup.model == model]
            told = [tree.incarnation for tree in living if tree.is_told and tree.uses_device]
            assert len(told) <= 1, f"two active engines: {told}"
            if self.world.hand_overs is not None:
                used = {(t.incarnation, w.used) for t in living for w in t.workers if w.used}
                assert len(used) <= 1, f"two terms may accept or write: {used}"
        machine = self.world.server.machine
        if machine is None:
            return
        for lock in machine.locks.values():
            if lock.state is LockState.FREE:
                if self.asked and machine.ledger.problem is None:
                    late = [s.engine for name, s in self.asked if name == lock.name]
                    assert not any(
                        self.is_heard(s) for name, s in self.asked if name == lock.name
                    ), f"{lock.name} is free while {late} wait"
            elif lock.holder is not None:
                tree = self.world.trees[lock.holder.incarnation]
                is_over = self.is_over(tree, lock.holder.token)
                if not tree.is_alive and (is_over or self.is_silent(tree.sup)):
                    due = recovery.evidence_due(machine.locks, machine.supervisors)
                    assert any(each.file == lock.holder.witness for each in due), (
                        f"{lock.name} waits for the dead"
                    )

    def is_heard(self, sup: Sup) -> bool:
        return self.silence_ms(sup) < SILENT_MS

    def is_silent(self, sup: Sup) -> bool:
        """Whether the tick that follows such a silence has happened."""
        return self.silence_ms(sup) > SILENT_MS + 1000

    def silence_ms(self, sup: Sup) -> float:
        return self.world.now_ms - sup.heard_ms

    def has_handed_over(self, tree: Tree, token: int) -> bool:
        """Whether this server has heard that it has, by itself."""
        return tree.heard_over >= token

    def is_over(self, tree: Tree, token: int) -> bool:
        """Whether this server knows no living supervisor that stands for it under this token."""
        return (
            tree.is_disowned
            or self.has_handed_over(tree, token)
            or tree.sup.is_known_gone
            or self.known.get(tree.sup.engine) is not tree.sup
        )
