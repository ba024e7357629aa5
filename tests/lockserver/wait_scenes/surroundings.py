"""What the lock server stands on fails or is taken away: witnesses, its disk, its socket, its
service address, its gateway."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from lockserver.client import Stage
from lockserver.messages import StatusMsg
from tests.helpers import auntil, free_port
from tests.lockserver.by_hand import Hand
from tests.lockserver.engines import Engine
from tests.lockserver.gateways import Gateway
from tests.lockserver.processes import ServerProcess
from tests.lockserver.wait_scenes.scene import Scene, Told, lives


@asynccontextmanager
async def without_witness(scene: Scene, *, is_replaced: bool) -> AsyncIterator[Told]:
    _, holder = scene.held()
    name = scene.witness()
    path = os.path.join(scene.directory, name)
    os.rename(path, f"{path}.old")
    if is_replaced:
        Path(path).touch()
    pid = holder.pids[0]
    evidence = (f"witness {name} was removed or replaced", lives(pid))
    fix = ("make sure that no process of engine-0 is alive", "move", "lockserver.json away")
    yield Told("witness_lost", "engine-0", evidence, fix, token=1, pid=pid)


def witness_removed(scene: Scene) -> AbstractAsyncContextManager[Told]:
    return without_witness(scene, is_replaced=False)


def witness_replaced(scene: Scene) -> AbstractAsyncContextManager[Told]:
    return without_witness(scene, is_replaced=True)


def may_write(server: ServerProcess, size_bytes: int) -> None:
    """How long the files may be that `server` writes: 0 as on a read-only file system, 1 lets it
    seal a witness and write no state."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


@asynccontextmanager
async def failing_disk(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server()
    may_write(server, 1)
    async with Engine(scene.directory, "engine-0") as engine:
        engine.launch()
        engine.want("active")
        await auntil(lambda: server.status()["problem"], "the problem to be seen")
        evidence = ("grants cannot be written", "lockserver.json")
        yield Told("write_failed", "engine-0", evidence, (f"df -h {scene.directory}",))


@asynccontextmanager
async def witness_that_cannot_be_sealed(scene: Scene) -> AsyncIterator[Told]:
    server, holder = scene.held()
    may_write(server, 0)
    holder.signal(signal.SIGKILL, tree=True)
    await auntil(holder.is_gone, "the end of the holder")
    name = scene.witness()
    await auntil(lambda: server.lock()["cause"] == "process_gone", "the death to be seen")
    evidence = (f"witness {name} is free", "its supervisor has exited")
    yield Told("witness_unsealed", "engine-0", evidence, ("make", "writable"), token=1)


@asynccontextmanager
async def no_descriptors(scene: Scene) -> AsyncIterator[Told]:
    """Nobody can connect then, so the server is asked on a connection that was there before."""
    server = scene.server()
    with Hand(scene.directory, "engine-0") as hand, hand.connect() as client:
        client.request(StatusMsg())
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, 1024))
        client.notify(hand.want())
        await auntil(lambda: "lock.shortage" in server.log(), "the shortage to be noticed")
        evidence, fix = ("limit of 3 open files",), ("raise its limit", "retries on its own")
        yield Told("no_descriptors", "engine-0", evidence, fix, by_client=client)


@asynccontextmanager
async def socket_of_a_stranger(scene: Scene) -> AsyncIterator[Told]:
    """A file where the server's socket was: the command is answered from the state file, so the
    server is asked over HTTP."""
    server = scene.server()
    path = Path(scene.directory, "lockserver.sock")
    (stranger := path.with_name("other")).touch()
    stranger.rename(path)
    await auntil(lambda: "lock.unreachable" in server.log(), "the stranger to be found")
    evidence = ("no engine can connect", str(path))
    yield Told("unreachable", None, evidence, (f"ls -la {scene.directory}",), by_http=server)


@asynccontextmanager
async def address_of_a_stranger(scene: Scene) -> AsyncIterator[Told]:
    server, _ = scene.held()
    server.kill()
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        server.flags = ("--service", f"active=127.0.0.1:{port}")
        await asyncio.to_thread(server.start)
        assert server.status()["service"]["active"]["state"] == "waiting_for_hand_back"
        evidence = (f"127.0.0.1:{port} is in use by pid {os.getpid()}",)
        yield Told("address_away", None, evidence, ("stop that process", "--service"))


@asynccontextmanager
async def without_gateway(scene: Scene, *, is_connected: bool) -> AsyncIterator[Told]:
    """Clients have waited for longer than `--hold-ms`."""
    address = f"127.0.0.1:{free_port()}"
    server = scene.server("--service", f"active={address}", "--hold-ms", "10")
    async with Gateway(scene.directory) as gateway:
        who = gateway.borrower.gateway
        await gateway.accepts()  # one that never was here may still come
        await auntil(lambda: server.status()["gateways"][0]["accepting"], "it to accept")
        gateway.borrower.set_stage(Stage.ENDS)
        if is_connected:
            await auntil(lambda: "no gateway accepts" in str(server.status()["problem"]), "it")
            yield Told("no_gateway", None, (who, "does not accept"), ("gateway status --dir",))
    if not is_connected:
        await auntil(lambda: not server.status()["gateways"], "its end to be seen")
        # A tick decides when they have waited for too long.
        await auntil(lambda: "no gateway accepts" in str(server.status()["problem"]), "the fault")
        fix = (f"gateway serve --dir {scene.directory}",)
        yield Told("no_gateway", None, ("no gateway is connected",), fix)


def gateway_that_does_not_accept(scene: Scene) -> AbstractAsyncContextManager[Told]:
    return without_gateway(scene, is_connected=True)


def gateway_that_is_gone(scene: Scene) -> AbstractAsyncContextManager[Told]:
    return without_gateway(scene, is_connected=False)
