"""The lock server as the tensor-parallel simulation sees it: the real machine and its wires.

Messages to it queue per connection and are heard whenever the schedule says; what it sends is in
the supervisor's inbox at once. It never dies here: `test_lock_simulation` is about that.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessFile, WitnessState
from lockserver.messages import WantMsg
from lockserver.witness import name_of

LOADER = "loader"


@dataclass(eq=False)
class Wire:
    """One supervisor's connection."""

    id: int
    supervisor: str
    hear: Callable[[Any], None]
    up: deque[ev.Wanted] = field(default_factory=deque)
    is_closed: bool = False  # by the supervisor


class LoaderService:
    """Grants `loader`; `has_living(incarnation)` is what its witness would say."""

    def __init__(self, has_living: Callable[[str], bool]) -> None:
        self.machine = LockMachine(ev.LockRecord(), 0.0)
        self.wires: dict[int, Wire] = {}
        self.dead: list[str] = []  # supervisors whose pidfd is readable
        self.now_ms = 0.0
        self._buried: set[str] = set()
        self._has_living = has_living
        self._ids = itertools.count(1)

    def connect(self, supervisor: str, hear: Callable[[Any], None]) -> Wire:
        wire = Wire(next(self._ids), supervisor, hear)
        self.wires[wire.id] = wire
        return wire

    def want(self, wire: Wire, engine: str, incarnation: str | None, *, token: int | None) -> None:
        """`token` None: the lock is not wanted; 0: it is wanted and not held."""
        name = name_of(incarnation) if incarnation else None
        locks = () if token is None else (LOADER,)
        wire.up.append(
            ev.Wanted(
                wire.id,
                WantMsg(
                    wire.supervisor,
                    engine,
                    incarnation,
                    name,
                    locks,
                    {LOADER: token} if token else {},
                ),
                WitnessFile(name, 1, int(name[-16:], 16)) if name else None,
                process="SO_PEERPIDFD",
            )
        )

    def moves(self) -> list[tuple[str, Callable[[], None]]]:
        """What the server could do now."""
        found: list[tuple[str, Callable[[], None]]] = []
        behind = set[str]()  # what was said on an older connection is read before
        for wire in self.wires.values():
            if wire.supervisor in behind:
                continue
            if wire.up:
                behind.add(wire.supervisor)
                found.append((f"lock hears {wire.supervisor}", lambda w=wire: self._hear(w)))
            elif wire.is_closed:
                found.append((f"lock loses {wire.supervisor}", lambda w=wire: self._lose(w)))
        if self.dead:
            found.append((f"lock sees {self.dead[0]} dead", self._bury))
        return found

    def _hear(self, wire: Wire) -> None:
        want = wire.up.popleft()
        incarnation, supervisor = want.msg.incarnation, want.msg.supervisor
        lives = incarnation is not None and self._has_living(incarnation)
        state = WitnessState.HELD if lives else WitnessState.FREE
        self._feed(replace(want, witness_state=state))
        if supervisor in self._buried:  # its last words: the pidfd that came with them tells
            self.dead.append(supervisor)

    def _lose(self, wire: Wire) -> None:
        del self.wires[wire.id]
        self._feed(ev.ConnectionClosed(wire.id))

    def _bury(self) -> None:
        self._buried.add(self.dead[0])
        self._feed(ev.ProcessGone(self.dead.pop(0)))

    def _feed(self, event: ev.Input) -> None:
        for effect in self.machine.handle(event, self.now_ms):
            if isinstance(effect, ev.Persist):
                self._feed(ev.Persisted())
            elif isinstance(effect, ev.Send | ev.RefuseConnection | ev.Close):
                wire = self.wires.get(effect.conn)
                if wire is not None and not wire.is_closed:
                    wire.hear(effect.message if isinstance(effect, ev.Send) else effect)
                    if not isinstance(effect, ev.Send):
                        wire.is_closed = True
                        wire.up.clear()

    @property
    def is_free(self) -> bool:
        lock = self.machine.locks[LOADER]
        return lock.holder is None and not lock.waiters
