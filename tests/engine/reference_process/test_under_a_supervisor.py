"""The backend under a stub supervisor, with a real memory service: its life and its deaths."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.messages import (
    CanaryMsg,
    DrainedMsg,
    DrainMsg,
    RunCanaryMsg,
    ServeMsg,
    ServingMsg,
    WakeMsg,
    WokenMsg,
)
from gms.messages import AllocateMsg
from plumbing.service import procfs
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message
from tests.engine.reference_process.active import LONG, active_engine, complete, health
from tests.engine.reference_process.rig import (
    is_fault,
    lend,
    listening,
    memory_service,
    supervisor,
)


async def progressed(stub: Any, target: int) -> None:
    async with asyncio.timeout(60):
        while (await health(stub)).progress < target:
            pass


def maps(pid: int, name: str) -> bool:
    with open(f"/proc/{pid}/maps") as file:
        return name in file.read()


def anonymous_bytes(pid: int, size_bytes: int) -> list[str]:
    """Mappings of exactly `size_bytes` without a file."""
    with open(f"/proc/{pid}/maps") as file:
        ranges = [line.split() for line in file]
    spans = [(fields[0].split("-"), fields[4]) for fields in ranges]
    return [
        start
        for (start, end), inode in spans
        if inode == "0" and int(end, 16) - int(start, 16) >= size_bytes
    ]


@pytest.mark.slow
def test_whole_life_from_prepared_to_drained(tmp_path: Path, model: Path):
    """Goal: every step of the channel, in order, as a supervisor asks for them. Method: real
    processes and memory service; a client that connects early is answered by the same socket."""

    async def main() -> None:
        sock, url = listening()
        with sock:
            async with (
                memory_service(tmp_path),
                supervisor(tmp_path, "--model", str(model)) as stub,
                aiohttp.ClientSession() as client,
            ):
                prepared = await stub.prepared()
                assert set(stub.registered) == {"model"}
                witness_file = os.stat(stub.witness_path)
                for pid in stub.registered.values():
                    where = (pid, 0, witness_file.st_dev, witness_file.st_ino)
                    assert procfs.flock_held(*where)
                assert [a.epoch for a in stub.attached] == [prepared.epoch]
                assert prepared.kv_bytes == 2 * 4 * 2 * 2 * 2 * 2048 * 16 * 4
                assert not (await health(stub)).accepting
                early = asyncio.ensure_future(complete(client, url))

                assert is_fault(await stub.ask(ServeMsg()), "engine.backend_phase")
                woken = await stub.ask(WakeMsg(7, "engine-0"), lend(sock))
                why = "the memory service lends no KV memory for HOST-0"
                assert woken == WokenMsg(prepared.kv_bytes, "private", 0, why)
                assert is_fault(
                    await stub.ask(WakeMsg(8, "engine-0"), lend(sock)), "engine.backend_phase"
                )
                canary = await stub.ask(RunCanaryMsg())
                assert isinstance(canary, CanaryMsg)
                assert canary.ok
                assert not early.done()
                assert isinstance(await stub.ask(ServeMsg()), ServingMsg)
                headers, answer = await early
                assert headers["X-Understudy-Engine"] == "engine-0"
                assert headers["X-Understudy-Token"] == "7"
                assert answer["model"] == model.name
                report = await health(stub)
                assert report.accepting
                assert report.in_flight == 0
                assert report.progress >= 12
                assert isinstance(await stub.ask(DrainMsg(5000)), DrainedMsg)
                assert not (await health(stub)).accepting
                with socket.create_connection(sock.getsockname()):
                    pass  # the owner's copy still listens

    asyncio.run(main())


def test_client_that_leaves_frees_its_slot(tmp_path: Path, model: Path):
    """Goal: no tokens for a client that has left. Method: one slot, a long stream cut, another."""

    async def main() -> None:
        async with (
            active_engine(tmp_path, model, "--slots", "1") as (stub, _, url),
            aiohttp.ClientSession() as client,
        ):
            post = client.post(f"{url}/v1/completions", json={**LONG, "stream": True})
            async with post as response:
                await response.content.readline()
                assert (await health(stub)).in_flight == 1
                response.close()
            waiting = asyncio.ensure_future(client.post(f"{url}/v1/completions", json=LONG))
            progress = (await health(stub)).progress
            await progressed(stub, progress + 20)
            waiting.cancel()  # a whole answer without a client
            await complete(client, url)
            assert (await health(stub)).in_flight == 0

    asyncio.run(main())


def test_without_a_supervisor_it_ends(tmp_path: Path, model: Path):
    """Goal: no backend serves without a supervisor. Method: close the channel."""

    async def main() -> None:
        async with memory_service(tmp_path), supervisor(tmp_path, "--model", str(model)) as stub:
            await stub.prepared()
            stub.channel.close("gone")
            assert await stub.ended() == 1

    asyncio.run(main())


def test_memory_service_that_dies_under_a_writer_is_reported(tmp_path: Path, model: Path):
    """Goal: only a load can be lost with gms, and it is reported. Method: a service that grants,
    is asked for memory and goes away without an answer (a quick writer would be done by then)."""

    async def main() -> None:
        async with memory_service(tmp_path) as server:
            allocated = asyncio.Event()
            receive = server.received

            def received(
                conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
            ) -> None:
                if isinstance(message, AllocateMsg):
                    allocated.set()
                else:
                    receive(conn, message, request_id, fds)

            server.received = received
            async with supervisor(tmp_path, "--model", str(model)) as stub:
                await allocated.wait()
                await server.close()
                report = await stub.fault_report()
                assert (report.code, report.permanent) == ("engine.gms_lost", False)
                assert await stub.ended() == 1

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "names", "exit_code"),
    [
        (("--model", "/nowhere"), "model.missing", "/nowhere", 2),
        (("--model", "MODEL", "--slots", "0"), "engine.backend_arguments", "'0'", 2),
        (("--model", "MODEL", "--max-context", "4096"), "engine.context_too_long", "2048", 2),
        (
            ("--model", "MODEL", "--max-context", "2048", "--kv-bytes", "1MiB"),
            "engine.kv_too_small",
            "--kv-bytes",
            2,
        ),
        (("--model", "MODEL", "--slots", "1024"), "gms.larger_than_device", "--device-bytes", 1),
    ],
)
def test_fault_that_no_relaunch_can_fix_is_permanent(
    tmp_path: Path, model: Path, arguments: Any, code: str, names: str, exit_code: int
):
    """Goal: one sentence that names the cause, marked permanent. Method: wrong input each."""
    filled = [str(model) if argument == "MODEL" else argument for argument in arguments]

    async def main() -> None:
        async with (
            memory_service(tmp_path, capacity_bytes=64 << 10),
            supervisor(tmp_path, *filled) as stub,
        ):
            report = await stub.fault_report()
            assert (report.code, report.permanent) == (code, True)
            assert report.exit_code == exit_code
            assert names in report.message
            assert await stub.ended() != 0

    asyncio.run(main())
