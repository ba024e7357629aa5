"""Over TCP, where leases are the evidence, and time ends them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.helpers import free_port
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
