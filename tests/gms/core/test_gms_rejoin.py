"""Readers that come back to a machine that lives, or to the one after it."""

from __future__ import annotations

import pytest

from gms import messages as msg
from gms.core import events as ev
from gms.core import events as fx
from gms.core.events import EpochPhase
from gms.core.state import Epoch
from tests.gms.core.driver import MIB, Bench

OTHER = {"model": "tiny", "shards": {"a": "2"}}
THIRD = {"model": "tiny", "shards": {"a": "3"}}


def rejoin(bench: Bench, session: int, epoch: str, *, was_committed: bool = True):
    bench.tell(
        ev.Received(
            session,
            1,
            msg.RejoinMsg(f"engine-{session}", f"i{session}", epoch, (MIB,), was_committed),
        )
    )
    return bench.last(session)


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
    assert isinstance(bench.attach(4, "rw", replace=True, identity=THIRD), fx.GrantWriting)
    bench.close(3)
    bench.unmap(old)
    assert old not in bench.device.epochs


def test_room_that_a_reader_keeps_is_not_on_its_way():
    """Goal: no wait for memory that does not come. Method: three epochs do not fit; the writer is
    refused at once, and told who reads."""
    bench, _ = replaced_and_cut(2 * MIB)
    bench.attach(4, "rw", replace=True, identity=THIRD)
    answer = bench.allocate(4)
    assert isinstance(answer, fx.RefuseRequest)
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
        written = [e for e in bench.pending if isinstance(e, fx.WriteJournal)]
        assert len(written) == (number == others)
    assert not bench.device.is_journal_lost
