"""A whole pod around the pure lock machine: supervisors, trees, witnesses, connections, a disk.

Only the machine is real, and nothing sleeps. `moves` happen by themselves, `faults` are injected;
the driver of a world (a seeded generator, Hypothesis, an exhaustive search) picks one, and `do`
carries it out and has the promises checked. Time passes only by `wait`.

    server   the server and its disk                engines  supervisors, trees, connections
    serving  a hand-over in place: processes that join and leave a serving file
    faults   what goes wrong     promises  what must always hold      planted  rules left out
"""

from __future__ import annotations

import random
from typing import Any

from plumbing.pod.models import lock_of
from tests.sim.lock.engines import Conn, Departures, Sup, Supervisors, Tree, Worker
from tests.sim.lock.faults import Faults
from tests.sim.lock.promises import Promises
from tests.sim.lock.server import Server
from tests.sim.lock.serving import Serving

Move = tuple[Any, Any]  # what to call, and with what

STEP_MS = 900.0  # below the second after which the server assumes that it was stopped itself
WAITS_MS = (10.0, STEP_MS, 4 * STEP_MS)  # the last is longer than a supervisor may be silent
FAULT_RATE = 0.12
WAIT_RATE = 0.05
QUIET_FAULT_RATE = 0.7  # if nothing happens by itself


class World:
    def __init__(
        self,
        *,
        engines: int = 2,
        in_container: bool = True,
        has_pidfd: bool = True,
        models: tuple[str, ...] = ("",),
        launches_max: int = 1_000_000,
        has_late: bool = True,
        hand_overs: int | None = None,
        kinds: frozenset[str] | None = None,
        has_helpers: bool = False,
        are_told_to_end: bool = False,
    ) -> None:
        """`models`: of which the engines are in turn. `hand_overs`: how many there may be in place,
        None: no engine has a serving file. `kinds`: the faults that may occur, None: all.
        `has_helpers`: trees have processes that do not hold the witness."""
        self.departures = Departures(self) if are_told_to_end else None
        self.hand_overs, self.kinds, self.models = hand_overs, kinds, models
        self.in_container, self.has_pidfd, self.launches_max = in_container, has_pidfd, launches_max
        self.has_helpers = has_helpers
        self.has_late = has_late  # a process of each tree locks the witness late
        self.process = "SO_PEERPIDFD" if has_pidfd else "none"
        self.now_ms = 0.0
        self.numbers = 0
        self.conns: list[Conn] = []
        self.sups: list[Sup] = []
        self.trees: dict[str, Tree] = {}
        self.living: list[Tree] = []  # trees with a process of any kind
        self.trace: list[Any] = []
        self.promises = Promises(self)
        self.server = Server(self, tuple(filter(None, models)))
        self.supervisors = Supervisors(self)
        self.serving = Serving(self)
        self.faults = Faults(self)
        for number in range(engines):
            self.new_sup(f"engine-{number}")
        self.server.start()

    # ------------------------------------------------------------------ driving the world

    def moves(self) -> list[Move]:
        found = self.server.moves() + self.supervisors.moves()
        if self.departures is not None:
            found += self.departures.moves()
        return found if self.hand_overs is None else found + self.serving.moves()

    def do(self, move: Move) -> None:
        self.trace.append(move)
        move[0](move[1])
        self.promises.check()

    def wait(self, ms: float) -> None:
        """Time passes; every supervisor that runs and is connected sends heartbeats."""
        for sup in self.sups:
            sup.is_patient = False
        while ms > 0:
            self.now_ms += min(ms, STEP_MS)
            ms -= STEP_MS
            for sup in self.sups:
                self.supervisors.beat(sup)
            if self.server.machine is not None:
                self.server.feed("time_passed")

    def random_step(self, rng: random.Random, fault_rate: float = FAULT_RATE) -> None:
        roll = rng.random()
        moves: list[Move] = []
        if roll > WAIT_RATE + fault_rate:
            moves = self.moves()
        if (not moves and fault_rate and rng.random() < QUIET_FAULT_RATE) or roll < fault_rate:
            moves = self.faults.possible()
        if moves:
            self.do(moves[int(rng.random() * len(moves))])
        else:
            self.do((self.wait, WAITS_MS[int(rng.random() * len(WAITS_MS))]))

    def settle(self, rng: random.Random, steps: int = 1500) -> bool:
        """Repair all faults and inject no more: does an engine become active?"""
        self.faults.repair_all()
        for _ in range(steps):
            if self.is_served():
                return True
            self.random_step(rng, fault_rate=0.0)
        return False

    def is_served(self) -> bool:
        """Whether a living engine of each model has been told that it is active, and the server
        knows."""
        return all(self.is_model_served(lock_of(model)) for model in self.models)

    def is_model_served(self, lock: str) -> bool:
        machine = self.server.machine
        holder = machine.locks[lock].holder if machine is not None else None
        return holder is not None and any(
            sup.tree is not None
            and sup.tree.incarnation == holder.incarnation
            and sup.tree.is_told
            and sup.tree.holding > 0
            and (sup.tree.is_serving or self.hand_overs is None)
            and not sup.tree.is_doomed
            and not sup.tree.is_hurt
            and sup.token == holder.token
            for sup in self.sups
            if sup.is_alive
        )

    def story(self) -> list[str]:
        """The trace as text."""
        return [each if isinstance(each, str) else _told(*each) for each in self.trace]

    # ------------------------------------------------------------------ what there is

    def next_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def new_sup(self, engine: str) -> Sup:
        number = self.next_number()
        place = int(engine.rpartition("-")[2])
        sup = Sup(f"{number:016x}", engine, number, self.models[place % len(self.models)])
        self.sups.append(sup)
        return sup

    def new_conn(self, sup: Sup) -> Conn:
        conn = Conn(self.next_number(), sup)
        self.conns.append(conn)
        return conn

    def replace(self, sup: Sup) -> None:
        """What a kubelet does."""
        self.sups.remove(sup)
        self.new_sup(sup.engine).launches = sup.launches

    def may_return(self, sup: Sup) -> bool:
        is_over = self.departures is not None and self.departures.is_everybody_told
        return not is_over and not any(s.is_alive and s.engine == sup.engine for s in self.sups)

    def is_process_gone(self, sup: Sup) -> bool:
        """A supervisor that is PID 1 of its container is gone once its whole tree is dead; strays
        are outside it. Below an init, it is gone by itself: only the witness tells of its tree."""
        tree = sup.tree if self.in_container else None
        return not sup.is_alive and not (tree and (tree.holding or tree.coming or tree.helpers))

    def forget_closed(self) -> None:
        self.conns = [conn for conn in self.conns if conn.server_open or conn.client_open]

    def forget_dead(self, tree: Tree) -> None:
        if not (tree.holding or tree.coming or tree.strays or tree.helpers):
            self.living.remove(tree)


def _told(what: Any, subject: Any) -> str:
    name = str(what.__name__)
    if isinstance(subject, Conn):
        return f"{name} {subject.sup.engine}#{subject.sup.number} on {subject.id}"
    if isinstance(subject, Sup):
        return f"{name} {subject.engine}#{subject.number}"
    if isinstance(subject, Tree):
        return f"{name} {subject.incarnation}"
    if isinstance(subject, Worker):
        return f"{name} worker {subject.place}{' (a child)' if subject.is_child else ''}"
    if isinstance(subject, tuple):
        return f"{name} {' '.join(_told(str, s)[4:] for s in subject)}"
    return name if subject is None else f"{name} {subject}"
