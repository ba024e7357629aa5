"""One device as the simulations see it: the real machine, and a driver, a disk and a kernel.

The driver completes calls in order but whenever it likes; the kernel knows which process holds
which epoch's file. A `Copy` is physical memory: it exists for as long as the server or a process
has it, whatever anybody's books say. A server that crashes loses its books and its copies; its
disk is as it was last written. Nothing here draws numbers or knows engines.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import WRITER_STATES, Machine, RegionPhase, S
from gms.core.snapshot import weights_snapshot
from gms.core.upkeep import Epoch
from gms.core.weights import WeightsMachine
from gms.manifest import TensorRecord, encode
from plumbing.errors import UnderstudyError

MIB = 1 << 20
SLAB_BYTES = MIB
STALL_MS = 120_000.0

Move = tuple[str, Callable[[], None]]


@dataclass(eq=False)
class Copy:
    """Physical memory: one copy of weights, read from the checkpoints in `contents`."""

    epoch: str
    slab_sizes: list[int] = field(default_factory=list)
    contents: set[int] = field(default_factory=set)
    is_bad: bool = False  # a page of it has an error that its readers will meet


@dataclass(frozen=True)
class Published:
    """What was committed: it may never change."""

    copy: Copy
    slab_sizes: tuple[int, ...]
    contents: frozenset[int]
    identity: Mapping[str, Any]


def manifest_of(slab_sizes: Sequence[int]) -> bytes:
    """A manifest for these slabs."""
    return encode([TensorRecord("t", 0, 16, (4,), "float32")] if slab_sizes else [])


def commit_of(session: int, identity: Mapping[str, Any], slab_sizes: Sequence[int]) -> ev.Received:
    """The request that publishes what was written."""
    return ev.Received(session, 3, msg.CommitMsg(identity, manifest_of(slab_sizes)))


def told(
    machine: Machine[Any], now_ms: float, said: ev.Received | str, *more: Any, **named: Any
) -> list[ev.Effect]:
    """`said`: a message, or which method of the machine says what has happened."""
    if isinstance(said, ev.Received):
        return machine.handle(now_ms, machine.received, said)
    return machine.handle(now_ms, getattr(machine, said), *more, **named)


class SimServer:
    """The machine of one place's weights, its driver, its disk and its kernel. A world's server
    says what memory is, who is answered, and what is noted when the disk is written."""

    machine_type: type[WeightsMachine] = WeightsMachine
    capacity_bytes = 8 * MIB
    now_ms = 0.0

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.marked: set[str] = set()  # epochs whose files say that they are history
        self.journal: ev.JournalRecord | None = None
        self.is_journal_lost = False
        self.driver: deque[ev.Effect] = deque()
        self.checked: dict[str, Any] = {}  # by epoch: what the driver is to check
        self.vault: dict[str, Any] = {}  # by epoch: the memory that the server has
        self.watched: set[str] = set()

    def boot(self, offloaded: ev.JournalRecord | None = None) -> None:
        """A server starts on what the one before it left."""
        record = None if self.is_journal_lost else self.journal
        self.machine = self.machine_type(
            capacity_bytes=self.capacity_bytes,
            granularity_bytes=4096,
            stall_ms=STALL_MS,
            new_epoch_id=self.new_id,
            orphans={epoch: epoch in self.marked for epoch in sorted(self.files)},
            journal=ev.LoadedJournal(record, self.is_journal_lost, offloaded),
            now_ms=self.now_ms,
        )
        self.tell("deadline_passed")  # watches what is there

    def perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.OpenEpoch(_, _, _, epoch):
                assert epoch not in self.files, f"two files under the name {epoch}"
                self.files.add(epoch)
                self.vault[epoch] = self.new_memory(epoch)
                self.answer(effect)
            case ev.Respond():
                self.answer(effect)
            case ev.Watch(region, ends):
                (self.watched.discard if ends is None else self.watched.add)(region)
            case ev.RecordEvent():
                pass
            case _:
                if isinstance(effect, ev.TakeBack):
                    self.checked[effect.region] = self.offer_of(effect.session)
                self.driver.append(effect)

    def complete_one(self, *, fails: bool = False) -> None:
        """The driver's oldest call completes; if its session has left, the call was made anyway."""
        effect = self.driver.popleft()
        match effect:
            case ev.CreateSlab(epoch, size_bytes) if not fails:
                self.vault[epoch].slab_sizes.append(size_bytes)
            case ev.TakeBack(region, _, message):
                memory = self.checked.pop(region)
                fails = fails or memory is None or tuple(memory.slab_sizes) != message.slab_sizes
                if not fails:
                    self.vault[region] = memory
            case ev.WriteJournal() if not fails:
                self.write(effect)
            case ev.MarkRetired(region):
                self.marked.add(region)
                self.was_marked()
                return
            case ev.Release(region):
                self.files.discard(region)
                self.vault.pop(region, None)
        if not fails or isinstance(effect, ev.Release):  # which cannot
            self.tell("done", effect, 1)
        else:
            code = "gms.device_full" if isinstance(effect, ev.CreateSlab) else "gms.driver_failed"
            self.tell("done", effect, error=UnderstudyError(code, "as the simulation likes"))


class SimDevice(SimServer):
    """The server of one device and what it runs on."""

    def __init__(
        self,
        name: str,
        deliver: Callable[[int, Any, Copy | None], None],
        holders: Callable[[], Iterable[str]],
        *,
        capacity_bytes: int = 64 * MIB,
    ) -> None:
        """`deliver(session, answer, copy)` reaches a process, with descriptors where the answer
        carries some; `holders()` are the epochs whose file a process holds."""
        super().__init__()
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._deliver, self._holders = deliver, holders
        self._ids = itertools.count(1)
        self.is_up = False
        self.published: dict[str, Published] = {}
        self.last: str | None = None  # what must be committed here while anybody alive maps it
        self.condemned: set[str] = set()  # for good: it is on disk
        self.condemning: set[str] = set()  # a crash forgets it, like a message that came too late
        self.was_dropped = False  # on purpose: then there may be two copies
        self.closing: deque[int] = deque()  # sessions whose end the server has not seen yet
        self.offered: dict[int, Copy] = {}  # by session: descriptors that were handed back
        self.boot()

    def new_id(self) -> str:
        """The id of a new epoch: random ones never come again."""
        return f"{next(self._ids):032x}"

    def boot(self, offloaded: ev.JournalRecord | None = None) -> None:
        self.is_up = True
        super().boot(offloaded)

    def crash(self) -> None:
        """The server dies; what it held is gone unless a process maps it."""
        journal = self.journal
        if journal is not None and journal.epoch not in (self.last, *self.marked):
            # On disk and not answered: committed all the same, if anything is left of it.
            if journal.epoch in self.vault and journal.epoch not in self.published:
                self._register(journal.epoch)
            self.last = journal.epoch
        self.is_up = False
        for pending in (self.driver, self.closing, self.offered, self.vault, self.watched):
            pending.clear()
        self.checked.clear()
        self.condemning.clear()

    def crash_after_journal(self) -> None:
        """The record is on disk, and that is the last that this server does."""
        effect = self.driver.popleft()
        assert isinstance(effect, ev.WriteJournal)
        self.write(effect)
        self.crash()

    def write(self, effect: ev.WriteJournal) -> None:
        self.journal, self.is_journal_lost = effect.record, False
        self.condemned |= self.condemning - {effect.record.epoch if effect.record else ""}

    # ------------------------------------------------------------------ machine and driver

    def tell(self, said: ev.Received | str, *more: Any, **named: Any) -> None:
        before = self.machine.committed
        try:
            effects = told(self.machine, self.now_ms, said, *more, **named)
        except UnderstudyError as error:  # the shell answers with it and closes the connection
            assert isinstance(said, ev.Received)
            self._deliver(said.session, ev.RefuseRequest(said.session, 0, error), None)
            return
        self._notice_retired(before, said)
        for effect in effects:
            self.perform(effect)
        self.check()

    def _notice_retired(self, before: Epoch | None, said: ev.Received | str) -> None:
        """Nothing committed goes but on purpose: condemned, or dropped by an operator."""
        if before is None or self.machine.committed is not None:
            return
        message = said.message if isinstance(said, ev.Received) else None
        is_meant = isinstance(message, msg.CondemnMsg | msg.DropMsg)
        assert is_meant, f"epoch {before.id} was lost to {said}"
        if isinstance(message, msg.CondemnMsg):
            self.condemning.add(before.id)
        self.last, self.was_dropped = None, True

    def answer(self, effect: ev.Respond) -> None:
        copy = None
        answer = effect.message if isinstance(effect, ev.SendMessage) else effect
        if isinstance(answer, msg.CommittedMsg):
            assert self.journal.epoch == answer.epoch, "journalled before it is answered"
            self._publish(answer.epoch)
        if isinstance(answer, ev.SendRegion):
            assert answer.region in self.published, "a reader sees only what was published"
            copy = self.vault[answer.region]
        if isinstance(answer, msg.WritingMsg):
            copy = self.vault[answer.epoch]
        self._deliver(effect.session, answer, copy)

    def _publish(self, epoch: str) -> None:
        self._register(epoch)
        self.last = epoch

    def _register(self, epoch: str) -> None:
        copy, identity = self.vault[epoch], self.machine.regions[epoch].identity
        assert identity is not None
        assert epoch not in self.published, f"two memories under the name {epoch}"
        sizes, contents = tuple(copy.slab_sizes), frozenset(copy.contents)
        self.published[epoch] = Published(copy, sizes, contents, dict(identity))

    def new_memory(self, epoch: str) -> Copy:
        return Copy(epoch)

    def stale(self, version: int) -> str | None:
        """What is committed of another checkpoint than this."""
        committed = self.machine.committed if self.is_up else None
        copy = self.vault.get(committed.id) if committed is not None else None
        return copy.epoch if copy is not None and copy.contents != {version} else None

    def drop(self, epoch: str) -> None:
        """An operator wants other weights."""
        self.tell(ev.Received(-1, 0, msg.DropMsg(epoch, even_if_mapped=True)))

    def offer_of(self, session: int) -> Copy | None:
        return self.offered.pop(session, None)

    def was_marked(self) -> None:
        self.condemned |= self.condemning & self.marked

    def fail_one(self) -> None:
        """The driver's oldest call fails, if it is one that can."""
        self.complete_one(fails=True)

    def notice_end(self) -> None:
        """The server sees one connection's end."""
        session = self.closing.popleft()
        self.offered.pop(session, None)
        self.tell("closed", session, "its process is gone")

    def moves(self) -> list[Move]:
        """What the server could do now, of itself."""
        if not self.is_up:
            return [(f"{self.name} restarts", self.boot)]
        found: list[Move] = []
        if self.driver:
            what = type(self.driver[0]).__name__
            found.append((f"{self.name} {what} done", self.complete_one))
        if self.closing:
            found.append((f"{self.name} sees {self.closing[0]} end", self.notice_end))
        found += [
            (f"{self.name} {epoch[-3:]} is free", lambda e=epoch: self.look(e))
            for epoch in sorted(self.watched.difference(self._holders()))
        ]
        return found

    def look(self, epoch: str) -> None:
        """The watch finds a file free."""
        self.watched.discard(epoch)
        self.files.discard(epoch)
        self.tell("region_free", epoch)

    def pass_time(self, now_ms: float) -> None:
        self.now_ms = now_ms
        due_ms = self.machine.next_deadline_ms() if self.is_up else None
        if due_ms is not None and due_ms <= now_ms:
            self.tell("deadline_passed")

    # ------------------------------------------------------------------ what must always hold

    def check(self) -> None:
        """The books agree with themselves, and with what was promised."""
        device = self.machine
        phases = [epoch.phase for epoch in device.regions.values()]
        assert phases.count(RegionPhase.MAKING) <= 1
        assert phases.count(RegionPhase.SERVED) <= 1
        writers = [s for s in device.sessions.values() if s.state in WRITER_STATES]
        assert len(writers) == phases.count(RegionPhase.MAKING), "staging belongs to its writer"
        for epoch in device.regions.values():
            is_given_up = epoch.phase is RegionPhase.RETIRED and device._may_end(epoch)
            assert epoch.watch or not is_given_up, "given up and not watched is a leak"
        for session in device.sessions.values():
            if session.state is S.READING and session.region not in device.regions:
                # Given up, come back to, and its process died before its connection was seen to.
                assert session.region not in self._holders(), "a reader's epoch is never freed"
        owned = sum(
            e.size_bytes for e in device.regions.values() if e.phase != RegionPhase.ORPHANED
        )
        assert owned <= self.capacity_bytes
        weights_snapshot(device, str)
        committed = device.committed
        assert committed is None or committed.id not in self.condemned, "a condemned epoch is back"
        if committed is not None and self.last is not None:
            assert committed.id == self.last, f"{committed.id} is stale: {self.last} came after it"
        self._check_published()

    def _check_published(self) -> None:
        known = self.machine.regions
        for epoch, kept in self.published.items():
            copy = kept.copy
            is_same = (tuple(copy.slab_sizes), copy.contents) == (kept.slab_sizes, kept.contents)
            assert is_same, f"{copy} was altered after it was committed"
            named = kept.identity.get("version")
            assert named is None or kept.contents == {named}, (
                f"{copy} was read from checkpoints {set(kept.contents)} and committed as {named}"
            )
            now = known.get(epoch)
            if now is not None and now.phase is RegionPhase.SERVED:
                assert self.vault.get(epoch) is copy, f"epoch {epoch} has lost its memory"
                assert tuple(now.slab_sizes) == kept.slab_sizes, f"epoch {epoch} was altered"
                assert now.identity == kept.identity, f"epoch {epoch} was renamed"

    def check_not_lost(self, mapped_alive: Iterable[str | None]) -> None:
        """What was committed last is committed, or expected back, while a live process maps it."""
        if not self.is_up or self.last not in mapped_alive:
            return
        epoch = self.machine.regions.get(str(self.last))
        phase = epoch.phase if epoch is not None else None
        is_expected = epoch is not None and epoch.expected is not None
        is_expected = is_expected or self.machine.is_journal_lost  # the first one's word
        is_safe = phase is RegionPhase.SERVED or (phase is RegionPhase.ORPHANED and is_expected)
        assert is_safe, f"epoch {self.last} is mapped by a live engine and lost ({phase})"
