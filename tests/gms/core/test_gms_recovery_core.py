"""Crash without loss in the machine: what the journal says, who is asked, and what comes back."""

from __future__ import annotations

import pytest

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import RegionPhase
from gms.core.upkeep import JOURNAL_RETRY_MS
from gms.manifest import encode, identity_hash, layout_hash
from plumbing.errors import UnderstudyError
from tests.gms.core.driver import IDENTITY, MIB, Answer, Bench

OTHER = {"model": "tiny", "shards": {"a": "2"}}
THIRD = {"model": "tiny", "shards": {"a": "3"}}
OLD, NEW = "a" * 32, "b" * 32
MANIFEST = encode(())


def record(epoch: str, identity: dict[str, object]) -> ev.JournalRecord:
    return ev.JournalRecord(epoch, MIB, layout_hash((MIB,), MANIFEST), identity_hash(identity))


def restarted() -> Bench:
    """A server that finds a commit of NEW on disk, and files of NEW and OLD."""
    bench = Bench(orphans=(OLD, NEW), journal=ev.LoadedJournal(record(NEW, OTHER)))
    bench.mapped |= {OLD, NEW}
    return bench


def hand_back(
    bench: Bench, session: int, epoch: str, identity: dict[str, object] | None = None
) -> Answer | None:
    """What a survivor sends, and the last answer to it."""
    identity = identity or (IDENTITY if epoch == OLD else OTHER)
    held = msg.HeldEpoch(True, identity)
    who = f"engine-{session}", f"i{session}"
    message = msg.HandBackMsg(*who, epoch, (MIB,), epoch=held, manifest=MANIFEST)
    bench.tell(ev.Received(session, 1, message))
    return bench.last(session)


def phases(bench: Bench) -> dict[str, RegionPhase]:
    return {epoch.id: epoch.phase for epoch in bench.device.regions.values()}


@pytest.mark.parametrize("how", ["condemned", "dropped"])
def test_retired_epoch_is_journalled_again_until_the_write_succeeds(how: str):
    """The journal fails twice: a problem in status, and no answer before it is on disk."""
    bench = Bench(auto=False)
    bench.load_by_hand(1)
    bench.device.committed.failed_canaries.add("another")
    bench.tell(
        ev.Received(1, 0, msg.CondemnMsg("other tokens"))
        if how == "condemned"
        else ev.Received(9, 4, msg.DropMsg(None, even_if_mapped=True))
    )
    assert bench.pending.pop(0) == ev.MarkRetired(str(bench.device.sessions[1].region))
    for _ in range(2):
        written = bench.pending.pop(0)
        assert isinstance(written, ev.WriteJournal)
        assert written.record is None
        bench.fail(written, why="no space left")
        assert "no space left" in str(bench.device.problem)
        assert bench.last(9) is None
        bench.advance(JOURNAL_RETRY_MS)
    bench.drain()
    assert bench.device.problem is None
    assert bench.journal is None
    if how == "dropped":
        assert isinstance(bench.last(9), msg.DroppedMsg)
    assert len([r for r in bench.records if r.type == "gms.journal"]) == 1, "said once"


def test_condemned_epoch_keeps_its_file_until_the_journal_knows():
    """Goal: no restart finds it on record and gone, and takes its host copy for it. Method: its
    reader leaves while the journal is being written."""
    bench = Bench(auto=False)
    bench.load_by_hand(1)
    bench.device.committed.failed_canaries.add("another")
    bench.tell(ev.Received(1, 0, msg.CondemnMsg("other tokens")))
    bench.close(1)
    assert not [effect for effect in bench.pending if isinstance(effect, ev.Watch)]
    bench.drain()
    assert bench.released


def test_memory_that_is_not_what_was_committed_is_refused_and_changes_nothing():
    bench = restarted()
    with pytest.raises(UnderstudyError, match=r"gms\.bad_offer"):
        hand_back(bench, 1, NEW, THIRD)
    assert not bench.device.sessions
    assert hand_back(bench, 2, NEW) == msg.KeptMsg(NEW)


def test_epoch_whose_file_was_removed_and_replaced_is_history():
    """A writer came first: the late survivor is its epoch's reader, nothing else."""
    bench = restarted()
    bench.unmap(OLD)
    bench.unmap(NEW)
    bench.attach(5)
    assert hand_back(bench, 2, NEW) == msg.KeptMsg(NEW)
    assert phases(bench)[NEW] is RegionPhase.RETIRED


def replaced_and_cut(capacity_bytes: int = 100 * MIB) -> tuple[Bench, str]:
    """Epoch one is superseded, and the connection of its only reader breaks; it comes back."""
    bench = Bench(capacity_bytes)
    old = bench.load(1)
    bench.mapped.add(old)
    bench.reload(2, identity=OTHER)
    bench.close(1)
    assert bench.device.phase_shown(bench.device.regions[old]) == "releasing"
    assert hand_back(bench, 3, old) == msg.KeptMsg(old)
    assert bench.device.phase_shown(bench.device.regions[old]) == "superseded"
    return bench, old


def test_a_reader_that_rejoins_a_given_up_epoch_does_not_block_writers():
    """Goal: an active engine whose connection broke is no reason to wait. Method: the next writer
    is granted at once, and the memory goes with that reader. (It waited for ever.)
    """
    bench, old = replaced_and_cut()
    bench.drop()
    assert isinstance(bench.attach(4, identity=THIRD), msg.WritingMsg)
    bench.close(3)
    bench.unmap(old)
    assert old not in bench.device.regions


def test_room_that_a_reader_keeps_is_not_on_its_way():
    """Goal: no wait for memory that does not come. Method: three epochs do not fit; the writer is
    refused at once, and told who reads."""
    bench, _ = replaced_and_cut(2 * MIB)
    bench.drop()
    bench.attach(4, identity=THIRD)
    answer = bench.allocate(4)
    assert isinstance(answer, ev.RefuseRequest)
    assert answer.error.code == "gms.out_of_memory"
    assert "engine-3" in answer.error.message
