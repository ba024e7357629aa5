"""One process of a backend's tree: it takes its device's weights and keeps them.

What `gms.client` does, one step at a time. A rank dies in two steps: its sockets close at once,
what it maps goes only when it is reaped. A rank that reads goes on without its session and hands
its epoch back for as long as it lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import S
from tests.sim.gms_device import SLAB_BYTES, Copy, SimDevice, commit_of, manifest_of

if TYPE_CHECKING:
    from tests.sim.tp_engine import Engine
    from tests.sim.tp_world import World

SLABS = 2  # of each rank's weights
WAIT_MS = 2 * 3_600_000
EOF = "end of session"
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


KEEPS = (At.COMMITTING, At.READING, At.ATTACHED)  # it outlives its session


@dataclass(eq=False)
class Rank:
    """A process on the device of its number."""

    engine: Engine
    number: int
    incarnation: str
    at: At = At.STARTING
    session: int | None = None  # None: the session is lost, or there never was one
    inbox: deque[tuple[Any, Copy | None]] = field(default_factory=deque)
    mode: str = ""
    version: int = 0  # of the checkpoint, when it computed the identity
    identity: dict[str, Any] = field(default_factory=dict)  # of the epoch that it maps
    copy: Copy | None = None  # what it maps, with the flock
    is_busy: bool = False  # a request is open

    @property
    def world(self) -> World:
        return self.engine.world

    @property
    def device(self) -> SimDevice:
        return self.world.devices[self.number]

    @property
    def holds(self) -> str | None:
        return self.copy.epoch if self.copy is not None else None

    @property
    def name(self) -> str:
        return f"{self.incarnation[:8]}.{self.incarnation[-3:]}.{self.number}"

    def identity_now(self, version: int) -> dict[str, Any]:
        return self.world.identity(version, self.number)

    # ------------------------------------------------------------------ what it could do now

    def move(self) -> Move | None:
        if self.inbox:
            what = self.inbox[0][0]
            return f"{self.name} hears {what if what is EOF else type(what).__name__}", self._hear
        if self.session is None and self.at in KEEPS:
            return (f"{self.name} hands back", self._hand_back) if self.device.is_up else None
        match self.at:
            case At.STARTING:
                return f"{self.name} asks for leave", self._ask
            case At.LEFT if self.device.is_up:
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
        self.device.tell(
            ev.Received(
                self.session,
                1,
                msg.AttachMsg(
                    self.engine.name,
                    self.incarnation,
                    self.mode,
                    self.identity_now(self.version),
                    rank=self.number,
                    wait_ms=WAIT_MS,
                ),
            )
        )

    def _write(self) -> None:
        assert self.session is not None
        self.is_busy = True
        if len(self.copy.slab_sizes) < SLABS:
            self.copy.contents.add(self.world.version)
            self.device.tell(ev.Received(self.session, 2, msg.AllocateMsg(SLAB_BYTES)))
            return
        self.at = At.COMMITTING
        self.identity = self.identity_now(self.world.version)
        self.device.tell(commit_of(self.session, self.identity, self.copy.slab_sizes))

    def _report(self) -> None:
        self.at = At.ATTACHED
        self.engine.rank_attached(self)

    # ------------------------------------------------------------------ back to a new server

    def _hand_back(self) -> None:
        self.session = self.world.open_session(self)
        self.device.offered[self.session] = self.copy
        manifest = manifest_of(self.copy.slab_sizes)
        held = msg.HeldEpoch(self.at is not At.COMMITTING, self.identity)
        sizes = tuple(self.copy.slab_sizes)
        self.device.tell(
            ev.Received(
                self.session,
                4,
                msg.HandBackMsg(
                    self.engine.name,
                    self.incarnation,
                    self.copy.epoch,
                    sizes,
                    self.number,
                    epoch=held,
                    manifest=manifest,
                ),
            )
        )

    @property
    def is_registered(self) -> bool:
        """Whether its server knows it as a reader."""
        found = self.device.machine.sessions.get(self.session or 0)
        return found is not None and found.state is not S.RETURNING

    def condemn(self) -> None:
        """It has met a bad page; without a session it cannot report it."""
        if self.session is not None and not self.inbox and self.is_registered:
            committed = self.device.machine.committed
            if committed is not None:
                committed.failed_canaries.add("one before it")
            self.device.tell(ev.Received(self.session, 0, msg.CondemnMsg("a bad page")))

    # ------------------------------------------------------------------ what it hears

    def _hear(self) -> None:
        answer, copy = self.inbox.popleft()
        match answer:
            case msg.WritingMsg():
                self._join(copy, At.WRITING)
            case ev.SendRegion():
                self.identity = dict(self.device.published[answer.region].identity)
                self._join(copy, At.READING)
            case msg.AllocatedMsg():
                self.is_busy = False
            case msg.CommittedMsg() | msg.KeptMsg():
                self.is_busy = False
                self.at = At.READING if self.at is At.COMMITTING else self.at
            case ev.RefuseRequest():
                self._refused(answer.error.code)
            case _ if answer is EOF:
                self._ended()

    def _join(self, copy: Copy | None, then: At) -> None:
        """Take the flock before anything is mapped; too late is too late."""
        assert self.at is At.ATTACHING, "it was granted what it had not asked for"
        if copy.epoch not in self.device.files:
            self.engine.fail(f"{self.name} came too late for its epoch")
            return
        self.copy = copy
        self.at = then

    def _refused(self, code: str) -> None:
        self.session = None
        self.world.trace.append(f"({self.name} was refused: {code})")
        if self.at not in (At.READING, At.ATTACHED):  # who reads just tries again
            self.engine.fail(f"{self.name} was refused: {code}")

    def _ended(self) -> None:
        self.session = None
        if self.at is At.ATTACHING:
            self.at = At.LEFT
        elif self.at is At.WRITING:
            self.engine.fail(f"{self.name} lost its staging epoch")

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
