"""One device as the simulations see it: the real machine, and a driver, a disk and a kernel.

The driver completes calls in order but whenever it likes; the kernel knows which process holds
which epoch's file. A `Copy` is physical memory: it exists for as long as the server's vault or a
process has it, whatever anybody's books say. Nothing here draws numbers or knows engines.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gms.core import events as ev
from gms.core.events import EpochPhase, SessionState
from gms.core.machine import Machine
from gms.core.manifest import TensorRecord, layout_hash
from gms.core.state import WRITER_STATES, Epoch
from understudy.errors import UnderstudyError

MIB = 1 << 20
SLAB_BYTES = MIB
STALL_MS = 120_000.0


@dataclass(eq=False)
class Copy:
    """Physical memory: one copy of weights, read from the checkpoints in `contents`."""

    epoch: str
    size_bytes: int = 0
    contents: set[int] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"{self.size_bytes >> 20} MiB of epoch {self.epoch[-6:]}"


@dataclass(frozen=True)
class Published:
    """What was answered for: it may never change."""

    copy: Copy
    size_bytes: int
    contents: frozenset[int]
    identity: Mapping[str, Any]


def commit_of(session: int, identity: Mapping[str, Any], slab_sizes: Iterable[int]) -> ev.Commit:
    """The request that publishes what was written."""
    sizes = list(slab_sizes)
    manifest = (TensorRecord("t", 0, 0, (4,), "float32", 16),) if sizes else ()
    return ev.Commit(session, 3, identity, manifest, layout_hash(sizes, manifest))


class SimDevice:
    """The server of one device and what it runs on."""

    machine_type: type[Machine] = Machine

    def __init__(
        self,
        name: str,
        deliver: Callable[[int, ev.Answer, Copy | None], None],
        holders: Callable[[], set[str]],
        *,
        capacity_bytes: int = 64 * MIB,
    ) -> None:
        """`deliver(session, answer, copy)` reaches a process, with descriptors where the answer
        carries some; `holders()` are the epochs whose file a process holds."""
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._deliver, self._holders = deliver, holders
        self._ids = itertools.count(1)
        self.now_ms = 0.0
        self.files: set[str] = set()
        self.journal: ev.JournalRecord | None = None
        self.published: dict[str, Published] = {}
        self.was_replaced = False  # on purpose: then the old epoch may go
        self.boot()

    def boot(self) -> None:
        """A server starts on what the one before it left."""
        orphans = {e: Epoch(e, EpochPhase.ORPHANED) for e in sorted(self.files)}
        if self.journal is not None:
            orphan = Epoch(self.journal.epoch, EpochPhase.ORPHANED)
            orphan.slab_sizes = list(self.journal.slab_sizes)
            orphan.layout_hash, orphan.identity = self.journal.layout_hash, self.journal.identity
            orphans[orphan.id] = orphan
        self.machine = self.machine_type(
            capacity_bytes=self.capacity_bytes,
            granularity_bytes=4096,
            stall_ms=STALL_MS,
            new_epoch_id=lambda: f"{next(self._ids):032x}",
            orphans=orphans.values(),
        )
        self.driver: deque[ev.Effect] = deque()
        self.closing: deque[int] = deque()  # sessions whose end the server has not seen yet
        self.vault: dict[str, Copy] = {}
        self.watched = set(orphans)

    # ------------------------------------------------------------------ machine and driver

    def tell(self, event: ev.Event) -> None:
        try:
            effects = self.machine.handle(event, self.now_ms)
        except UnderstudyError as error:  # the shell answers with it and closes the connection
            assert isinstance(event, ev.SessionEvent)
            self._deliver(event.session, ev.Refuse(event.session, 0, error), None)
            return
        for effect in effects:
            if isinstance(effect, ev.Answer):
                self._answer(effect)
            elif not isinstance(effect, ev.Record):
                self.driver.append(effect)
        self.check()

    def _answer(self, answer: ev.Answer) -> None:
        if isinstance(answer, ev.TellCommitted):
            assert self.journal is not None
            assert self.journal.epoch == answer.epoch, "journalled before it is answered"
            self._publish(answer.epoch)
        if isinstance(answer, ev.TellAttached):
            assert answer.epoch in self.published, "a reader sees only what was published"
        copy = None
        if isinstance(answer, ev.TellWriting | ev.TellAttached):
            copy = self.vault[answer.epoch]
        self._deliver(answer.session, answer, copy)

    def _publish(self, epoch: str) -> None:
        copy, identity = self.vault[epoch], self.machine.device.epochs[epoch].identity
        assert identity is not None
        assert epoch not in self.published, f"two memories under the name {epoch}"
        self.published[epoch] = Published(
            copy, copy.size_bytes, frozenset(copy.contents), dict(identity)
        )

    def complete_one(self, *, fails: bool = False) -> None:
        """The driver's oldest call completes; if its session has left, the call was made anyway."""
        effect = self.driver.popleft()
        match effect:
            case ev.OpenEpoch():
                self.files.add(effect.epoch)
                self.vault[effect.epoch] = Copy(effect.epoch)
                self.tell(ev.EpochOpened(effect.session))
            case ev.CreateSlab():
                if fails:
                    self._fail(effect.session, "gms.driver_failed")
                    return
                self.vault[effect.epoch].size_bytes += effect.size_bytes
                self.tell(ev.SlabCreated(effect.session))
            case ev.SealEpoch():
                if fails:
                    self._fail(effect.session, "gms.still_writable")
                    return
                self.tell(ev.Sealed(effect.session))
            case ev.WriteJournal():
                if fails and effect.session is not None:
                    self.tell(ev.JournalFailed(effect.session, "a full disk"))
                    return
                self.journal = effect.record
                if effect.session is not None:
                    self.tell(ev.Journalled(effect.session))
            case ev.ReleaseEpoch():
                self.vault.pop(effect.epoch, None)
                self.watched.add(effect.epoch)
            case _:
                raise AssertionError(effect)

    def fail_one(self) -> None:
        """The driver's oldest call fails, if it is one that can."""
        self.complete_one(fails=True)

    def _fail(self, session: int, code: str) -> None:
        self.tell(ev.DriverFailed(session, UnderstudyError(code, "as the simulation likes")))

    def notice_end(self) -> None:
        """The server sees one connection's end."""
        self.tell(ev.Closed(self.closing.popleft(), "its process is gone"))

    def moves(self) -> list[tuple[str, Callable[[], None]]]:
        """What the server could do now, of itself."""
        found: list[tuple[str, Callable[[], None]]] = []
        if self.driver:
            what = type(self.driver[0]).__name__
            found.append((f"{self.name} {what} done", self.complete_one))
        if self.closing:
            found.append((f"{self.name} sees {self.closing[0]} end", self.notice_end))
        found += [
            (f"{self.name} {epoch[-3:]} is free", lambda e=epoch: self.look(e))
            for epoch in sorted(self.watched - self._holders())
        ]
        return found

    def look(self, epoch: str) -> None:
        """The watch finds a file free."""
        self.watched.discard(epoch)
        self.files.discard(epoch)
        self.tell(ev.EpochFree(epoch))

    def pass_time(self, now_ms: float) -> None:
        self.now_ms = now_ms
        due_ms = self.machine.next_deadline_ms()
        if due_ms is not None and due_ms <= now_ms:
            self.tell(ev.Tick())

    # ------------------------------------------------------------------ what must always hold

    def check(self) -> None:
        """The books agree with themselves, and with what was promised."""
        device = self.machine.device
        phases = [epoch.phase for epoch in device.epochs.values()]
        assert phases.count(EpochPhase.STAGING) <= 1
        assert phases.count(EpochPhase.COMMITTED) <= 1
        writers = [s for s in device.sessions.values() if s.state in WRITER_STATES]
        assert len(writers) == phases.count(EpochPhase.STAGING), "staging belongs to its writer"
        for epoch in device.epochs.values():
            assert epoch.readers <= device.sessions.keys(), "readers are sessions"
            if epoch.phase is EpochPhase.SUPERSEDED:
                assert epoch.readers, "superseded without readers is a leak"
        for session in device.sessions.values():
            if session.state is SessionState.READING:
                assert session.epoch in device.epochs, "a reader's epoch is never freed"
        self._check_published()

    def _check_published(self) -> None:
        for epoch, kept in self.published.items():
            copy = kept.copy
            assert (copy.size_bytes, copy.contents) == (kept.size_bytes, kept.contents), (
                f"{copy} was altered after it was committed"
            )
            assert kept.contents == {kept.identity["version"]}, (
                f"{copy} was read from checkpoints {set(kept.contents)} and committed as"
                f" {kept.identity['version']}"
            )
            known = self.machine.device.epochs.get(epoch)
            if known is not None and known.phase in (EpochPhase.COMMITTED, EpochPhase.SUPERSEDED):
                assert self.vault.get(epoch) is copy, f"epoch {epoch} has lost its memory"
                assert known.size_bytes == kept.size_bytes, f"epoch {epoch} was altered"
                assert known.identity == kept.identity, f"epoch {epoch} was renamed"
