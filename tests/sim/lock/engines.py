"""The parts of a simulated pod (trees of processes, connections, supervisors), what supervisors and
their trees do by themselves, as the lock's protocol requires, and what engines do that are told to
end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockserver.core import events as ev
from lockserver.core.names import ServingFile, WitnessFile
from lockserver.messages import GrantedMsg, StandbyMsg
from lockserver.witness import name_of
from plumbing.pod.models import ACTIVE as ACTIVE
from plumbing.pod.models import lock_of

if TYPE_CHECKING:
    from tests.sim.lock.world import World


@dataclass(slots=True, eq=False)
class Worker:
    """A process that accepts requests (place 0) or maps KV memory (1), where engines hand over in
    place. `held` and `used`: the token for which it holds the serving file, and serves."""

    place: int
    held: int = 0
    file: ServingFile | None = None  # the one that it holds
    used: int = 0
    is_child: bool = False  # forked from another
    is_dying: bool = False
    orders: deque[tuple[str, int]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Tree:
    """One incarnation's processes, by their relation to its witness."""

    incarnation: str
    witness: WitnessFile
    sup: Sup
    holding: int = 1
    coming: int = 0  # forked, but has not locked the witness yet; it may do so very late
    strays: int = 0  # hold the witness, and are not killed with the tree
    helpers: int = 0  # of the tree, without the witness: they may open no device
    has_helper_on_device: bool = False  # one does, against the rule
    is_doomed: bool = False  # SIGKILL was sent to all but the strays
    is_hurt: bool = False  # one process has died by itself
    is_sealed: bool = False
    is_removed: bool = False  # the witness file has been removed
    is_told: bool = False  # it believes that it is active
    was_held: bool = False  # the witness that the server found when it asked
    is_disowned: bool = False  # a server knows that it is over
    # Where engines hand over in place:
    workers: list[Worker] = field(default_factory=list)
    made: ServingFile | None = None  # the serving file that was made with it
    serving: ServingFile | None = None  # the one that has its name now
    length: int = 0  # of that one
    is_serving: bool = False
    is_resting: bool = False
    over: int = 0  # the last token that it has handed over
    heard_over: int = 0  # the largest such token that this server has heard
    freed: int = 0  # the last token that its serving file has proven to be over

    @property
    def is_alive(self) -> bool:
        return self.holding > 0 or self.strays > 0

    @property
    def uses_device(self) -> bool:
        """Whether a process of it can still read or write the device's memory."""
        return self.is_alive or (self.helpers > 0 and self.has_helper_on_device)


@dataclass(slots=True, eq=False)
class Conn:
    """A connection; `up` holds what supervisors sent (`Said`), `down` what the server sent."""

    id: int
    sup: Sup
    up: deque[Said] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    client_open: bool = True
    server_open: bool = True


@dataclass(slots=True)
class Said:
    """A `want` in flight, without what the server will find at the witness."""

    tree: Tree | None
    token: int
    over: int = 0
    is_wanted: bool = True  # where there is a tree
    is_leaving: bool = False
    succeeds: int = 0
    progress: int = 0


@dataclass(slots=True, eq=False)
class Sup:
    """A supervisor's process. `number` is its pid; a new process is a new `Sup`."""

    id: str
    engine: str
    number: int
    model: str = ""
    is_alive: bool = True
    is_stopped: bool = False
    is_patient: bool = False  # was refused, and retries when time has passed
    is_killing: bool = False
    is_known_gone: bool = False  # the pidfd has reported its end to this server
    launches: int = 0  # of this engine
    beats: int = 0
    heard_ms: float = 0.0
    conn: Conn | None = None
    served: Conn | None = None  # the newest connection on which this server received its messages
    newest: int = -1  # the number of the last one
    tree: Tree | None = None
    token: int = 0
    # Where engines are told to end (`engines.py`):
    is_ordered: bool = False  # the order is on its way
    is_leaving: bool = False
    awaits_answer: bool = False
    knows: int = 0  # the token of a holder that leaves, as it has heard
    succeeds: int = 0  # for which it vouches

    @property
    def active(self) -> str:
        """The lock of its model."""
        return lock_of(self.model)


CONTINUATION = "one model, one release"
LOST = ("lock.stale_claim", "lock.incarnation_ended")  # refusals that end an incarnation


class Supervisors:
    def __init__(self, world: World) -> None:
        self.world = world

    def moves(self) -> list[tuple[Any, Any]]:
        """What each running supervisor could do now, and what becomes of the dead ones."""
        world = self.world
        found: list[tuple[Any, Any]] = []
        for sup in world.sups:
            if sup.is_stopped:
                continue
            if not sup.is_alive:
                if world.is_process_gone(sup) and world.may_return(sup):
                    found.append((world.replace, sup))
                continue
            conn, tree = sup.conn, sup.tree
            if conn is None:
                if world.server.machine is not None and not sup.is_patient:
                    found.append((self.connect, sup))
            elif conn.down:
                found.append((self.hear, sup))
            elif not conn.server_open:
                found.append((self.see_eof, sup))
            if tree is None:
                if sup.launches < world.launches_max and not sup.is_leaving:
                    found.append((self.launch, sup))
            elif sup.is_killing:
                if not (tree.holding or tree.coming or tree.helpers):
                    found.append((self.reap, sup))
            elif tree.is_hurt:
                found.append((self.give_up, sup))
        for tree in world.living:
            if tree.is_doomed:
                if tree.coming:
                    found.append((self.die_on_the_way, tree))
                if tree.holding:
                    found.append((self.die, tree))
                if tree.helpers:
                    found.append((self.end_helper, tree))
        return found

    # ------------------------------------------------------------------ sending

    def connect(self, sup: Sup) -> None:
        sup.conn = self.world.new_conn(sup)
        self.say(sup)

    def say(self, sup: Sup) -> None:
        if sup.conn is not None and sup.conn.server_open:
            tree = sup.tree
            over = tree.over if tree is not None and self.world.serving.says_over else 0
            sup.beats += 1
            more = sup.is_leaving, sup.succeeds, sup.beats
            said = Said(tree, sup.token, over, True, *more)
            sup.conn.up.append(said)

    def beat(self, sup: Sup) -> None:
        """A heartbeat that arrives at once, if nothing else is in flight."""
        conn = sup.conn
        if not sup.is_alive or sup.is_stopped or conn is None or conn is not sup.served:
            return
        if conn.server_open and not conn.up and self.world.server.machine is not None:
            sup.beats += 1
            sup.heard_ms = self.world.now_ms
            self.world.server.feed("beaten", conn.id, sup.beats)

    # ------------------------------------------------------------------ receiving

    def hear(self, sup: Sup) -> None:
        assert sup.conn is not None
        message, tree = sup.conn.down.popleft(), sup.tree
        departures = self.world.departures
        if isinstance(message, StandbyMsg):
            assert departures is not None
            departures.heard_news(sup, message)
            return
        if departures is not None and isinstance(message, GrantedMsg) and message.is_leaving:
            departures.heard_leaving(sup, message)
        if isinstance(message, ev.RefuseConnection):
            sup.is_patient = True
            if message.code in LOST:
                self.give_up(sup)
        elif tree is None or sup.is_killing:
            return
        elif message.incarnation == tree.incarnation:
            self.won(sup, tree, message.lock, message.token)
        elif message.lock == sup.active and tree.is_told and message.engine != sup.engine:
            self.give_up(sup)  # another engine was granted the lock

    def won(self, sup: Sup, tree: Tree, lock: str, token: int) -> None:
        if lock == sup.active:
            if token <= tree.over and self.world.serving.ignores_old_grants:
                return
            self.world.promises.obeys(tree, token)
            if tree.is_told and sup.token != token:
                self.give_up(sup)  # its token has changed: it does not know why
                return
            if not tree.is_told:
                self.world.serving.wake(tree, token)
            sup.token = token
            tree.is_told = True

    def see_eof(self, sup: Sup) -> None:
        assert sup.conn is not None
        sup.conn.client_open, sup.conn = False, None
        self.world.forget_closed()

    # ------------------------------------------------------------------ trees

    def launch(self, sup: Sup) -> None:
        world = self.world
        number = world.next_number()
        incarnation = f"{sup.engine}-{number:016x}"
        tree = Tree(incarnation, WitnessFile(name_of(incarnation), 1, number), sup)
        tree.coming = int(world.has_late)
        if world.hand_overs is not None:
            world.serving.equip(tree)
        sup.tree, sup.launches = tree, sup.launches + 1
        world.trees[incarnation] = tree
        world.living.append(tree)
        self.say(sup)

    def give_up(self, sup: Sup) -> None:
        if sup.tree is not None:
            sup.tree.is_doomed = sup.is_killing = True

    def reap(self, sup: Sup) -> None:
        """All its own processes are dead: its want no longer names the incarnation."""
        sup.tree, sup.is_killing = None, False
        sup.token = 0
        self.say(sup)

    def die(self, tree: Tree) -> None:
        if tree.workers:
            self.world.serving.end_worker((tree, tree.workers[-1]))
            return
        tree.holding -= 1
        self.world.forget_dead(tree)

    def end_helper(self, tree: Tree) -> None:
        """A helper ends, or is killed; it may be the last of its tree."""
        tree.helpers = 0
        self.world.forget_dead(tree)

    def die_on_the_way(self, tree: Tree) -> None:
        tree.coming -= 1
        self.world.forget_dead(tree)


class Departures:
    """Engines that are told to end: one, or everybody at once, in any order, with any delay.

    An order is on its way until its supervisor takes it (`be_told`). The active engine then waits
    for the lock server's answer, or no longer; it leaves its streams to a successor or finishes
    them; it gives up, reaps and exits. The others give up at once. A supervisor that hears that the
    holder leaves vouches at any later time, unless it has taken an order by then.

    What an engine does by rule is an attribute here, so that a test can leave it out.
    """

    vouches_untold = True  # it vouches for nobody once it was told to end itself
    waits_for_settled = True  # news from before the server knew of the order are no answer

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_everybody_told = False
        self.left = 0  # how often streams were left to a successor
        self.finished = 0

    def moves(self) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = []
        for sup in self.world.sups:
            if not sup.is_alive or sup.is_stopped:
                continue
            if sup.is_ordered:
                found.append((self.be_told, sup))
            may_vouch = not sup.is_leaving or not self.vouches_untold
            if may_vouch and sup.knows not in (0, sup.succeeds):
                found.append((self.vouch, sup))
            if sup.awaits_answer:
                found.append((self.stop_waiting, sup))
            elif sup.is_leaving and sup.tree is None:
                found.append((self.exit, sup))
            elif sup.is_leaving and not sup.is_killing:
                found.append((self.finish, sup))
        return found

    def faults(self) -> list[tuple[Any, Any]]:
        if self.is_everybody_told:
            return []
        fresh = [s for s in self.world.sups if s.is_alive and not (s.is_ordered or s.is_leaving)]
        return [(self.tell_all, None), *((self.tell_one, sup) for sup in fresh)]

    # ------------------------------------------------------------------ orders

    def tell_all(self, _: None) -> None:
        """The pod is stopped: nothing that ends is started again."""
        self.is_everybody_told = True
        for sup in self.world.sups:
            sup.is_ordered |= sup.is_alive and not sup.is_leaving

    def tell_one(self, sup: Sup) -> None:
        sup.is_ordered = True

    def be_told(self, sup: Sup) -> None:
        sup.is_ordered, sup.is_leaving = False, True
        if sup.tree is not None and sup.tree.is_told and not sup.is_killing:
            sup.awaits_answer = True
        else:
            self.world.supervisors.give_up(sup)
        self.world.supervisors.say(sup)

    # ------------------------------------------------------------------ the successor

    def heard_leaving(self, sup: Sup, message: GrantedMsg) -> None:
        if message.lock == sup.active and message.engine != sup.engine:
            sup.knows = message.token

    def vouch(self, sup: Sup) -> None:
        sup.succeeds = sup.knows
        self.world.promises.vouches(sup, sup.succeeds)
        self.world.supervisors.say(sup)

    # ------------------------------------------------------------------ the engine that leaves

    def heard_news(self, sup: Sup, news: StandbyMsg) -> None:
        is_mine = sup.tree is not None and news.incarnation == sup.tree.incarnation
        is_answer = news.is_settled or not self.waits_for_settled
        if is_mine and sup.awaits_answer and is_answer:
            sup.awaits_answer = False
            if news.continues:
                self.left += 1
                self.world.promises.left_streams(sup, sup.token)

    def stop_waiting(self, sup: Sup) -> None:
        """No answer came in time."""
        sup.awaits_answer = False
        self.finished += 1

    def finish(self, sup: Sup) -> None:
        self.world.supervisors.give_up(sup)

    def exit(self, sup: Sup) -> None:
        self.world.faults.kill_supervisor(sup)
