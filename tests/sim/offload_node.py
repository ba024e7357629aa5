"""One server of the offload simulation and what its clients are: the real machine, with a driver, a
disk and a kernel of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gms.core import events as ev
from gms.core.weights import WeightsMachine, orphans_of
from plumbing.errors import UnderstudyError
from tests.sim.gms_device import MIB

if TYPE_CHECKING:
    from tests.sim.offload_world import OffloadWorld


@dataclass(eq=False)
class Memory:
    """Physical memory, for as long as a server or a process has it."""

    epoch: str
    content: int = 0


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


class Node:
    """One server, and what it runs on."""

    machine_type: type[WeightsMachine] = WeightsMachine

    def __init__(self, name: str, world: OffloadWorld) -> None:
        self.name, self.world = name, world
        self.files: set[str] = set()
        self.marked: set[str] = set()
        self.record: ev.JournalRecord | None = None
        self.offloaded: ev.JournalRecord | None = None
        self.vault: dict[str, Memory] = {}
        self.driver: deque[ev.Effect] = deque()
        self.sessions: dict[int, Actor] = {}
        self.watched: set[str] = set()
        self.checked: dict[str, Memory | None] = {}  # what was handed back, by epoch
        self.boot()

    def boot(self) -> None:
        orphans = orphans_of(sorted(self.files), self.record, self.marked & self.files)
        self.machine = self.machine_type(
            capacity_bytes=8 * MIB,
            granularity_bytes=4096,
            stall_ms=1e9,
            new_epoch_id=self.world.new_id,
            orphans=orphans,
            offloaded=self.offloaded,
            is_journal_behind=self.record is not None and self.record.epoch in self.marked,
            now_ms=self.world.now_ms,
        )
        self.tell(ev.DeadlinePassed())  # watches what is there

    def crash(self) -> None:
        for each in (self.vault, self.driver, self.watched, self.checked):
            each.clear()
        if self is self.world.device:  # it forgets what is not on disk, like a report too late
            self.world.condemning.clear()
        for actor in self.sessions.values():
            self.world.lose_session(actor, self.name)
        self.sessions.clear()
        self.boot()

    def holders(self, epoch: str) -> list[Actor]:
        held = ((a, a.holds[self.name]) for a in self.world.actors)
        return [actor for actor, memory in held if memory is not None and memory.epoch == epoch]

    def tell(self, event: ev.MemoryEvent) -> None:
        try:
            effects = self.machine.handle(event, self.world.now_ms)
        except UnderstudyError as error:
            assert isinstance(event, ev.SessionEvent)
            effects = [ev.RefuseRequest(event.session, 0, error)]
        for effect in effects:
            if isinstance(effect, ev.Respond):
                actor = self.sessions.get(effect.session)
                if actor is not None:
                    self.world.hear(self, actor, effect)
            elif isinstance(effect, ev.Watch):
                self.watched.add(effect.region)
            elif isinstance(effect, ev.Unwatch):
                self.watched.discard(effect.region)
            elif not isinstance(effect, ev.RecordEvent):
                if isinstance(effect, ev.TakeBack):
                    actor = self.sessions.get(effect.session)
                    self.checked[effect.region] = actor and actor.holds[self.name]
                self.driver.append(effect)

    def complete_one(self) -> None:
        effect = self.driver.popleft()
        match effect:
            case ev.OpenEpoch():
                self.files.add(effect.epoch)
                self.vault[effect.epoch] = Memory(effect.epoch)
                self.tell(ev.EpochOpened(effect.session))
            case ev.CreateSlab():
                self.tell(ev.SlabCreated(effect.session))
            case ev.SealEpoch():
                self.tell(ev.Sealed(effect.session, tensors=1))
            case ev.WriteJournal():
                self.record, self.offloaded = effect.record, effect.offloaded
                self.world.journalled(self)
                self.tell(ev.Journalled(effect.session))
            case ev.MarkRetired():
                self.marked.add(effect.region)
                self.world.journalled(self)
            case ev.TakeBack():
                memory = self.checked.pop(effect.region)
                if memory is None:
                    error = UnderstudyError("gms.bad_slab", "its process is gone")
                    self.tell(ev.RegionNotBack(effect.region, error))
                else:
                    self.vault[effect.region] = memory
                    self.tell(ev.RegionBack(effect.region, tensors=1))
            case ev.Release():
                self.files.discard(effect.region)
                self.vault.pop(effect.region, None)
                self.tell(ev.RegionReleased(effect.region))
            case _:
                raise AssertionError(effect)

    def look(self, epoch: str) -> None:
        self.watched.discard(epoch)
        self.files.discard(epoch)
        copy = self.world.host_copy() if self is self.world.device else None
        if copy is not None and self._is_lost(epoch) and copy.digest == self.digest:
            self.world.standing = copy.epoch
        self.tell(ev.RegionFree(epoch, copy))

    @property
    def digest(self) -> str | None:
        """Of the committed bytes, on disk."""
        return None if self.record is None else self.record.digest

    def _is_lost(self, epoch: str) -> bool:
        """Whether the committed epoch is gone with all that mapped it, and nothing replaces it."""
        record = self.record
        if record is None or record.epoch != epoch or epoch in self.marked or record.digest is None:
            return False
        return record.previous is None or record.previous.epoch not in self.files - self.marked

    @property
    def free_files(self) -> list[str]:
        return sorted(epoch for epoch in self.watched if not self.holders(epoch))
