"""Over TCP, where leases are the evidence: engines of two members, and the time of their leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.helpers import auntil, free_port
from tests.lockserver.members import Member
from tests.lockserver.processes import ServerProcess
from tests.lockserver.wait_scenes.scene import Scene, Told
from tests.plumbing.wire.certificates import shared, tls_flags

HOUR = ("--lease-margin-ms", "3590000")  # so that no lease expires while it is looked at


@asynccontextmanager
async def members_of(
    scene: Scene, count: int, *flags: str
) -> AsyncIterator[tuple[ServerProcess, list[Member]]]:
    """A server over TCP, and `count` members of engine-0 that are connected."""
    lease = ("--lease-ms", "1000", "--lease-margin-ms", "500")
    address = f"tcp://127.0.0.1:{free_port()}"
    server = scene.server("--listen", address, *tls_flags(shared()), *lease, *flags)
    found = [Member(server.flags[1], shared(), "engine-0", index, 2) for index in range(count)]
    try:
        for each in found:
            await each.connect()
        yield server, found
    finally:
        for each in found:
            await each.close()


@asynccontextmanager
async def held_by_members(scene: Scene) -> AsyncIterator[tuple[ServerProcess, list[Member], int]]:
    """Both members of engine-0 hold `active`: with the token."""
    async with members_of(scene, 2) as (server, members):
        for each in members:
            each.launch("active")
        yield server, members, await members[0].granted()


@asynccontextmanager
async def member_missing(scene: Scene) -> AsyncIterator[Told]:
    async with members_of(scene, 1) as (server, (member,)):
        member.launch("active")
        await auntil(lambda: server.lock()["state"] == "free", "the time of strangers to end")
        evidence = (
            "member 0",
            "lease expires in",
            "member 1: no lease, not connected, no message yet",
        )
        fix = ("engine status --engine-id engine-0", "--members 2 --member 1")
        yield Told("members_missing", "engine-0", evidence, fix, is_fault=False)


@asynccontextmanager
async def member_that_does_not_end(scene: Scene) -> AsyncIterator[Told]:
    """One of two members reports that it is reaped, and the other one continues to renew its
    lease."""
    async with held_by_members(scene) as (server, members, token):
        members[1].reap()
        await members[0].lost()
        await auntil(lambda: server.lock()["state"] == "releasing", "the loss to be seen")
        evidence = ("member 0", "lease expires in", "member 1", "no lease", "ago")
        fix = ("the last lease expires in", "a member (0) hangs and keeps renewing", "host")
        yield Told("releasing", "engine-0", evidence, fix, token=token)


@asynccontextmanager
async def leases_on_file(scene: Scene) -> AsyncIterator[Told]:
    """A restarted server that waits for the leases of a holder that does not reconnect."""
    async with held_by_members(scene) as (server, _, token):
        server.kill()
        server.flags = (*server.flags, *HOUR)
        await asyncio.to_thread(server.start)
        evidence = tuple(f"member {index}: lease expires in 59m" for index in range(2))
        yield Told("recovering", "engine-0", evidence, ("reconnect on their own",), token=token)


@asynccontextmanager
async def leases_of_strangers(scene: Scene) -> AsyncIterator[Told]:
    async with members_of(scene, 0, *HOUR):
        evidence = ("leases granted before this server started may be valid for 59m",)
        yield Told("unknown_holder", None, evidence, ("connect and claim the lock on their own",))


@asynccontextmanager
async def no_server_over_tcp(scene: Scene) -> AsyncIterator[Told]:
    async with held_by_members(scene) as (server, _, token):
        server.kill()
        evidence = ("2 members over TCP cannot renew their leases of 1s",)
        yield Told("no_server", "engine-0", evidence, ("the active engine stops",), token=token)
