"""The client over TCP: the lease as it counts it (with delays, stops and cuts in tests/sim/lease),
and what it acts on and arms. A server of the real messages on a real socket does what each test
says; the kernel's timer is only written down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from lockserver import witness
from lockserver.client.lease import KILL_FRACTION, SENT_MAX, LeaseKeeper, now_ms
from plumbing.errors import UnderstudyError
from tests.helpers import auntil
from tests.lockserver.engines import HearingClient, running
from tests.lockserver.lease_server import LeaseServer
from tests.plumbing.wire.certificates import shared


class Kept(LeaseKeeper):
    """A keeper at a time that the test sets; `at` asks it then."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        super().__init__(lambda: self.now_ms)

    def at(self, now_ms: float) -> Kept:
        self.now_ms = now_ms
        return self


def test_lease_counts_from_its_request():
    """Goal: the time of the answer does not count. Method: an answer that takes half the lease."""
    keeper = Kept()
    keeper.at(100.0).sent(1)
    assert not keeper.may_act()
    assert keeper.at(600.0).renewed(1, 1000)
    assert (keeper.at_ms(KILL_FRACTION), keeper.at_ms(1.0)) == (900.0, 1100.0)
    assert [keeper.at(now_ms).may_act() for now_ms in (699.0, 700.0)] == [True, False]
    assert [keeper.at(now_ms).valid_for_ms() for now_ms in (650.0, 800.0)] == [50.0, 0.0]


def test_only_a_holder_must_stop():
    """Goal: an unreachable standby has nothing to stop. Method: the same silence without a lock and
    with one."""
    keeper = Kept()
    keeper.sent(1)
    assert keeper.at(5.0).renewed(1, 1000)
    assert not keeper.at(5000.0).must_stop()
    keeper.hold()
    assert [keeper.at(now_ms).must_stop() for now_ms in (599.0, 600.0)] == [False, True]
    assert keeper.at(0.0).must_stop(), "once lost, it stays lost"
    assert keeper.valid_for_ms() == 0.0


def test_unanswered_messages_are_bounded():
    """Goal: a server that answers nothing costs no memory, and its next answer counts. Method: send
    far more messages than are kept; answer the last one and one that was dropped."""
    keeper = Kept()
    for number in range(1, 10 * SENT_MAX):
        keeper.at(float(number)).sent(number)
    keeper.at(700.0)
    assert not keeper.renewed(1, 1000)
    assert keeper.renewed(10 * SENT_MAX - 1, 1000)


LEASE_MS = 2000  # a busy machine may stall a process for a second


class Ledger:
    """Stands in for the kernel's timer: records when it would have fired."""

    def __init__(self) -> None:
        self.at_ms: float | None = None
        self.armed = 0

    def arm(self, at_ms: float) -> None:
        self.at_ms = at_ms
        self.armed += 1

    def disarm(self) -> None:
        self.at_ms = None


class Member(HearingClient):
    """One client."""

    def __init__(self, address: str) -> None:
        self.ender = Ledger()
        tcp = {"ender": self.ender, "security": shared()}
        super().__init__(address, engine="engine-0", heartbeat_ms=50, **tcp)
        self.incarnation = witness.new_incarnation("engine-0")

    def want(self, *, is_wanted: bool = True) -> None:
        self.set_want(self.incarnation, is_wanted=is_wanted)

    def granted(self, incarnation: str, token: int) -> None:
        self.told.append(("active", (incarnation, token)))


@contextlib.asynccontextmanager
async def holding(server: LeaseServer) -> AsyncIterator[Member]:
    """A member that was granted `active` by a server that grants it on request."""
    server.auto = ("active",)
    async with running(Member(server.address)) as holder:
        holder.want()
        await auntil(lambda: holder.heard("active"), "the grant")
        yield holder


def with_server(test: Callable[[LeaseServer], Awaitable[None]]) -> Callable[[], None]:
    """Run `test` on its own loop, with a server."""

    def run() -> None:
        async def whole() -> None:
            server = LeaseServer(LEASE_MS)
            await server.start()
            try:
                await test(server)
            finally:
                await server.stop()

        asyncio.run(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def beats(server: LeaseServer, count: int = 3) -> None:
    target = server.beats + count
    await auntil(lambda: server.beats >= target, f"{count} more heartbeats")


@with_server
async def test_a_holder_is_armed_from_its_grant_until_it_is_reaped(server):
    """Goal: the kernel's timer is armed exactly while `active` is held. Method: waiting, granted,
    renewed, reaped; the timer is due at 80 % of the lease after a message that was sent."""
    async with running(Member(server.address)) as member:
        member.want()
        await beats(server)
        assert member.ender.at_ms is None
        begun, server.auto = now_ms(), ("active",)
        server.hang_up()
        await auntil(lambda: member.heard("active"), "the grant")
        assert member.ender.at_ms is not None
        assert begun <= member.ender.at_ms - 0.8 * LEASE_MS <= now_ms()
        first = member.ender.at_ms
        await auntil(lambda: member.ender.at_ms > first, "to be armed anew by a renewal")
        member.set_want(None)
        assert member.ender.at_ms is None
        await beats(server)
        assert member.ender.at_ms is None


@with_server
async def test_silent_server_costs_a_holder_its_lease_once(server):
    """Goal: the lock is lost at 60 % of the lease, before the kernel's 80 %, and only once, even if
    the server answers again; the next incarnation starts afresh. Method: a deaf server, then one
    that answers."""
    server.lease_ms = 2 * LEASE_MS  # from the loss to the kernel's end there are 20 % of it
    async with holding(server) as member:
        server.is_deaf = True
        await auntil(lambda: member.heard("lease_lost"), "the lease to be lost")
        assert member.ender.at_ms is not None
        assert now_ms() < member.ender.at_ms
        assert member.lease["is_lost"]
        assert member.lease["valid_for_ms"] == 0
        server.is_deaf = False
        await beats(server)
        assert len(member.heard("lease_lost")) == 1
        first, member.incarnation = member.incarnation, witness.new_incarnation("engine-0")
        member.want()
        await auntil(lambda: len(member.heard("active")) >= 2, "another grant")
        assert member.heard("active")[-1] == (member.incarnation, server.token)
        assert first != member.incarnation
        assert member.lease["valid_for_ms"] > 0
        assert len(member.heard("lease_lost")) == 1


@with_server
async def test_grant_without_a_valid_lease_is_requested_again(server):
    """Goal: a grant is acted on only while a lease is valid; otherwise it is dropped and requested
    again. Method: a server that grants but renews nothing, then renews."""
    server.renews, server.auto = False, ("active",)
    async with running(Member(server.address)) as member:
        member.want()
        await auntil(lambda: len(server.wants) >= 5, "the want to be repeated")
        assert member.heard("active") == []
        assert member.ender.armed == 0
        server.renews = True
        await auntil(lambda: member.heard("active"), "the grant")
        count = len(server.wants)
        await beats(server)
        assert len(server.wants) <= count + 1, "repeated only as long as it must be"


@with_server
async def test_server_restart_within_the_lease_costs_nothing(server):
    """Goal: no engine loses anything by a restart. Method: stop the server, start it on the same
    port."""
    async with holding(server) as member:
        port = server.port
        await server.stop()
        await auntil(lambda: not member.is_connected, "the connection to end")
        await auntil(lambda: member.problem, "an attempt to fail")
        await server.start(port)
        await auntil(lambda: len(member.heard("active")) >= 2, "the same grant again")
        assert len(set(member.heard("active"))) == 1
        assert member.problem is None
        assert member.heard("lease_lost") == []


@pytest.mark.slow
@with_server
async def test_silent_connection_is_replaced(server):
    """Goal: half-open connections are detected even if the lease is long. Method: a server that
    stays connected but silent; the client opens a new connection by itself."""
    for lease_ms in (LEASE_MS, 3_600_000):
        server.lease_ms, server.is_deaf = lease_ms, False
        async with running(Member(server.address)) as member:
            member.want(is_wanted=False)
            await beats(server)
            server.is_deaf = True
            await auntil(lambda: member.heard("lost"), "the silent connection to be closed")
            assert "reconnecting" in member.heard("lost")[0]
            server.is_deaf = False
            await beats(server)


def test_client_over_tcp_requires_a_timer(monkeypatch):
    """Goal: a process that the kernel could not kill is refused. Method: a kernel without
    timers."""

    def refuse() -> None:
        raise UnderstudyError("lock.no_dead_man", "no timer")

    monkeypatch.setattr("lockserver.client.lease.DeadMan", refuse)
    with pytest.raises(UnderstudyError, match="no_dead_man"):
        HearingClient("tcp://127.0.0.1:1", engine="engine-0")
