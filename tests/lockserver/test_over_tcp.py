"""Engines over TCP against a real lock server, with certificates."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable

import pytest

from lockserver.messages import GrantedMsg, RenewedMsg, StatusMsg
from tests.helpers import auntil, free_port
from tests.lockserver.engines import Engine
from tests.lockserver.leased import Leased
from tests.plumbing.wire.certificates import Authority, tls_flags

LEASE_MS, MARGIN_MS, SILENT_MS = 2000, 500, 1000  # how late a busy machine may be


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def address():
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def server(start_server, address, authority):
    """A lock server that engines reach with certificates."""
    times = {"lease": LEASE_MS, "lease-margin": MARGIN_MS, "silent": SILENT_MS}
    flags = [f"--{name}-ms={value}" for name, value in times.items()]
    return start_server("--listen", address, *tls_flags(authority.issue("lockserver")), *flags)


@pytest.fixture
def run(server, address, authority):
    """`run(scenario)`, whose argument makes an engine."""
    security = authority.issue("engine")

    def start(scenario: Callable[[Callable[..., Leased]], Awaitable[None]]) -> None:
        asyncio.run(scenario(lambda *engine: Leased(address, security, *engine)))

    return start


@pytest.mark.slow
def test_engine_over_tcp_holds_while_it_is_heard_and_its_lease_is_shown(server, run):
    """Goal: the lease comes before the grant, outlasts a cut connection, and is replaced once it
    has expired. Method: cut and reconnect; then fall silent, while another one waits."""

    async def scenario(engine):
        async with engine() as holder, engine("engine-1") as other:
            await holder.join("active")
            assert await holder.granted() == 1
            kinds = [type(message) for message in holder.heard]
            assert kinds.index(RenewedMsg) < kinds.index(GrantedMsg)
            assert holder.of(RenewedMsg)[0].lease_ms == LEASE_MS
            await other.join("active")
            holder.conn.close("cut")
            await auntil(lambda: server.lock()["state"] == "releasing", "the cut to be seen")
            await holder.connect()
            holder.want()
            await auntil(lambda: server.lock()["state"] == "held", "it to be back")
            assert await holder.granted() == 1
            first = server.status()["supervisors"][0]
            assert 0 < first["lease_left_ms"] <= LEASE_MS + MARGIN_MS
            assert first["peer"]
            url = f"http://127.0.0.1:{server.http_port}/metrics"
            page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
            left = next(k for k in page.splitlines() if "lock_lease_remaining_seconds{" in k)
            assert 0 < float(left.rpartition(" ")[2]) <= (LEASE_MS + MARGIN_MS) / 1000
            holder.beats = False
            assert await other.granted() == 2
            assert holder.ended

    run(scenario)


def test_over_tcp_only_the_messages_of_engines_are_answered(run):
    """Goal: only the Unix socket accepts requests that change or show the lock. Method: send one
    over TCP."""

    async def scenario(engine):
        async with engine() as one:
            await one.connect()
            one.conn.send(StatusMsg(), 1)
            assert await one.refused() == "lock.unexpected_message"

    run(scenario)


@pytest.mark.slow
def test_connection_that_does_not_say_whose_it_is_is_closed(run):
    """Goal: no stranger keeps a connection. Method: connect, and send nothing."""

    async def scenario(engine):
        async with engine() as one:
            await one.connect()
            await auntil(lambda: one.ended, "the end")

    run(scenario)


@pytest.mark.slow
def test_engines_on_this_host_and_on_others_share_one_lock(server, pod_dir, run):
    """Goal: one machine for both. Method: an engine with a witness holds the lock; one over TCP
    waits, is sent the holder, and is granted the lock when the witness is free; then the other way
    round."""

    async def scenario(engine):
        async with engine() as remote, Engine(pod_dir, "engine-1") as local:
            assert await local.hold() == 1
            await remote.join("active")
            await auntil(lambda: remote.of(GrantedMsg), "the news of who holds")
            local.reap()
            local.relent()
            assert await remote.granted() == 2
            local.launch()
            local.want("active")
            await auntil(lambda: server.lock()["waiters"], "the engine to wait")
            remote.reap()
            assert await local.granted() == 3

    run(scenario)
