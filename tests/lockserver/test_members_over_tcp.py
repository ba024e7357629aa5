"""Members over TCP against a real lock server: processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import urllib.request
from typing import Any

import pytest

from lockserver.messages import GrantedMsg, StatusMsg
from tests.helpers import auntil, free_port, until
from tests.lockserver.engines import Engine
from tests.lockserver.members import Member, MemberProcess
from tests.plumbing.wire.certificates import Authority, tls_flags

LEASE_MS, MARGIN_MS, SILENT_MS = 2000, 500, 1000  # how late a busy machine may be
FLAGS = (
    *("--lease-ms", str(LEASE_MS), "--lease-margin-ms", str(MARGIN_MS)),
    *("--silent-ms", str(SILENT_MS)),
)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def security(authority):
    """What every member has."""
    return authority.issue("engine")


@pytest.fixture
def address():
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def server(start_server, address, authority):
    """A lock server that members reach with certificates."""
    return start_server("--listen", address, *tls_flags(authority.issue("lockserver")), *FLAGS)


@pytest.fixture
def start_member(address, security):
    """`start_member(engine, member, members)`: a member in its own process."""
    with contextlib.ExitStack() as stack:

        def start(engine: str, member: int = 0, members: int = 1) -> MemberProcess:
            process = MemberProcess(address, security, engine, member, members)
            stack.callback(process.close)
            return process

        yield start


def events_of(server, *kinds: str) -> list[str]:
    """The events of these kinds, in order, by kind."""
    whole = server.log().rpartition("\n")[0]  # the last line may be under way
    lines = (json.loads(line) for line in whole.splitlines() if line.startswith("{"))
    return [line["event"] for line in lines if line.get("event") in kinds]


def scrape(server) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics") as page:
        return page.read().decode()


def members_of(server, engine: str = "engine-0") -> dict[str, Any]:
    document: dict[str, Any] = server.status()["members"][engine]
    return document


@pytest.mark.slow
def test_member_killed_other_is_notified_and_lock_is_free_when_the_last_is_gone(
    server, start_member
):
    """Goal: the lock counts members over TCP. Method: two member processes hold it; SIGKILL one;
    the other is notified of the loss and lives on, and the next engine is granted the lock only
    when that member has reaped."""
    members = [start_member("engine-0", k, 2) for k in (0, 1)]
    assert [member.granted() for member in members] == [1, 1]
    standby = start_member("engine-1")
    until(lambda: server.lock()["waiters"], "the standby to wait")
    members[1].signal(signal.SIGKILL)
    lost = members[0].hear("member_lost")
    assert lost == {"kind": "member_lost", "incarnation": members[0].incarnation, "member": 1}
    document = members_of(server)
    assert document["state"] == "ending"
    assert document["missing"] == [1]
    assert server.lock()["holder"]["engine"] == "engine-0"
    members[0].reap()
    assert standby.granted() == 2
    until(lambda: len(events_of(server, "lock.member_lost")) == 1, "one event of the loss")


async def with_members(address, security, scenario, *members: tuple[str, int, int]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for engine, member, count in members:
            one = Member(address, security, engine, member, count)
            stack.push_async_callback(one.close)
            found.append(one)
        await scenario(*found)


@pytest.mark.slow
def test_lease_is_answered_before_the_grant_that_follows_from_it(server, address, security):
    """Goal: a member never has to act on a grant without a lease. Method: check the order of the
    messages that a member receives, and the lease they give it."""

    async def scenario(member: Member) -> None:
        await member.join("active")
        assert await member.granted() == 1
        kinds = [type(message).__name__ for message in member.heard]
        assert kinds.index("RenewedMsg") < kinds.index("GrantedMsg")
        assert (await member.renewed()).lease_ms == LEASE_MS

    asyncio.run(with_members(address, security, scenario, ("engine-0", 0, 1)))


def test_over_tcp_only_members_are_answered(server, address, security):
    """Goal: only the Unix socket accepts requests that change or show the lock. Method: send one
    over TCP."""

    async def scenario(member: Member) -> None:
        await member.connect()
        assert member.conn is not None
        member.conn.send(StatusMsg(), 1)
        assert await member.refused() == "lock.unexpected_message"

    asyncio.run(with_members(address, security, scenario, ("engine-0", 0, 1)))


@pytest.mark.slow
def test_engines_on_this_host_and_members_on_others_share_one_lock(
    server, pod_dir, address, security
):
    """Goal: one machine for both. Method: an engine with a witness holds the lock; a member waits,
    is sent the holder, and is granted the lock when the witness is free; then the other way
    round."""

    async def scenario(member: Member) -> None:
        async with Engine(pod_dir, "engine-1") as engine:
            assert await engine.hold() == 1
            await member.join("active")
            await auntil(lambda: member.of(GrantedMsg), "the news of who holds")
            engine.reap()
            engine.relent()
            assert await member.granted() == 2
            engine.launch()
            engine.want("active")
            await auntil(lambda: server.lock()["waiters"], "the engine to wait")
            member.reap()
            assert await engine.granted() == 3

    asyncio.run(with_members(address, security, scenario, ("engine-0", 0, 1)))


@pytest.mark.slow
def test_metrics_show_the_holders_lease_and_missing_members(server, address, security):
    """Goal: the metrics are enough for an alert. Method: scrape while one of two members is
    disconnected."""

    async def scenario(first: Member, second: Member) -> None:
        await first.join("active")
        await second.join("active")
        assert await second.granted() == 1
        assert second.conn is not None
        second.conn.close("cut")
        await auntil(lambda: members_of(server)["missing"] == [1], "the cut to be seen")
        page = await asyncio.to_thread(scrape, server)
        assert 'understudy_lock_members_missing{lock="active"} 1.0' in page
        left = next(line for line in page.splitlines() if "lock_lease_remaining_seconds{" in line)
        assert 0 < float(left.rpartition(" ")[2]) <= (LEASE_MS + MARGIN_MS) / 1000

    asyncio.run(with_members(address, security, scenario, ("engine-0", 0, 2), ("engine-0", 1, 2)))
