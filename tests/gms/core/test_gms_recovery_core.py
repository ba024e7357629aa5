"""Crash without loss in the machine: what the journal says, who is asked, and what comes back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gms import messages as msg
from gms.core import events as ev
from gms.core.events import EpochPhase
from gms.core.grants import JOURNAL_RETRY_MS
from gms.core.recovery import orphans_of
from gms.core.state import Epoch
from gms.manifest import encode, identity_hash, layout_hash
from tests.gms.core.driver import IDENTITY, MIB, Answer, Bench

OTHER = {"model": "tiny", "shards": {"a": "2"}}
THIRD = {"model": "tiny", "shards": {"a": "3"}}
OLD, NEW = "a" * 32, "b" * 32
MANIFEST = encode(())


def record(epoch: str, identity: dict[str, object]) -> ev.JournalRecord:
    return ev.JournalRecord(epoch, MIB, layout_hash((MIB,), MANIFEST), identity_hash(identity))


def restarted() -> Bench:
    """A server that finds a commit of NEW over OLD on disk, which may not have been answered."""
    bench = Bench(
        orphans=orphans_of([OLD, NEW], replace(record(NEW, OTHER), previous=record(OLD, IDENTITY)))
    )
    bench.mapped |= {OLD, NEW}
    return bench


def rejoin(bench: Bench, session: int, epoch: str) -> Answer | None:
    bench.tell(
        ev.Received(
            session, 1, msg.RejoinMsg(f"engine-{session}", f"i{session}", epoch, (MIB,), True)
        )
    )
    return bench.last(session)


def offer(bench: Bench, session: int, identity: dict[str, object]) -> Answer | None:
    told = layout_hash((MIB,), MANIFEST)
    bench.tell(ev.Received(session, 2, msg.OfferMsg(NEW, identity, MANIFEST, told)))
    return bench.last(session)


def phases(bench: Bench) -> dict[str, EpochPhase]:
    return {epoch.id: epoch.phase for epoch in bench.device.epochs.values()}


def test_record_of_a_commit_names_what_it_replaces_until_it_is_answered():
    """Commit over a committed epoch, step by step: with its predecessor first, then alone."""
    bench = Bench(auto=False)
    old = bench.load_by_hand(1)
    bench.attach(2, "rw", replace=True, identity=OTHER)
    bench.drain()
    bench.commit(2, OTHER)
    bench.complete(bench.pending.pop(0))
    written = bench.pending[0]
    assert isinstance(written, ev.WriteJournal)
    assert written.record is not None
    assert written.record.previous is not None
    assert written.record.previous.epoch == old
    bench.drain()
    assert bench.journal is not None
    assert bench.journal.previous is None


def test_lost_commit_does_not_lose_the_epoch_it_replaces():
    """Its writer died with the server: once the kernel says so, the older epoch is asked for."""
    bench = restarted()
    assert rejoin(bench, 1, OLD) is None, "not before it is known"
    bench.unmap(NEW)
    assert isinstance(bench.last(1), msg.WantedMsg)
    assert isinstance(offer(bench, 1, IDENTITY), msg.RejoinedMsg)
    assert phases(bench) == {OLD: EpochPhase.COMMITTED}
    assert bench.journal is not None
    assert (bench.journal.epoch, bench.journal.previous) == (OLD, None)


def test_commit_that_its_writer_hands_back_makes_the_older_one_history():
    """The writer hands it back: the reader of the older epoch is kept as that."""
    bench = restarted()
    assert rejoin(bench, 1, OLD) is None
    assert isinstance(rejoin(bench, 2, NEW), msg.WantedMsg)
    offer(bench, 2, OTHER)
    assert phases(bench) == {OLD: EpochPhase.SUPERSEDED, NEW: EpochPhase.COMMITTED}
    assert isinstance(bench.last(1), msg.RejoinedMsg)
    assert bench.marked == {OLD}, "also for a server that finds no journal"
    assert bench.journal is not None
    assert (bench.journal.epoch, bench.journal.previous) == (NEW, None)


@pytest.mark.parametrize("how", ["condemned", "dropped"])
def test_retired_epoch_is_journalled_again_until_the_write_succeeds(how: str):
    """The journal fails twice: a problem in status, and no answer before it is on disk."""
    bench = Bench(auto=False)
    bench.load_by_hand(1)
    bench.tell(
        ev.Received(1, 0, msg.CondemnMsg("device_error", "Xid 63"))
        if how == "condemned"
        else ev.Received(9, 4, msg.DropMsg(None, even_if_mapped=True))
    )
    assert bench.pending.pop(0) == ev.MarkHistory(str(bench.device.sessions[1].epoch))
    for _ in range(2):
        written = bench.pending.pop(0)
        assert isinstance(written, ev.WriteJournal)
        assert written.record is None
        bench.tell(ev.JournalBehind("no space left"))
        assert "no space left" in str(bench.device.problem)
        assert bench.last(9) is None
        bench.advance(JOURNAL_RETRY_MS)
    bench.drain()
    assert bench.device.problem is None
    assert bench.journal is None
    if how == "dropped":
        assert isinstance(bench.last(9), msg.DroppedMsg)
    assert len([r for r in bench.records if r.type == "gms.journal"]) == 1, "said once"


def test_newcomers_that_wait_do_not_keep_survivors_out():
    """As many newcomers as may wait for the epoch: its survivor is still asked for it."""
    bench = restarted()
    for session in range(100, 164):
        bench.attach(session, "ro", identity=OTHER)
    assert isinstance(rejoin(bench, 2, NEW), msg.WantedMsg)
    offer(bench, 2, OTHER)
    assert all(isinstance(bench.last(session), ev.SendEpoch) for session in range(100, 164))


def test_survivor_that_failed_to_offer_is_asked_last():
    """It does not offer and rejoins: survivors that were not asked yet come before it."""
    bench = restarted()
    rejoin(bench, 1, NEW)
    for silent in (3, 4):
        rejoin(bench, silent, NEW)
    bench.close(1)
    rejoin(bench, 1, NEW)
    assert isinstance(bench.last(3), msg.WantedMsg)
    bench.close(3)
    assert isinstance(bench.last(4), msg.WantedMsg)
    bench.close(4)
    assert isinstance(bench.last(1), msg.WantedMsg)


def test_epoch_whose_file_was_removed_is_taken_back_late():
    """It looked gone, and its reader is there: committed again, if nothing took its place."""
    bench = restarted()
    bench.unmap(OLD)
    bench.unmap(NEW)
    assert bench.device.state == "empty"
    assert isinstance(rejoin(bench, 1, NEW), msg.WantedMsg)
    bench.close(1)
    assert bench.device.state == "empty", "an offer that breaks off leaves nothing behind"
    assert isinstance(rejoin(bench, 2, NEW), msg.WantedMsg)
    assert isinstance(offer(bench, 2, OTHER), msg.RejoinedMsg)
    assert phases(bench) == {NEW: EpochPhase.COMMITTED}


def test_epoch_whose_file_was_removed_and_replaced_is_history():
    """A writer came first: the late survivor is its epoch's reader, nothing else."""
    bench = restarted()
    bench.unmap(OLD)
    bench.unmap(NEW)
    bench.attach(5)
    assert isinstance(rejoin(bench, 2, NEW), msg.RejoinedMsg)
    assert phases(bench)[NEW] is EpochPhase.SUPERSEDED


def test_epoch_without_readers_is_marked_when_it_is_dropped():
    """A process that was stopped since a restart may map it, and come back without a journal."""
    bench = Bench()
    epoch = bench.load(1)
    bench.close(1)
    bench.mapped.add(epoch)
    bench.tell(ev.Received(9, 4, msg.DropMsg(None, even_if_mapped=True)))
    assert bench.marked == {epoch}
    assert isinstance(bench.last(9), msg.DroppedMsg)


def removed() -> Bench:
    """NEW looked gone because its file was removed; its reader, session 2, has brought it back."""
    bench = restarted()
    bench.unmap(OLD)
    bench.unmap(NEW)
    rejoin(bench, 2, NEW)
    offer(bench, 2, OTHER)
    return bench


def test_epoch_that_came_back_late_does_not_do_so_again_after_it_was_dropped():
    """Dropped, its reader's connection ends and comes back: history."""
    bench = removed()
    bench.tell(ev.Received(9, 4, msg.DropMsg(None, even_if_mapped=True)))
    bench.close(2)
    assert isinstance(rejoin(bench, 3, NEW), msg.RejoinedMsg)
    assert bench.device.committed is None


def test_reader_of_an_earlier_life_leaves_while_a_removed_epoch_is_handed_back():
    """Two processes map an epoch without a file: one leaves while the other is asked for it."""
    bench = restarted()
    bench.unmap(OLD)
    bench.unmap(NEW)
    bench.attach(5, "rw", identity=IDENTITY)
    assert isinstance(rejoin(bench, 2, NEW), msg.RejoinedMsg), "a writer came first"
    bench.close(5)
    bench.close(2)
    assert isinstance(rejoin(bench, 3, NEW), msg.WantedMsg)
    rejoin(bench, 4, NEW)
    bench.close(4)
    assert isinstance(offer(bench, 3, OTHER), msg.RejoinedMsg)
    assert phases(bench) == {NEW: EpochPhase.COMMITTED}


def replaced_and_cut(capacity_bytes: int = 100 * MIB) -> tuple[Bench, str]:
    """Epoch one is superseded, and the connection of its only reader breaks; it comes back."""
    bench = Bench(capacity_bytes)
    old = bench.load(1)
    bench.mapped.add(old)
    bench.load(2, mode="rw", replace=True, identity=OTHER)
    bench.close(1)
    assert bench.device.epochs[old].phase is EpochPhase.RELEASING
    assert isinstance(rejoin(bench, 3, old), msg.RejoinedMsg)
    return bench, old


def test_a_reader_that_rejoins_a_given_up_epoch_does_not_block_writers():
    """Goal: an active engine whose connection broke is no reason to wait. Method: the next writer
    that replaces is granted at once, and the memory goes with that reader. (It waited for ever.)
    """
    bench, old = replaced_and_cut()
    assert isinstance(bench.attach(4, "rw", replace=True, identity=THIRD), ev.GrantWriting)
    bench.close(3)
    bench.unmap(old)
    assert old not in bench.device.epochs


def test_room_that_a_reader_keeps_is_not_on_its_way():
    """Goal: no wait for memory that does not come. Method: three epochs do not fit; the writer is
    refused at once, and told who reads."""
    bench, _ = replaced_and_cut(2 * MIB)
    bench.attach(4, "rw", replace=True, identity=THIRD)
    answer = bench.allocate(4)
    assert isinstance(answer, ev.RefuseRequest)
    assert answer.error.code == "gms.out_of_memory"
    assert "engine-3" in answer.error.message


@pytest.mark.parametrize("others", [0, 1])
def test_a_lost_journal_is_rewritten_when_no_survivor_is_left(others: int):
    """Goal: a lost journal is written anew at the right time. Method: free every orphan, one after
    the other; only the last one's end is written down."""
    orphans = [Epoch(f"{number:032x}", EpochPhase.ORPHANED) for number in range(1 + others)]
    bench = Bench(orphans=orphans, is_journal_lost=True)
    bench.auto = False
    for number, orphan in enumerate(orphans):
        bench.unmap(orphan.id)
        written = [e for e in bench.pending if isinstance(e, ev.WriteJournal)]
        assert len(written) == (number == others)
    assert not bench.device.is_journal_lost


def test_drop_waits_for_a_commit_that_is_being_written():
    """The committed epoch is dropped while its successor is journalled: answered after that."""
    bench = Bench(auto=False)
    bench.load_by_hand(1)
    bench.attach(2, "rw", replace=True, identity=OTHER)
    bench.drain()
    bench.commit(2, OTHER)
    bench.complete(bench.pending.pop(0))
    bench.tell(ev.Received(9, 4, msg.DropMsg(None, even_if_mapped=True)))
    assert bench.last(9) is None
    bench.drain()
    assert isinstance(bench.last(9), msg.DroppedMsg)
    assert bench.device.committed is not None
    assert bench.journal is not None
    assert bench.journal.epoch == bench.device.committed.id
