"""What the machine grants, refuses, loses and keeps, scenario by scenario."""

from __future__ import annotations

import pytest

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import WAITERS_MAX
from gms.core.weights import JOURNAL_RETRY_MS
from plumbing.errors import UnderstudyError
from tests.gms.core.driver import MIB, Answer, Bench

OTHER = {"model": "tiny", "shards": {"a": "2"}}


def refusal(answer: Answer | None) -> UnderstudyError:
    assert isinstance(answer, ev.RefuseRequest), answer
    return answer.error


def test_wait_ends_at_its_deadline_with_the_reason():
    """An RO wait with nothing committed is refused at its deadline, not before."""
    bench = Bench()
    bench.attach(1, "ro", wait_ms=500)
    assert bench.machine.next_deadline_ms() == 500
    bench.advance(499)
    assert isinstance(bench.last(1), msg.WaitingMsg)
    bench.advance(1)
    error = refusal(bench.last(1))
    assert error.code == "gms.wait_timeout"
    assert error.details["reason"] == "not_committed"
    assert bench.machine.next_deadline_ms() is None


def test_writer_that_stalls_loses_its_staging_but_slow_progress_is_no_stall():
    """Progress puts the deadline off, repeating the same figure does not."""
    bench = Bench(stall_ms=1000)
    bench.attach(1)
    for step in range(5):
        bench.advance(900)
        bench.tell(ev.Received(1, 0, msg.ProgressMsg(step + 1, 100)))
    bench.advance(900)
    bench.tell(ev.Received(1, 0, msg.ProgressMsg(5, 100)))
    bench.attach(2)
    bench.advance(100)
    assert refusal(bench.last(1)).code == "gms.writer_stalled"
    assert isinstance(bench.last(2), msg.WritingMsg)


def test_rw_or_ro_with_replace_writes_only_where_the_identity_differs():
    """`replace` is a permission: the same identity is simply read."""
    bench = Bench()
    bench.load(1)
    assert isinstance(bench.attach(2, replace=True), ev.SendRegion)
    assert isinstance(bench.attach(3, replace=True, identity=OTHER), msg.WritingMsg)


def test_replace_without_room_frees_an_epoch_without_readers():
    """Two copies do not fit and the old one has no readers: it is freed, and the slab waits."""
    bench = Bench(capacity_bytes=10 * MIB)
    old = bench.load(1, 6 * MIB)
    bench.close(1)
    bench.mapped.add(old)  # a process without a session lingers
    bench.attach(2, "rw", replace=True, identity=OTHER)
    told = bench.allocate(2, 6 * MIB)
    assert isinstance(told, msg.WaitingMsg), "it waits for the memory"
    assert told.reason == "releasing"
    assert bench.journal is None
    bench.unmap(old)
    assert isinstance(bench.last(2), msg.AllocatedMsg)
    assert bench.device.oom_waits_total == 1


def test_replace_without_room_names_the_readers():
    """Two copies do not fit and the old one is read: the writer fails, the readers are named."""
    bench = Bench(capacity_bytes=10 * MIB)
    old = bench.load(1, 6 * MIB)
    bench.attach(2, "rw", replace=True, identity=OTHER)
    error = refusal(bench.allocate(2, 6 * MIB))
    assert error.code == "gms.out_of_memory"
    assert "engine-1" in error.message
    assert error.details["free_bytes"] == 4 * MIB
    assert bench.device.committed.id == old


def test_kv_memory_counts_against_the_device_and_is_named():
    """An epoch that fits the device but for its KV memory; then that is freed."""
    bench = Bench(capacity_bytes=10 * MIB)
    message = msg.AllocateMsg(6 * MIB)
    attach = msg.AttachMsg("engine-1", "i", "rw", wait_ms=1000)
    bench.tell(ev.Received(1, 1, attach, kv_bytes=5 * MIB))
    assert bench.device.free_bytes == 5 * MIB
    bench.tell(ev.Received(1, 1, message, kv_bytes=5 * MIB))
    error = refusal(bench.last(1))
    assert (error.code, error.details["kv_bytes"]) == ("gms.out_of_memory", 5 * MIB)
    assert "KV memory 5.0 MiB (`gms drop-kv` frees it if no engine uses it)" in error.message
    bench.tell(ev.Received(2, 1, attach, kv_bytes=0))
    bench.tell(ev.Received(2, 1, message, kv_bytes=0))
    assert isinstance(bench.last(2), msg.AllocatedMsg)


def test_journal_that_cannot_be_written_is_retried_and_reported():
    """A full disk at commit: status says so, the commit goes through when there is room."""
    bench = Bench(auto=False)
    bench.attach(1)
    bench.drain()
    bench.commit(1)
    bench.complete(bench.pending.pop(0))
    bench.fail(bench.pending.pop(0), why="no space")
    assert bench.device.problem is not None
    assert "no space" in bench.device.problem
    assert bench.device.committed is None
    bench.advance(JOURNAL_RETRY_MS)
    bench.drain()
    assert isinstance(bench.last(1), msg.CommittedMsg)
    assert bench.device.problem is None


def test_writer_that_dies_while_its_commit_is_journalled_leaves_a_true_journal():
    """The record is on disk, the commit not published: the journal is put back."""
    bench = Bench(auto=False)
    bench.attach(1)
    bench.drain()
    bench.commit(1)
    bench.complete(bench.pending.pop(0))
    bench.close(1)
    bench.drain()
    assert bench.journal is None
    assert bench.device.regions == {}


def test_failed_driver_call_refuses_the_writer_and_loses_its_staging():
    """Sealing fails because a process can still write: the error goes to the request."""
    bench = Bench(auto=False)
    bench.attach(1)
    bench.drain()
    bench.commit(1)
    bench.fail(bench.pending.pop(0), "gms.still_writable")
    answer = bench.last(1)
    assert refusal(answer).code == "gms.still_writable"
    assert isinstance(answer, ev.RefuseRequest)
    assert answer.request_id == 3
    bench.drain()
    assert bench.device.regions == {}


def test_too_many_waiters_are_refused():
    """The queue is bounded; one more is refused, the others keep their places."""
    bench = Bench()
    bench.attach(1000)
    for session in range(WAITERS_MAX):
        bench.attach(session)
    with pytest.raises(UnderstudyError, match=r"gms\.too_many_waiters"):
        bench.attach(2000)
    assert len(bench.device.waiting) == WAITERS_MAX


def test_reporting_an_epoch_in_use_as_free_is_our_own_fault():
    """A shell that reports a live epoch as free would lose weights: it crashes instead."""
    bench = Bench()
    epoch = bench.load(1)
    with pytest.raises(AssertionError):
        bench.tell(ev.RegionFree(epoch))


def test_slab_that_waits_for_memory_in_vain_fails_at_its_deadline():
    """Memory that is being released does not come: the writer's deadline ends the wait."""
    bench = Bench(capacity_bytes=10 * MIB, stall_ms=1000)
    old = bench.load(1, 6 * MIB)
    bench.close(1)
    bench.mapped.add(old)
    bench.attach(2, "rw", replace=True, identity=OTHER)
    bench.allocate(2, 6 * MIB)
    bench.advance(1000)
    assert refusal(bench.last(2)).code == "gms.writer_stalled"
