"""What the machine grants, refuses, loses and keeps, scenario by scenario; what condemns an epoch,
and a device that is full."""

from __future__ import annotations

import pytest

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import WAITERS_MAX
from gms.core.weights import DEVICE_FULL_RETRY_MS
from plumbing.errors import UnderstudyError
from tests.gms.core.driver import MIB, Answer, Bench

DIGEST, OTHER_DIGEST = "d" * 64, "e" * 64
FULL = UnderstudyError("gms.device_full", "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")


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


def test_kv_memory_counts_against_the_device_and_is_named():
    """An epoch that fits the device but for its KV memory; then that is freed."""
    bench = Bench(capacity_bytes=10 * MIB)
    message = msg.AllocateMsg(6 * MIB)
    attach = msg.AttachMsg("engine-1", "i", "rw_or_ro", wait_ms=1000)
    bench.tell(ev.Received(1, 1, attach, kv_bytes=5 * MIB))
    assert bench.device.free_bytes == 5 * MIB
    bench.tell(ev.Received(1, 1, message, kv_bytes=5 * MIB))
    error = refusal(bench.last(1))
    assert (error.code, error.details["kv_bytes"]) == ("gms.out_of_memory", 5 * MIB)
    assert "KV memory 5.0 MiB (`gms drop-kv` frees it if no engine uses it)" in error.message
    bench.tell(ev.Received(2, 1, attach, kv_bytes=0))
    bench.tell(ev.Received(2, 1, message, kv_bytes=0))
    assert isinstance(bench.last(2), msg.AllocatedMsg)


def test_too_many_waiters_are_refused():
    """The queue is bounded; one more is refused, the others keep their places."""
    bench = Bench()
    bench.attach(1000)
    for session in range(WAITERS_MAX):
        bench.attach(session)
    with pytest.raises(UnderstudyError, match=r"gms\.too_many_waiters"):
        bench.attach(2000)
    assert len(bench.device.waiting) == WAITERS_MAX


def test_slab_that_waits_for_memory_in_vain_fails_at_its_deadline():
    """Memory that is being released does not come: the writer's deadline ends the wait."""
    bench = Bench(capacity_bytes=10 * MIB, stall_ms=1000)
    old = bench.load(1, 6 * MIB)
    bench.attach(2)
    bench.drop()
    bench.attach(3)
    bench.mapped.add(old)
    bench.close(1)
    bench.close(2)
    bench.allocate(3, 6 * MIB)
    bench.advance(1000)
    assert refusal(bench.last(3)).code == "gms.writer_stalled"


# ---------------------------------------------------------------------- verdicts


def loaded(readers: int = 2) -> Bench:
    """Sessions 1 … `readers` read one committed epoch; 1 was its writer."""
    bench = Bench()
    bench.load(1)
    for session in range(2, readers + 1):
        bench.attach(session, "ro")
    return bench


def test_digest_is_journalled_once():
    """The writer's digest goes to disk; a second opinion does not replace it."""
    bench = loaded(2)
    bench.tell(ev.Received(1, 0, msg.DigestMsg(DIGEST)))
    bench.tell(ev.Received(2, 0, msg.DigestMsg(OTHER_DIGEST)))
    assert bench.journal.digest == DIGEST


def test_condemnation_of_a_superseded_epoch_means_nothing():
    """It is out of service already; the epoch that replaced it stays."""
    bench = loaded(2)
    fresh = bench.reload(3)
    bench.tell(ev.Received(1, 0, msg.CondemnMsg("other tokens")))
    assert bench.device.committed.id == fresh


def test_second_incarnation_that_fails_its_canary_condemns():
    """One failure may be the engine's own, even twice; the same of another process is not."""
    bench = loaded(2)
    for session in (1, 1, 2):
        assert bench.device.committed is not None
        bench.tell(ev.Received(session, 0, msg.CondemnMsg("other tokens")))
    assert bench.device.committed is None


def full(bench: Bench) -> None:
    """The driver refuses the slab that is being made."""
    create = bench.pending.pop(0)
    assert isinstance(create, ev.CreateSlab)
    bench.tell("done", create, error=FULL)


def test_writer_waits_for_a_full_device_and_the_message_names_its_holders():
    """The driver has no memory: the writer gets the reason and, in the end, its slab."""
    bench = Bench(auto=False)
    bench.attach(1)
    bench.drain()
    bench.allocate(1, MIB)
    full(bench)
    told = bench.last(1)
    assert isinstance(told, msg.WaitingMsg)
    assert told.reason == "device_full"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in told.message
    assert "Held by this service: nothing" in told.message
    assert not bench.pending, "not at once again"
    bench.advance(DEVICE_FULL_RETRY_MS)
    full(bench)
    assert bench.last(1) is told, "nothing new to say"
    bench.advance(DEVICE_FULL_RETRY_MS)
    bench.drain()
    assert isinstance(bench.last(1), msg.AllocatedMsg)
    assert bench.device.oom_waits_total == 1
    assert bench.device.staging.size_bytes == MIB, "counted once"
