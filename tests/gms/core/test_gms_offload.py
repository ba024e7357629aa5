"""Offload and restage in the machine of a device: what stands for its weights, and until when."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gms import messages as msg
from gms.core import events as ev
from plumbing.errors import UnderstudyError
from tests.gms.core.driver import IDENTITY, MIB, Bench

DIGEST, OTHER_DIGEST = "d" * 64, "e" * 64
COPY = "c" * 32


def loaded(**more: Any) -> tuple[Bench, str]:
    """A device whose writer has committed and digested one epoch, and has left."""
    bench = Bench(**more)
    epoch = bench.load(1)
    bench.tell(ev.Received(1, 0, msg.DigestMsg(DIGEST)))
    bench.close(1)
    return bench, epoch


def copy_of(bench: Bench, **changes: Any) -> ev.JournalRecord:
    """The record of a good copy of what is committed, or of one that differs."""
    committed = bench.device.committed
    return replace(committed.record(), **{"epoch": COPY, **changes})


def offload(bench: Bench, copy: ev.JournalRecord | None, **facts: Any) -> Any:
    """Ask on a connection of its own; the last answer."""
    bench.tell(ev.Received(9, 5, msg.OffloadMsg(), copy=copy, **facts))
    return bench.last(9)


def offloaded() -> tuple[Bench, str]:
    bench, epoch = loaded()
    assert offload(bench, copy_of(bench)) == msg.OffloadedMsg(COPY, MIB)
    return bench, epoch


def writing(answer: Any) -> tuple[str, str | None]:
    """The epoch of a grant, and the copy from which it may be written."""
    assert isinstance(answer, msg.WritingMsg)
    return answer.epoch, answer.copy


def refused(bench: Bench, copy: ev.JournalRecord | None, **facts: Any) -> str:
    with pytest.raises(UnderstudyError) as caught:
        offload(bench, copy, **facts)
    return caught.value.code


@pytest.mark.parametrize(
    "changes",
    [{"digest": OTHER_DIGEST}, {"digest": None}, {"layout_hash": "x"}, {"identity_hash": "x"}],
    ids=lambda changes: next(iter(changes)),
)
def test_only_a_copy_of_the_same_bytes_stands_for_an_epoch(changes: dict[str, Any]):
    """Another digest, layout or identity, or a digest that is not known: nothing is freed."""
    bench, epoch = loaded()
    assert refused(bench, copy_of(bench, **changes)) == "gms.no_copy"
    assert refused(bench, None) == "gms.no_copy"
    assert bench.device.committed.id == epoch


def test_reader_that_asks_has_left_whether_the_memory_is_freed_or_not():
    """On its own session: it is no reader any more; the other one still is."""
    bench, epoch = loaded()
    bench.attach(2)
    bench.attach(3)
    bench.tell(ev.Received(2, 5, msg.OffloadMsg(), copy=copy_of(bench)))
    answer = bench.last(2)
    assert isinstance(answer, ev.RefuseRequest)
    assert "still mapped by engine-3" in answer.error.message
    assert [each.id for each in bench.device.holders(bench.device.regions[epoch])] == [3]
    bench.tell(ev.Received(3, 5, msg.OffloadMsg(), copy=copy_of(bench)))
    assert bench.last(3) == msg.OffloadedMsg(COPY, MIB)
    assert not bench.device.sessions


def test_commit_that_is_not_the_copy_is_refused():
    """Restaged from another copy, or with another identity than the copy's."""
    bench, _ = offloaded()
    bench.attach(2)
    bench.allocate(2)
    with pytest.raises(UnderstudyError) as other_copy:
        bench.commit(2, restaged_from="b" * 32)
    bench.close(2)
    bench.attach(3, identity=None)
    bench.allocate(3, 2 * MIB)
    with pytest.raises(UnderstudyError) as other_identity:
        bench.commit(3, restaged_from=COPY)
    assert other_copy.value.code == other_identity.value.code == "gms.stale_copy"


def test_other_weights_than_the_offloaded_ones_are_refused():
    """As where something is committed."""
    bench, _ = offloaded()
    other = {**IDENTITY, "model": "large"}
    answer = bench.attach(2, identity=other)
    assert isinstance(answer, ev.RefuseRequest)
    assert answer.error.code == "gms.identity_mismatch"


def test_reader_waits_until_the_weights_are_back():
    """`ro` on an offloaded device waits, with the reason, and reads what is restaged."""
    bench, _ = offloaded()
    waiting = bench.attach(2, "ro")
    assert isinstance(waiting, msg.WaitingMsg)
    assert waiting.reason == "offloaded"
    bench.attach(3)
    bench.allocate(3)
    bench.commit(3, restaged_from=COPY)
    assert isinstance(bench.last(2), ev.SendRegion)


def test_request_that_was_overtaken_is_refused():
    """The memory is not free yet when the copy is dropped: there is nothing to confirm."""
    bench, epoch = loaded()
    bench.mapped.add(epoch)
    offload(bench, copy_of(bench))
    bench.tell(ev.Received(8, 6, msg.DropMsg()))
    answer = bench.last(9)
    assert isinstance(answer, ev.RefuseRequest)
    assert answer.error.code == "gms.not_offloaded"


def test_drop_forgets_the_copy_and_the_next_engine_loads():
    """An operator wants a fresh load: also after a restart, nobody is told of the copy."""
    bench, _ = offloaded()
    assert bench.device.state == "offloaded"
    bench.tell(ev.Received(9, 6, msg.DropMsg()))
    assert bench.last(9) == msg.DroppedMsg(COPY)
    assert (bench.device.state, bench.offloaded) == ("empty", None)
    assert writing(bench.attach(2)) == ("0" * 31 + "2", None)


def test_nothing_is_offloaded_where_nothing_is_committed():
    assert refused(Bench(), None) == "gms.nothing_committed"
