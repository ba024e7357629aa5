"""Engines of the tensor-parallel simulation: a supervisor each, and a process per rank.

The way to the weights is the real `Loading`; around it is what `engine.launch`, `engine.lock_side`
and a backend's rank do, one step at a time. A rank dies in two steps: its sockets close at once,
what it maps goes only when it is reaped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from engine.core.loading import Loading, Role
from gms.core import events as ev
from lockserver.core import events as lock_ev
from tests.sim.gms_device import SLAB_BYTES, Copy, commit_of
from tests.sim.loader_service import Wire

if TYPE_CHECKING:
    from tests.sim.tp_world import World

SLABS = 2  # of each rank's weights
WAIT_MS = 2 * 3_600_000
Move = tuple[str, Callable[[], None]]


class At(StrEnum):
    """Where a rank's process stands."""

    STARTING = "starting"
    ASKING = "asking"  # its supervisor for leave to load
    LEFT = "left"  # it may go to its device
    ATTACHING = "attaching"
    WRITING = "writing"
    COMMITTING = "committing"
    READING = "reading"  # mapped, its supervisor not told yet
    ATTACHED = "attached"
    DYING = "dying"  # no sockets any more, still mapping


@dataclass(eq=False)
class Rank:
    """One process of a backend's tree, on the device of its number."""

    engine: Engine
    number: int
    incarnation: str
    at: At = At.STARTING
    session: int | None = None
    inbox: deque[tuple[ev.Answer, Copy | None]] = field(default_factory=deque)
    mode: str = ""
    version: int = 0  # of the checkpoint, when it computed the identity
    copy: Copy | None = None  # what it maps, with the flock
    slabs: int = 0
    is_busy: bool = False

    @property
    def world(self) -> World:
        return self.engine.world

    @property
    def holds(self) -> str | None:
        return self.copy.epoch if self.copy is not None else None

    @property
    def name(self) -> str:
        return f"{self.incarnation[:8]}{self.incarnation[-3:]}.{self.number}"

    def identity(self, version: int) -> dict[str, Any]:
        return {"version": version, "rank": self.number, "ranks": self.engine.ranks_count}

    # ------------------------------------------------------------------ what it could do now

    def move(self) -> Move | None:
        if self.inbox:
            what = type(self.inbox[0][0]).__name__
            return f"{self.name} hears {what}", self._hear
        match self.at:
            case At.STARTING:
                return f"{self.name} asks for leave", self._ask
            case At.LEFT:
                return f"{self.name} attaches {self.mode}", self._attach
            case At.WRITING if not self.is_busy and self.engine.may_go_on(self):
                return f"{self.name} writes", self._write
            case At.READING:
                return f"{self.name} is attached", self._report
            case _:
                return None

    def _ask(self) -> None:
        self.at = At.ASKING
        self.version = self.world.version
        self.engine.rank_asks(self)

    def _attach(self) -> None:
        self.at = At.ATTACHING
        self.session = self.world.open_session(self)
        self.world.devices[self.number].tell(
            ev.Attach(
                self.session,
                1,
                self.engine.name,
                self.incarnation,
                ev.Mode(self.mode),
                self.identity(self.version),
                rank=self.number,
                wait_ms=WAIT_MS,
                replace=self.engine.may_replace and self.mode == "rw_or_ro",
            )
        )

    def _write(self) -> None:
        device = self.world.devices[self.number]
        assert self.session is not None
        assert self.copy is not None
        self.is_busy = True
        if self.slabs < SLABS:
            self.copy.contents.add(self.world.version)
            device.tell(ev.Allocate(self.session, 2, SLAB_BYTES))
            return
        self.at = At.COMMITTING
        sizes = [SLAB_BYTES] * self.slabs
        device.tell(commit_of(self.session, self.identity(self.world.version), sizes))

    def _report(self) -> None:
        self.at = At.ATTACHED
        self.engine.rank_attached(self)

    # ------------------------------------------------------------------ what it hears

    def _hear(self) -> None:
        answer, copy = self.inbox.popleft()
        match answer:
            case ev.TellWriting():
                self._join(copy, At.WRITING)
            case ev.TellAttached():
                self._join(copy, At.READING)
            case ev.TellAllocated():
                self.slabs, self.is_busy = self.slabs + 1, False
            case ev.TellCommitted():
                self.at, self.is_busy = At.READING, False
            case ev.Refuse() as told:
                self.engine.fail(f"{self.name} was refused: {told.error.code}")

    def _join(self, copy: Copy | None, then: At) -> None:
        """Take the flock before anything is mapped; too late is too late."""
        assert copy is not None
        if copy.epoch not in self.world.devices[self.number].files:
            self.engine.fail(f"{self.name} came too late for its epoch")
            return
        self.copy = copy
        self.at = then

    # ------------------------------------------------------------------ its end

    def kill(self) -> None:
        """SIGKILL: sockets close, and what was on its way is lost."""
        if self.at is not At.DYING:
            self.at = At.DYING
            self.inbox.clear()
            self.world.close_session(self)

    def reap(self) -> None:
        """The kernel is done with it: its mappings and its flock are gone."""
        self.copy = None
        self.world.processes.remove(self)


class Engine:
    """A supervisor and the incarnation that it runs, if any."""

    def __init__(self, world: World, name: str, role: Role, ranks: int) -> None:
        self.world, self.name, self.role, self.ranks_count = world, name, role, ranks
        self.may_replace = False
        self.supervisor: str | None = None  # None: the container is down
        self.is_stopped = False  # SIGSTOP: it does nothing, and can be killed
        self.is_dying = False  # everything of this incarnation was killed and is being reaped
        self.loading: Loading | None = None
        self.ranks: list[Rank] = []
        self.wire: Wire | None = None
        self.grants: deque[Any] = deque()
        self.failures: list[str] = []
        self._said: object = None
        self._mourned: str | None = None  # the supervisor that died, for the lock server

    @property
    def incarnation(self) -> str | None:
        return self.ranks[0].incarnation if self.ranks else None

    @property
    def is_whole(self) -> bool:
        """Every rank is attached, and nothing is wrong with that."""
        return (
            bool(self.ranks)
            and not self.is_dying
            and all(rank.at is At.ATTACHED for rank in self.ranks)
        )

    @property
    def progress(self) -> int:
        """How far its ranks have come, taken together: which of two engines is the further."""
        return sum(list(At).index(rank.at) for rank in self.ranks) if not self.is_dying else -1

    @property
    def reading(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.at in (At.READING, At.ATTACHED)]

    @property
    def waiting_sessions(self) -> list[int]:
        """Its sessions that a device keeps waiting."""
        waiting = {s.id for d in self.world.devices for s in d.machine.device.waiting}
        return [r.session for r in self.ranks if r.session in waiting and r.session]

    # ------------------------------------------------------------------ what it could do now

    def moves(self) -> list[Move]:
        if self.supervisor is None:
            may_start = not self._mourned or self.world.may_restart(self)
            return [(f"{self.name} container starts", self._start)] if may_start else []
        if self.is_stopped:
            return []
        found: list[Move] = []
        if self.wire is None or self.wire.is_closed:
            found.append((f"{self.name} connects", self._connect))
        if self.grants:
            found.append((f"{self.name} hears a grant", self._hear))
        lives = any(rank in self.world.processes for rank in self.ranks)
        if self.ranks and not self.is_dying and any(r.at is At.DYING for r in self.ranks):
            found.append((f"{self.name} notices a death", lambda: self.fail("a rank died")))
        elif self.is_dying and not lives:
            found.append((f"{self.name} is reaped", self._reaped))
        elif not self.ranks:
            found.append((f"{self.name} launches", self._launch))
        elif not self.is_dying:
            held = self.world.held_back
            free = [rank for rank in self.ranks if (self.name, rank.number) not in held]
            found += [move for rank in free if (move := rank.move())]
        return found

    def _start(self) -> None:
        self.supervisor = self._mourned = self.world.new_supervisor()
        self._said = None

    def _connect(self) -> None:
        assert self.supervisor is not None
        self.wire = self.world.loader.connect(self.supervisor, self.grants.append)
        self._said = None
        self._say()

    def _launch(self) -> None:
        incarnation = self.world.new_incarnation(self.name)
        self.loading = self.world.loading_type(self.role)
        self.ranks = [Rank(self, number, incarnation) for number in range(self.ranks_count)]
        self.world.processes += self.ranks
        self.may_replace = self.world.may_replace
        self._say()

    def _reaped(self) -> None:
        self.ranks, self.loading, self.is_dying = [], None, False
        self._say()

    def _hear(self) -> None:
        message = self.grants.popleft()
        if isinstance(message, lock_ev.Refuse):
            self.world.trace.append(f"({self.name}'s want was refused: {message.code})")
        elif isinstance(message, lock_ev.SendGrant):
            mine = message.holder.incarnation == self.incarnation
            if mine and self.loading is not None and not self.is_dying:
                self._let_go(self.loading.granted(message.holder.token))
                self._say()

    # ------------------------------------------------------------------ the way to the weights

    def rank_asks(self, rank: Rank) -> None:
        assert self.loading is not None
        leaves = self.loading.asked(rank.number, self.ranks_count)
        self._say()
        self._let_go(leaves)

    def rank_attached(self, rank: Rank) -> None:
        assert self.loading is not None
        assert rank.copy is not None
        objection = self.loading.attached(rank.number, {"version": rank.version})
        if objection is not None:
            self.fail(objection)
            return
        self._say()

    def may_go_on(self, rank: Rank) -> bool:
        """Whether a writer may load: where ranks meet at a barrier, once all have their grants."""
        granted = (At.WRITING, At.COMMITTING, At.READING, At.ATTACHED)
        return not self.world.has_barrier or all(other.at in granted for other in self.ranks)

    def _let_go(self, leaves: list[Any]) -> None:
        for leave in leaves:
            rank = self.ranks[leave.rank]
            if rank.at is At.ASKING:
                rank.at, rank.mode = At.LEFT, leave.mode

    def _say(self) -> None:
        """The whole truth to the lock server, if it is another than was said last."""
        if self.wire is None or self.wire.is_closed:
            return
        loading = self.loading
        token = loading.token if loading is not None and loading.wants_loader else None
        truth = (self.incarnation, token)
        if truth != self._said:
            self._said = truth
            self.world.loader.want(self.wire, self.name, self.incarnation, token=token)

    # ------------------------------------------------------------------ its end

    def fail(self, why: str) -> None:
        """Any failure on the way is fatal to the incarnation: all of it is killed."""
        self.failures.append(why)
        self.world.trace.append(f"({self.name} fails: {why})")
        self.is_dying = True
        for rank in self.ranks:
            rank.kill()

    def kill_container(self) -> None:
        """The supervisor dies, and everything with it."""
        assert self.supervisor is not None
        for rank in self.ranks:
            rank.kill()
        if self.wire is not None:
            self.wire.is_closed = True
        self.world.bury(self.supervisor, list(self.ranks))
        self.supervisor, self.wire, self.loading = None, None, None
        self.ranks, self.is_dying, self.is_stopped = [], False, False
        self.grants.clear()
