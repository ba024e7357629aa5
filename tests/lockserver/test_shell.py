"""The server's shell: short of descriptors, looking at evidence, recording events.

On a machine that is short nothing is freed or lost, and everything is done by itself once there is
room; by its own clients a server is never short (`room_for_connections`)."""

from __future__ import annotations

import errno
import signal
from types import SimpleNamespace

import pytest

from lockserver.core import events as ev
from lockserver.core.events import Happened
from lockserver.core.names import WitnessFile, WitnessState
from lockserver.core.recovery import DueEvidence
from lockserver.server import prober
from lockserver.server.gateways import ServiceSocket
from lockserver.server.prober import DENSE_S, FAST_S, SLOW_S, Prober
from lockserver.server.server import LockServer, LockSettings, room_for_connections
from plumbing.errors import InvariantError, UsageError
from tests.fake_clock import FakeClock
from tests.helpers import auntil, descriptors_below, free_port, room_for
from tests.lockserver.engines import Engine

NOTHING = 3  # below every descriptor that a server opens


@pytest.mark.parametrize("died_meanwhile", [False, True], ids=["holder lives", "holder dies"])
async def test_standby_that_asks_without_a_descriptor_left_is_queued_later(
    pod_dir, start_server, start_engine, died_meanwhile
):
    """Goal: a shortage costs a healthy standby nothing but time, and no kill during or after it is
    more than a normal failover. Method: a connected standby asks when the server can open nothing:
    it is told to ask again, and no lock is freed; when there is room, it is queued and, if the
    holder is gone, granted."""
    server = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    async with Engine(pod_dir, "engine-1") as standby:
        standby.launch()
        await auntil(lambda: server.status()["supervisors_total"] == 2, "its connection")
        with descriptors_below(NOTHING, server.pid):
            standby.want("active")
            await auntil(lambda: "lock.witness_unseen" in standby.refused, "its refusal")
            if died_meanwhile:
                holder.signal(signal.SIGKILL, tree=True)
                await auntil(holder.is_gone, "the end of the holder")
                await auntil(lambda: "lock.unreachable" in server.log(), "the shortage to be told")
                assert "lock.free" not in server.log()
        if not died_meanwhile:
            await auntil(lambda: server.lock()["waiters"], "it to be queued")
            holder.signal(signal.SIGKILL, tree=True)
        assert await standby.granted() == 2
        await auntil(lambda: server.status()["problem"] is None, "the shortage to be over")
    assert "Traceback" not in server.log()


@pytest.mark.parametrize(("limit", "room"), [(4096, 1152), (256, 53), (128, 21), (64, None)])
def test_connections_are_as_many_as_descriptors_allow(limit, room):
    with descriptors_below(limit):
        if room is not None:
            assert room_for_connections() == room
            return
        with pytest.raises(UsageError) as caught:
            room_for_connections()
    assert caught.value.code == "lock.too_few_descriptors"


async def test_effect_that_fails_unforeseen_ends_the_process_and_is_not_logged_away(pod_dir):
    """Goal: what a shortage cannot explain is our own fault, and never half an answer. Method: an
    effect whose system call fails, with another one behind it."""

    def fail(supervisor: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    server = LockServer(LockSettings(pod_dir))
    server.processes = SimpleNamespace(forget=fail)
    with pytest.raises(InvariantError, match="Forget failed"):
        server._perform([ev.Forget("0" * 16), ev.Forget("1" * 16)])


def test_service_address_that_cannot_be_bound_or_lent_for_now_is_taken_from_nobody():
    """Goal: a shortage is waited out. Method: bind and copy with no descriptor left, then with
    one."""
    service = ServiceSocket(f"127.0.0.1:{free_port()}")
    with room_for(0):
        assert not service.bind_again(now_ms=0)
        assert "Too many open files" in str(service.problem)
    assert service.bind_again(now_ms=1000)
    assert service.problem is None
    with room_for(0):
        assert service.copy() is None
        assert "open files" in str(service.problem)
    copy = service.copy()
    assert copy is not None
    copy.close()
    service.close()


DUE = DueEvidence(
    "active",
    "engine-0-0123456789abcdef",
    WitnessFile("witness_engine-0_0123456789abcdef", 1, 1),
)


class Loop:
    """The prober's loop and clock, driven by hand: records each wait and how it was requested."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits: list[float] = []
        self.next: list[object] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback):
        self.next.append(callback)
        return SimpleNamespace(cancel=lambda: None)

    def call_later(self, delay_s, callback):
        self.slept(delay_s)
        return self.call_soon(callback)

    def slept(self, delay_s) -> None:
        self.waits.append(delay_s)
        self.now_s += delay_s


def tried(monkeypatch, free_after: int) -> tuple[list[float], list[object]]:
    """The waits between tries of a witness that becomes free at try `free_after`; and what was
    fed."""
    loop, fed, results = Loop(), [], iter([WitnessState.HELD] * (free_after - 1))
    monkeypatch.setattr(prober, "time", SimpleNamespace(sleep=loop.slept, monotonic=loop.time))
    probe = lambda *file: next(results, WitnessState.FREE)  # noqa: E731
    monkeypatch.setattr(prober, "witness", SimpleNamespace(probe=probe))
    monkeypatch.setattr(prober.recovery, "evidence_due", lambda *_: [] if fed else [DUE])
    monkeypatch.setattr(prober.recovery, "scan_is_due", lambda *_: False)
    monkeypatch.setattr(prober, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    machine = SimpleNamespace(locks={}, supervisors={}, evidence_gone="evidence_gone")
    Prober("/run", machine, lambda *said: fed.append(said)).kick()
    assert len(fed) == (free_after == 1)  # tried within the call itself
    while loop.next:
        loop.next.pop(0)()
    return loop.waits, fed


def test_free_witness_is_found_without_delay(monkeypatch):
    """Goal: no delay if the process is gone already. Method: the witness is free at the first
    try."""
    waits, fed = tried(monkeypatch, free_after=1)
    assert waits == []
    assert fed == [("evidence_gone", DUE)]


def test_dying_tree_is_probed_densely_then_less_often(monkeypatch):
    """Goal: a grant follows a death within 0.2 ms, and a hung process costs little. Method: a
    witness that is held for about five seconds of a clock that advances only with the prober's
    waits."""
    waits, fed = tried(monkeypatch, free_after=1500)
    assert waits[:99] == [DENSE_S] * 99
    dense, fast = waits.count(DENSE_S), waits.count(FAST_S)
    # No wait before the first try, nor before the second, which is the loop's next turn.
    assert waits == [DENSE_S] * dense + [FAST_S] * fast + [SLOW_S] * (1498 - dense - fast)
    assert 0.019 < dense * DENSE_S < 0.021
    assert 0.97 < fast * FAST_S < 1.0
    assert len(fed) == 1


async def test_event_recorded_late_has_the_time_at_which_it_happened(pod_dir, monkeypatch):
    """Goal: the phases in reports stay accurate although recording is delayed. Method: two events,
    and a clock that moves between them and again before they are recorded; a third that only the
    loop records."""
    clock, recorded = FakeClock(1000.0), []
    monkeypatch.setattr("lockserver.server.server.SystemClock", lambda: clock)
    server = LockServer(LockSettings(pod_dir))
    server.events.subscribe(recorded.append)
    server._happened(Happened("lock.releasing", "first"))
    clock.advance(1.0)
    server._happened(Happened("lock.granted", "second"))
    clock.advance(4.0)
    assert not recorded, "nothing is recorded while a grant may be under way"
    server.flush()
    server.flush()
    assert [(each.id, each.mono_ms) for each in recorded] == [(1, 1000.0), (2, 1001.0)]
    server._happened(Happened("lock.queue", "third"))
    await auntil(lambda: len(recorded) == 3, "the event to be recorded")
