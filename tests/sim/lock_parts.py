"""What a simulated pod is made of: trees of processes, connections, supervisors. Records only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lockserver.core.names import WitnessFile

ACTIVE, LOADER = "active", "loader"


@dataclass(slots=True, eq=False)
class Tree:
    """One incarnation's processes, by what they have to do with its witness."""

    incarnation: str
    witness: WitnessFile
    sup: Sup
    holding: int = 1
    coming: int = 0  # forked, and not yet at the witness: it may come very late
    strays: int = 0  # hold the witness, and nobody kills them with the tree
    is_doomed: bool = False  # SIGKILL is on its way to all but the strays
    is_hurt: bool = False  # one has died by itself
    is_sealed: bool = False
    is_removed: bool = False  # the witness's name is gone
    is_told: bool = False  # it believes that it is active
    is_loaded: bool = False
    was_held: bool = False  # what the server saw when it asked
    is_disowned: bool = False  # a server has heard that it is over

    @property
    def is_alive(self) -> bool:
        return self.holding > 0 or self.strays > 0


@dataclass(slots=True, eq=False)
class Conn:
    """A connection; `up` holds what supervisors say (`Said`), `down` what the server sent."""

    id: int
    sup: Sup
    up: deque[Said] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    client_open: bool = True
    server_open: bool = True


@dataclass(slots=True)
class Said:
    """A `want` on its way, without what the server will see of the witness."""

    tree: Tree | None
    locks: tuple[str, ...]
    tokens: dict[str, int]


@dataclass(slots=True, eq=False)
class Sup:
    """A supervisor's process. `number` is its pid; a new process is a new `Sup`."""

    id: str
    engine: str
    number: int
    is_alive: bool = True
    is_stopped: bool = False
    is_patient: bool = False  # was refused, and tries again when time has passed
    is_killing: bool = False
    is_known_gone: bool = False  # this server was told by the pidfd
    launches: int = 0  # of this engine
    beats: int = 0
    heard_ms: float = 0.0
    conn: Conn | None = None
    served: Conn | None = None  # the newest connection that this server heard it on
    newest: int = -1  # the number of the last such
    tree: Tree | None = None
    tokens: dict[str, int] = field(default_factory=dict)
