"""Every order of events for the real lock machine, with two engines and N faults.

    python -m tests.sim.lock_explorer --faults 2

Breadth first over the simulation's world (lock_world.py): every state is expanded by every possible
next event, and equal states (lock_snapshot.py) are visited once, with the most faults that may
still happen. The law of the simulation is checked after every step; at the end, whether every state
has a way, without another fault, to an engine that serves. A problem is printed with its trace: one
with the fewest faults.

What bounds the space: each engine may be launched --launches times; time passes only in steps that
make an unheard supervisor silent; `active` is the only lock; a tree is one process, with --late
two, of which the second may join the witness at any time. Repairs are free: a stopped process
continues, a stray ends, the disk works again.
"""

from __future__ import annotations

import argparse
import copyreg
import gc
import hashlib
import json
import pickle
import sys
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockserver.core.events import Holder, LockRecord
from lockserver.core.lock import Waiter
from lockserver.core.names import ServingFile, WitnessFile
from tests.sim.lock_parts import ACTIVE
from tests.sim.lock_snapshot import WAIT_MS, Names, snapshot
from tests.sim.lock_world import Move, World

KINDS = (
    "kill_process",
    "kill_supervisor",
    "stop",
    "cut",
    "kill_server",
    "let_die_after_write",
    "lose_slot",
    "fail_disk",
    "run_short",
    "stray",
    "lie",
    "twin",
    *("pretend", "skip", "fork", "wake_late", "replace_file", "repeat_grant", "kill_worker"),
)
REPAIRS = ("go_on", "end_stray", "repair_disk", "end_shortage", "join")
REPORT_EVERY_S = 10.0
STATES_MAX = 6_000_000  # about 1 KB each while they wait, a tenth of it afterwards


@dataclass
class Space:
    """The states found so far, and how each was reached first."""

    index: dict[bytes, int] = field(default_factory=dict)
    parents: array[int] = field(default_factory=lambda: array("l"))
    labels: array[int] = field(default_factory=lambda: array("H"))
    names: dict[str, int] = field(default_factory=dict)
    ways_from: array[int] = field(default_factory=lambda: array("I"))  # without a fault
    ways_to: array[int] = field(default_factory=lambda: array("I"))
    ends: bytearray = field(default_factory=bytearray)  # serves, or no engine is left that could
    left: bytearray = field(default_factory=bytearray)  # the most faults that may still occur

    def add(self, key: bytes, is_end: bool) -> int:
        number = len(self.ends)
        self.index[key] = number
        self.parents.append(-1)
        self.labels.append(0)
        self.ends.append(is_end)
        self.left.append(0)
        return number

    def came(self, number: int, parent: int, label: str, left: int) -> None:
        self.parents[number], self.left[number] = parent, left
        self.labels[number] = self.names.setdefault(label, len(self.names))

    def trace(self, number: int) -> list[str]:
        names = list(self.names)
        steps = []
        while number > 0:
            steps.append(names[self.labels[number]])
            number = self.parents[number]
        return steps[::-1]

    def stuck(self) -> int | None:
        """A state from which no engine can be made to serve by waiting and repairing; None if
        none."""
        is_good = np.frombuffer(self.ends, dtype=np.uint8).astype(bool)
        here, there = np.array(self.ways_from), np.array(self.ways_to)
        while True:
            found = here[is_good[there] & ~is_good[here]]
            if not len(found):
                break
            is_good[found] = True
        bad = np.flatnonzero(~is_good)
        return int(bad[0]) if len(bad) else None


class Explorer:
    def __init__(
        self,
        faults: int,
        kinds: tuple[str, ...] = KINDS,
        *,
        launches: int = 2,
        has_late: bool = False,
        hand_overs: int | None = None,
        states_max: int = STATES_MAX,
        seconds_max: float = float("inf"),
    ) -> None:
        self.faults, self.kinds = faults, kinds
        self.states_max, self.seconds_max = states_max, seconds_max
        self.space = Space()
        # By how many faults may still occur, the most first, so that every state is visited once,
        # with everything that can follow. Each: its number and the world.
        self.frontiers: list[deque[tuple[int, bytes]]] = [deque() for _ in range(faults + 1)]
        self.transitions = 0
        self.problem: dict[str, Any] | None = None
        self.bounds = {"launches": launches, "has_late": has_late, "hand_overs": hand_overs}
        world = World(
            locks=(ACTIVE,), launches_max=launches, has_late=has_late, hand_overs=hand_overs
        )
        self.reached(world, faults, -1, "begin")

    def reached(self, world: World, left: int, parent: int, label: str) -> int:
        """The number of this world's state, which is queued if more can follow now."""
        key = hashlib.blake2b(snapshot(world).encode(), digest_size=12).digest()
        number = self.space.index.get(key)
        is_new = number is None
        if number is None:
            number = self.space.add(key, world.is_served() or is_hopeless(world))
        if is_new or left > self.space.left[number]:
            self.space.came(number, parent, label, left)
            strip(world)
            self.frontiers[left].append((number, pickle.dumps(world, 5)))
        return number

    def run(self) -> None:
        began = reported = time.monotonic()
        while self.waiting() and self.problem is None:
            left = max(n for n, frontier in enumerate(self.frontiers) if frontier)
            number, blob = self.frontiers[left].popleft()
            if self.space.left[number] == left:  # else it was reached again with fewer faults left
                self.expand(number, left, blob)
            now = time.monotonic()
            if len(self.space.ends) > self.states_max or now - began > self.seconds_max:
                return
            if now - reported > REPORT_EVERY_S:
                reported = now
                print(
                    f"{now - began:.0f} s: {len(self.space.ends)} states, {self.waiting()} to"
                    f" look at, {self.transitions} transitions",
                    file=sys.stderr,
                )

    def waiting(self) -> int:
        return sum(len(frontier) for frontier in self.frontiers)

    def expand(self, number: int, left: int, blob: bytes) -> None:
        which, count = 0, 1
        while which < count:
            world: World = pickle.loads(blob)
            choices = self.choices(world, left)
            count, (move, cost) = len(choices), choices[which]
            which += 1
            try:
                world.do(move)
            except Exception as error:
                self.problem = {
                    "what": repr(error),
                    "trace": [*self.space.trace(number), *world.story()],
                }
                return
            self.transitions += 1
            reached = self.reached(world, left - cost, number, world.story()[0])
            if not cost:
                self.space.ways_from.append(number)
                self.space.ways_to.append(reached)

    def choices(self, world: World, left: int) -> list[tuple[Move, int]]:
        def wait(ms: float) -> None:
            """The server loop's own pending work comes first, or it would pile up."""
            while world.shell.closing:
                world.shell.finish_close(None)
            world.wait(ms)

        found: list[tuple[Move, int]] = [(move, 0) for move in world.moves()]
        found.append(((wait, WAIT_MS), 0))
        for move in world.faults.possible():
            if move[0].__name__ in REPAIRS:
                found.append((move, 0))
            elif left and move[0].__name__ in self.kinds:
                found.append((move, 1))
        return found

    def result(self) -> dict[str, Any]:
        is_complete = not self.waiting() and self.problem is None
        if is_complete:
            stuck = self.space.stuck()
            if stuck is not None:
                self.problem = {"what": "no engine can serve", "trace": self.space.trace(stuck)}
        return {
            "faults": self.faults,
            "kinds": list(self.kinds),
            **self.bounds,
            "states": len(self.space.ends),
            "transitions": self.transitions,
            "is_complete": is_complete,
            "problem": self.problem,
        }


def strip(world: World) -> None:
    """Drop what nothing depends on any more, so that there is less to copy."""
    world.trace.clear()
    known = {tree.incarnation for tree in Names(world, (0, 1)).referenced()[0]}
    world.trees = {name: tree for name, tree in world.trees.items() if name in known}
    if world.shell.machine is not None:
        for lock in world.shell.machine.locks.values():
            lock.previous = None


def is_hopeless(world: World) -> bool:
    """Whether no engine is left that could serve: every launch is used up, or its place is
    taken."""
    for sup in world.sups:
        tree = sup.tree
        if sup.launches < world.launches_max:
            return False
        if sup.is_alive and tree and tree.is_alive and not (tree.is_doomed or tree.is_hurt):
            return False
    return True


def _by_fields(one: Any) -> tuple[Any, ...]:
    kind = type(one)
    return kind, tuple(getattr(one, name) for name in kind.__slots__)


def copy_faster() -> None:
    """Pickle frozen records by their fields, which is faster than what dataclasses do."""
    for kind in (Holder, LockRecord, ServingFile, Waiter, WitnessFile):
        copyreg.pickle(kind, _by_fields)
    gc.set_threshold(100_000, 50, 1000)  # millions of states are kept on purpose


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=2, help="at most so many (default: 2)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of these kinds")
    parser.add_argument("--launches", type=int, default=2, help="of each engine (default: 2)")
    parser.add_argument("--late", action="store_true", help="with processes that come late")
    parser.add_argument("--hand-overs", type=int, help="in place, at most so many (default: none)")
    parser.add_argument("--states-max", type=int, default=STATES_MAX, help="stop beyond so many")
    parser.add_argument("--seconds-max", type=float, default=float("inf"), help="stop after them")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    copy_faster()
    explorer = Explorer(
        options.faults,
        tuple(options.kinds.split(",")),
        launches=options.launches,
        has_late=options.late,
        hand_overs=options.hand_overs,
        states_max=options.states_max,
        seconds_max=options.seconds_max,
    )
    explorer.run()
    result = explorer.result()
    if options.json:
        print(json.dumps(result))
    else:
        end = "all of them" if result["is_complete"] else "not all"
        print(f"{result['states']} states, {result['transitions']} transitions: {end}")
        problem = result["problem"]
        print("no violation" if problem is None else json.dumps(problem, indent=1))
    return 0 if result["is_complete"] and result["problem"] is None else 1


if __name__ == "__main__":
    sys.exit(main())
