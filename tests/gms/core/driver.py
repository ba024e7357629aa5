"""A machine with a driver that answers at once: what the core's tests speak to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from gms import messages as msg
from gms.core import events as ev
from gms.core.weights import NO_JOURNAL, WeightsMachine
from gms.manifest import TensorRecord, encode
from plumbing.errors import UnderstudyError
from plumbing.wire.messages import Message
from tests.sim.gms_device import told

MIB = 1 << 20
IDENTITY = {"model": "tiny", "shards": {"a": "1"}}

Answer = Message | ev.Respond


def answer_of(effect: ev.Respond) -> Answer:
    """What goes to the client: a plain reply is its message."""
    return effect.message if isinstance(effect, ev.SendMessage) else effect


class Bench:
    """Feeds a machine and completes its driver calls; `sent` are the answers, in order."""

    def __init__(
        self,
        capacity_bytes: int = 100 * MIB,
        stall_ms: float = 1000,
        orphans: Iterable[str] = (),
        auto: bool = True,
        journal: ev.LoadedJournal = NO_JOURNAL,
    ) -> None:
        ids = (f"{n:032x}" for n in itertools.count(1))
        self.machine = WeightsMachine(
            capacity_bytes=capacity_bytes,
            granularity_bytes=4096,
            stall_ms=stall_ms,
            new_epoch_id=lambda: next(ids),
            orphans=dict.fromkeys(orphans, False),
            journal=journal,
        )
        self.device = self.machine  # its books
        self.now_ms = 0.0
        self.auto = auto  # complete driver calls at once
        self.mapped: set[str] = set()  # epochs whose file somebody holds
        self.pending: list[ev.Effect] = []
        self.sent: list[ev.Respond] = []
        self.released: list[str] = []
        self.marked: set[str] = set()  # epochs whose files say that they are history
        self.journal: ev.JournalRecord | None = None
        self.offloaded = journal.offloaded  # as the journal has it
        self.records: list[ev.RecordEvent] = []

    def tell(self, *said: Any, **named: Any) -> list[ev.Effect]:
        effects = told(self.machine, self.now_ms, *said, **named)
        for effect in effects:
            if isinstance(effect, ev.Respond):
                self.sent.append(effect)
            elif isinstance(effect, ev.RecordEvent):
                self.records.append(effect)
            else:
                self.pending.append(effect)
        if self.auto:
            self.drain()
        return effects

    def drain(self) -> None:
        while self.pending:
            self.complete(self.pending.pop(0))

    def complete(self, effect: ev.Effect) -> None:
        match effect:
            case ev.WriteJournal():
                self.journal, self.offloaded = effect.record, effect.offloaded
            case ev.MarkRetired():
                self.marked.add(effect.region)
            case ev.Watch() if effect.ends is not None and effect.region not in self.mapped:
                self.tell("region_free", effect.region)
            case ev.Release():
                self.released.append(effect.region)
        if not isinstance(effect, ev.MarkRetired | ev.Watch):
            self.tell("done", effect, 1)

    def fail(self, effect: ev.Effect, code: str = "as told", why: str = "no") -> None:
        self.tell("done", effect, error=UnderstudyError(code, why))

    def unmap(self, epoch: str) -> None:
        """The last process releases `epoch`."""
        self.mapped.discard(epoch)
        self.tell("region_free", epoch)

    def attach(self, session: int, mode: str = "rw_or_ro", **more: Any) -> Answer | None:
        """Attach and return the last answer to this session, if any."""
        wanted = {"identity": IDENTITY, "wait_ms": 10_000, **more}
        message = msg.AttachMsg(f"engine-{session}", f"i{session}", mode, **wanted)
        self.tell(ev.Received(session, 1, message))
        return self.last(session)

    def last(self, session: int) -> Answer | None:
        """The last answer to this session: a message, or an effect that adds to it."""
        mine = [answer for answer in self.sent if answer.session == session]
        return answer_of(mine[-1]) if mine else None

    def allocate(self, session: int, size_bytes: int = MIB) -> Answer | None:
        self.tell(ev.Received(session, 2, msg.AllocateMsg(size_bytes)))
        return self.last(session)

    def commit(
        self,
        session: int,
        identity: dict[str, Any] | None = None,
        restaged_from: str | None = None,
    ) -> Answer | None:
        sizes = self.device.regions[str(self.device.sessions[session].region)].slab_sizes
        manifest = encode([TensorRecord("t", 0, 16, (4,), "float32")] if sizes else [])
        told = identity if identity is not None else IDENTITY
        commit = msg.CommitMsg(told, manifest, restaged_from)
        self.tell(ev.Received(session, 3, commit))
        return self.last(session)

    def load(self, session: int, size_bytes: int = MIB, **more: Any) -> str:
        """A writer's whole life up to its commit; the committed epoch's id."""
        assert isinstance(self.attach(session, **more), msg.WritingMsg)
        self.allocate(session, size_bytes)
        answer = self.commit(session, more.get("identity"))
        assert isinstance(answer, msg.CommittedMsg), answer
        return answer.epoch

    def drop(self) -> None:
        """An operator's order: what is committed is out of service, mapped or not."""
        self.tell(ev.Received(-1, 4, msg.DropMsg(even_if_mapped=True)))

    def reload(self, session: int, size_bytes: int = MIB, **more: Any) -> str:
        """Drop what is committed, if anything is, and load anew."""
        if self.device.committed is not None:
            self.drop()
        return self.load(session, size_bytes, **more)

    def load_by_hand(self, session: int) -> str:
        """`load` where nothing is completed by itself."""
        self.auto = True
        try:
            return self.load(session)
        finally:
            self.auto = False

    def close(self, session: int) -> None:
        self.tell("closed", session, "gone")

    def advance(self, ms: float) -> None:
        self.now_ms += ms
        self.tell("deadline_passed")
