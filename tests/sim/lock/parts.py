"""The parts of a simulated pod: trees of processes, connections, supervisors. Records only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lockserver.core.names import ServingFile, WitnessFile
from plumbing.pod.models import ACTIVE as ACTIVE
from plumbing.pod.models import LOADER as LOADER
from plumbing.pod.models import lock_of


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
    is_loaded: bool = False
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
    locks: tuple[str, ...]
    tokens: dict[str, int]
    over: int = 0
    is_leaving: bool = False
    succeeds: int = 0


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
    tokens: dict[str, int] = field(default_factory=dict)
    # Where engines are told to end (`engines.py`):
    is_ordered: bool = False  # the order is on its way
    is_leaving: bool = False
    awaits_answer: bool = False
    knows: int = 0  # the token of a holder that leaves, as it has heard
    succeeds: int = 0  # for which it vouches

    @property
    def active(self) -> str:
        """The lock `active` of its model."""
        return lock_of(ACTIVE, self.model)

    @property
    def loader(self) -> str:
        return lock_of(LOADER, self.model)
