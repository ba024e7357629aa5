"""Condemn, digest, and a device that is full: the machine's verdicts, case by case."""

from __future__ import annotations

from gms import messages as msg
from gms.core import events as ev
from gms.core.weights import DEVICE_FULL_RETRY_MS
from plumbing.errors import UnderstudyError
from tests.gms.core.driver import MIB, Bench

DIGEST, OTHER_DIGEST = "d" * 64, "e" * 64
FULL = UnderstudyError("gms.device_full", "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")


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
