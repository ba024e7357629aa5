"""The loader lock as the tensor-parallel simulation sees it: one incarnation after the other.

What supervisors say queues per connection and is heard whenever the schedule says; what they are
told is in their inbox at once. That the real lock server grants likewise is proven in
`tests/sim/lock`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lockserver.messages import GrantedMsg

LOADER = "loader"


@dataclass(eq=False)
class Wire:
    """One supervisor's connection. `up`: its engine, and the incarnation that wants the lock."""

    supervisor: str
    hear: Callable[[GrantedMsg], None]
    up: deque[tuple[str, str | None]] = field(default_factory=deque)
    is_closed: bool = False  # by the supervisor


class LoaderService:
    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self.dead: list[str] = []  # supervisors whose pidfd is readable
        self._asks: dict[str, tuple[str, str]] = {}  # by supervisor, in order of arrival
        self._holder: str | None = None  # one of them
        self._token = 0
        self._newest: dict[str, Wire] = {}
        self._buried: set[str] = set()

    @property
    def is_free(self) -> bool:
        return not self._asks

    def connect(self, supervisor: str, hear: Callable[[GrantedMsg], None]) -> Wire:
        self.wires.append(Wire(supervisor, hear))
        return self.wires[-1]

    def moves(self) -> list[tuple[str, Callable[[], None]]]:
        """What the server could do now."""
        found: list[tuple[str, Callable[[], None]]] = []
        behind = set[str]()  # what was said on an older connection is read before
        for wire in self.wires:
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
        (engine, incarnation), supervisor = wire.up.popleft(), wire.supervisor
        if supervisor in self._buried:
            return
        self._newest[supervisor] = wire
        if self._asks.get(supervisor, ("", None))[1] != incarnation:
            self._forget(supervisor)
            if incarnation is not None:
                self._asks[supervisor] = engine, incarnation
        elif supervisor == self._holder:
            self._tell(supervisor)
        self._grant()

    def _lose(self, wire: Wire) -> None:
        """Its place in the queue is lost, its lock is not."""
        self.wires.remove(wire)
        if self._newest.get(wire.supervisor) is wire and self._holder != wire.supervisor:
            self._forget(wire.supervisor)

    def _bury(self) -> None:
        self._buried.add(self.dead[0])
        self._forget(self.dead.pop(0))
        self._grant()

    def _forget(self, supervisor: str) -> None:
        self._asks.pop(supervisor, None)
        if self._holder == supervisor:
            self._holder = None

    def _grant(self) -> None:
        if self._holder is None and self._asks:
            self._holder, self._token = next(iter(self._asks)), self._token + 1
            self._tell(self._holder)

    def _tell(self, holder: str) -> None:
        if not self._newest[holder].is_closed:
            self._newest[holder].hear(GrantedMsg(LOADER, *self._asks[holder], self._token))
