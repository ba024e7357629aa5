"""A lock server over TCP that lost its state knows no holder, and must not assume there is none.

On one host, a witness in the directory shows that engines were launched. Holders on other hosts
leave nothing there, so an empty directory may be a new one, or one whose state was lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.helpers import auntil, free_port
from tests.lockserver.members import Member
from tests.lockserver.processes import ServerProcess
from tests.plumbing.wire.certificates import shared, tls_flags

LEASE_MS, MARGIN_MS = 600, 300
CLOCK_MS = 20  # between the start of the lease and the record of it


@pytest.fixture
def server(start_server, request: pytest.FixtureRequest) -> ServerProcess:
    """With its leases `request.param` times as long."""
    times = getattr(request, "param", 1)
    lease = ("--lease-ms", str(times * LEASE_MS), "--lease-margin-ms", str(times * MARGIN_MS))
    address = f"tcp://127.0.0.1:{free_port()}"
    return start_server("--listen", address, *tls_flags(shared()), *lease)


@asynccontextmanager
async def holder_and_other(server: ServerProcess) -> AsyncIterator[tuple[Member, Member]]:
    """engine-0, which holds `active`, and engine-1, which is not connected yet."""
    holder, other = (
        Member(server.flags[1], shared(), engine) for engine in ("engine-0", "engine-1")
    )
    try:
        await holder.join("active")
        await holder.granted()
        yield holder, other
    finally:
        await holder.close()
        await other.close()


async def restart_without_state(server: ServerProcess) -> None:
    server.kill()
    os.unlink(os.path.join(server.directory, "lockserver.json"))
    assert not [name for name in os.listdir(server.directory) if name.startswith("witness_")]
    await asyncio.to_thread(server.start)


async def event(server: ServerProcess, kind: str) -> dict[str, Any]:
    """The first event of this kind about the lock `active` since the server's start."""
    command = (sys.executable, "-m", "lockserver.cli", "events", "--json", "--dir")
    process = await asyncio.create_subprocess_exec(
        *command, server.directory, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    records = [json.loads(line) for line in output.splitlines()]
    return next(r for r in records if r["type"] == kind and r["data"]["lock"] == "active")


@pytest.mark.slow
@pytest.mark.parametrize("server", [2], indirect=True)
def test_state_lost_and_the_holder_silent_no_grant_before_its_lease_can_have_expired(
    server,
):
    """Goal: no second holder while the first may live. Method: grant the lock to one engine, lose
    the state, restart; the other engine asks at once and is granted the lock, but not before a
    lease and the margin."""

    async def scenario() -> None:
        async with holder_and_other(server) as (holder, other):
            holder.beats = False
            await restart_without_state(server)
            await other.join("active")
            await other.granted()
            begun = await event(server, "lock.recovering")
            granted = await event(server, "lock.granted")
            assert granted["data"]["engine"] == "engine-1"
            assert granted["mono_ms"] - begun["mono_ms"] >= 2 * (LEASE_MS + MARGIN_MS) - CLOCK_MS

    asyncio.run(scenario())


# A busy machine has 4.5 s to reconnect before a silent holder's lease would have expired.
@pytest.mark.slow
@pytest.mark.parametrize("server", [5], indirect=True)
def test_state_lost_and_the_holder_reconnects_it_keeps_its_grant(server):
    """Goal: a living holder that knows its token is believed. Method: as above, but the holder
    reconnects; the other engine is not granted the lock, even after the lease."""

    async def scenario() -> None:
        async with holder_and_other(server) as (holder, other):
            token = holder.token()
            await restart_without_state(server)
            await other.join("active")
            await holder.connect()
            holder.want()
            await auntil(lambda: server.lock()["state"] == "held", "the claim to be believed")
            lock = server.lock()
            assert (lock["holder"]["engine"], lock["holder"]["token"]) == ("engine-0", token)
            holder.reap()
            assert await other.granted() > token

    asyncio.run(scenario())
