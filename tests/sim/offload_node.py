"""One server of the offload simulation and what its clients are: the real machine, with a driver, a
disk and a kernel of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gms.core import events as ev
from plumbing.errors import UnderstudyError
from tests.sim.gms_device import SimServer, told

if TYPE_CHECKING:
    from tests.sim.offload_world import OffloadWorld


@dataclass(eq=False)
class Memory:
    """Physical memory, for as long as a server or a process has it."""

    epoch: str
    content: int = 0
    slab_sizes: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Actor:
    """A process. `at` is where it stands with each server: "", asking, writing, reading."""

    name: str
    at: dict[str, str] = field(default_factory=lambda: {"device": "", "host": ""})
    session: dict[str, int | None] = field(default_factory=lambda: {"device": None, "host": None})
    holds: dict[str, Memory | None] = field(default_factory=lambda: {"device": None, "host": None})
    copy: str | None = None  # that its writer was told of
    restages_from: str | None = None
    is_busy: bool = False
    is_away: bool = False  # it has released the device's weights
    is_dying: bool = False  # its connections have ended, what it maps is still mapped


class Node(SimServer):
    """One server, and what it runs on."""

    def __init__(self, name: str, world: OffloadWorld) -> None:
        super().__init__()
        self.name, self.world, self.new_id = name, world, world.new_id
        self.offloaded: ev.JournalRecord | None = None
        self.sessions: dict[int, Actor] = {}
        self.start()

    def start(self) -> None:
        self.now_ms = self.world.now_ms
        self.boot(self.offloaded)

    def crash(self) -> None:
        for each in (self.vault, self.driver, self.watched, self.checked):
            each.clear()
        if self is self.world.device:  # it forgets what is not on disk, like a report too late
            self.world.condemning.clear()
        for actor in self.sessions.values():
            self.world.lose_session(actor, self.name)
        self.sessions.clear()
        self.start()

    def holders(self, epoch: str) -> list[Actor]:
        held = ((a, a.holds[self.name]) for a in self.world.actors)
        return [actor for actor, memory in held if memory is not None and memory.epoch == epoch]

    def tell(self, said: ev.Received | str, *more: Any, **named: Any) -> None:
        try:
            effects = told(self.machine, self.world.now_ms, said, *more, **named)
        except UnderstudyError as error:
            assert isinstance(said, ev.Received)
            effects = [ev.RefuseRequest(said.session, 0, error)]
        for effect in effects:
            self.perform(effect)

    def answer(self, effect: ev.Respond) -> None:
        actor = self.sessions.get(effect.session)
        if actor is not None:
            self.world.hear(self, actor, effect)

    def offer_of(self, session: int) -> Memory | None:
        actor = self.sessions.get(session)
        return actor and actor.holds[self.name]

    def new_memory(self, epoch: str) -> Memory:
        return Memory(epoch)

    def write(self, effect: ev.WriteJournal) -> None:
        self.journal, self.offloaded = effect.record, effect.offloaded
        self.world.journalled(self)

    def was_marked(self) -> None:
        self.world.journalled(self)

    def look(self, epoch: str) -> None:
        self.watched.discard(epoch)
        self.files.discard(epoch)
        copy = self.world.host_copy() if self is self.world.device else None
        if copy is not None and self._is_lost(epoch) and copy.digest == self.digest:
            self.world.standing = copy.epoch
        self.tell("region_free", epoch, copy)

    @property
    def digest(self) -> str | None:
        """Of the committed bytes, on disk."""
        return None if self.journal is None else self.journal.digest

    def _is_lost(self, epoch: str) -> bool:
        """Whether the committed epoch is gone with all that mapped it."""
        record = self.journal
        is_it = record is not None and record.epoch == epoch and record.digest is not None
        return is_it and epoch not in self.marked

    @property
    def free_files(self) -> list[str]:
        return sorted(epoch for epoch in self.watched if not self.holders(epoch))
