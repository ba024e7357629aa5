"""Over TCP, where leases are the evidence, and time ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.helpers import auntil, free_port
from tests.lockserver.leased import Leased
from tests.lockserver.processes import ServerProcess
from tests.lockserver.wait_scenes.scene import Scene, Told
from tests.plumbing.wire.certificates import shared, tls_flags

HOUR = ("--lease-margin-ms", "3590000")  # so that no lease expires while it is looked at


def server_over_tcp(scene: Scene, *flags: str) -> ServerProcess:
    lease = ("--lease-ms", "1000", "--lease-margin-ms", "500")
    address = f"tcp://127.0.0.1:{free_port()}"
    return scene.server("--listen", address, *tls_flags(shared()), *lease, *flags)


@asynccontextmanager
async def held_over_tcp(scene: Scene) -> AsyncIterator[tuple[ServerProcess, Leased, int]]:
    """engine-0 holds `active`: with the token."""
    server = server_over_tcp(scene)
    async with Leased(server.flags[1], shared()) as engine:
        await engine.join("active")
        yield server, engine, await engine.granted()


@asynccontextmanager
async def leases_on_file(scene: Scene) -> AsyncIterator[Told]:
    """A restarted server that waits for the lease of a holder that does not reconnect."""
    async with held_over_tcp(scene) as (server, _, token):
        server.kill()
        server.flags = (*server.flags, *HOUR)
        await asyncio.to_thread(server.start)
        evidence = ("its lease expires in 59m", "has not connected")
        yield Told("recovering", "engine-0", evidence, ("reconnect on their own",), token=token)


@asynccontextmanager
async def cut_over_tcp(scene: Scene) -> AsyncIterator[Told]:
    """The holder's connection is lost while its lease is valid."""
    async with held_over_tcp(scene) as (server, engine, token):
        server.kill()
        server.flags = (*server.flags, *HOUR)
        await asyncio.to_thread(server.start)
        await engine.connect()
        engine.want()
        await auntil(lambda: server.lock()["state"] == "held", "the holder to be back")
        assert engine.conn is not None
        engine.conn.close("cut")
        await auntil(lambda: server.lock()["state"] == "releasing", "the cut to be seen")
        evidence = ("its lease expires in 59m", "not connected", "ago")
        fix = ("its lease expires in", "kill its container or host")
        yield Told("releasing", "engine-0", evidence, fix, token=token, pid=None)


@asynccontextmanager
async def leases_of_strangers(scene: Scene) -> AsyncIterator[Told]:
    server_over_tcp(scene, *HOUR)
    evidence = ("leases granted before this server started may be valid for 59m",)
    yield Told("unknown_holder", None, evidence, ("connect and claim the lock on their own",))


@asynccontextmanager
async def no_server_over_tcp(scene: Scene) -> AsyncIterator[Told]:
    async with held_over_tcp(scene) as (server, _, token):
        server.kill()
        evidence = ("it cannot renew its lease of 1s",)
        yield Told("no_server", "engine-0", evidence, ("the active engine stops",), token=token)
