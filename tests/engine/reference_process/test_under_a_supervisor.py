"""The backend under a stub supervisor, with real memory services: its start, life and deaths."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.backends.reference.config import Settings, read_config
from engine.backends.reference.decoder import KVCache
from engine.backends.reference.kv_blocks import DEFAULT_CONTEXT, size_kv
from engine.backends.reference.service import SharedListener
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
from plumbing.errors import UsageError
from plumbing.service import procfs
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message
from tests.engine.reference_process.active import LONG, active_engine, complete, health
from tests.engine.reference_process.rig import (
    COMMAND,
    DEADLINE_S,
    is_fault,
    lend,
    listening,
    memory_service,
    supervisor,
)
from tests.helpers import auntil


async def progressed(stub: Any, target: int) -> None:
    async with asyncio.timeout(60):
        while (await health(stub)).progress < target:
            pass


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


TWO = ("--tensor-parallel", "2")


@asynccontextmanager
async def two_devices(directory: Path) -> AsyncIterator[tuple[Any, Any]]:
    async with (
        memory_service(directory) as first,
        memory_service(directory, device="HOST-1") as second,
    ):
        yield first, second


def spoil(model: Path, target: Path) -> Path:
    """A copy of `model` whose last norm is not a number."""
    shutil.copytree(model, target)
    path = target / "model.safetensors"
    whole = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(whole[:8], "little")
    first, end = json.loads(whole[8:begin])["model.norm.weight"]["data_offsets"]
    whole[begin + first : begin + end] = b"\xc0\x7f" * ((end - first) // 2)
    path.write_bytes(whole)
    return target


@pytest.mark.slow
def test_weights_that_fail_two_canaries_are_taken_out_of_service(tmp_path: Path, model: Path):
    """Goal: no relaunch maps the same bad pages for ever. Method: weights that give no numbers;
    after the first incarnation's canary they are still there, after the second's on no device."""
    bad = spoil(model, tmp_path / "bad")
    home = tmp_path / "pod"
    home.mkdir(mode=0o700)

    async def main() -> None:
        async with two_devices(home) as servers:
            for state in ("committed", "empty"):
                async with supervisor(home, "--model", str(bad), *TWO) as stub:
                    report = await stub.fault_report()
                    assert report.code == "engine.canary_failed"
                    assert await stub.ended() == 1
                for server in servers:
                    await auntil(
                        lambda server=server, state=state: server.status()["state"] == state,
                        f"{server.device} to be {state}",
                    )

    asyncio.run(main())


def test_rank_that_cannot_load_says_why(tmp_path: Path, model: Path):
    """Goal: a fault of any device is reported as permanent. Method: a second device too small."""

    async def main() -> None:
        async with (
            memory_service(tmp_path),
            memory_service(tmp_path, capacity_bytes=64 << 10, device="HOST-1"),
            supervisor(tmp_path, "--model", str(model), *TWO) as stub,
        ):
            report = await stub.fault_report()
            assert (report.code, report.permanent) == ("gms.larger_than_device", True)
            assert await stub.ended() != 0

    asyncio.run(main())


def test_help_of_the_backend_is_printed_and_nothing_is_started(tmp_path: Path):
    """Goal: a question is answered. Method: `engine run -- --help` in a place for no pod."""
    nowhere = tmp_path / "nowhere"
    program = (sys.executable, "-c", "from engine.cli import main; main()")
    done = subprocess.run(
        [*program, "run", "--backend", "reference", "--dir", str(nowhere), "--", "--help"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--tensor-parallel" in done.stdout
    assert not nowhere.exists()


def test_context_is_what_was_asked_or_what_fits(model: Path):
    """Goal: the context's length never surprises, and the cache is as large as the slots. Method:
    a model of 2048 positions."""
    config = read_config(str(model))
    position_bytes = 2 * KVCache.bytes_needed(config, 4, 1)
    block_bytes = KVCache.bytes_needed(config, 1, 32)

    def context(max_context: int | None = None, kv_bytes: int | None = None) -> int:
        found = size_kv(config, Settings("dir", 4, max_context, kv_bytes))
        assert 0 <= found.context * position_bytes - found.kv_bytes < block_bytes
        assert kv_bytes is None or found.kv_bytes <= kv_bytes
        return found.context

    assert config.max_position == 2048 < DEFAULT_CONTEXT
    assert context() == 2048
    assert context(max_context=100) == 100
    assert context(kv_bytes=56 * position_bytes) == 56
    assert context(kv_bytes=56 * position_bytes - 1) == 55
    assert context(kv_bytes=1 << 40) == 2048
    for wrong in ((4096, None), (100, 50 * position_bytes), (None, position_bytes // 2)):
        with pytest.raises(UsageError):
            context(*wrong)
    for tokens, blocks in ((0, 0), (31, 0), (320, 10)):
        asked = Settings("dir", 4, 100, None, tokens)
        slots_bytes = 100 * position_bytes // 2
        assert size_kv(config, asked) == (
            100,
            blocks,
            slots_bytes,
            slots_bytes + blocks * block_bytes,
        )


def test_start_by_hand_names_the_command_to_use():
    """A backend without a supervisor is one sentence on stderr and exit code 2, no stack trace."""
    command = [*COMMAND, "--model", "m"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 2
    assert "engine run" in ended.stderr
    assert "Traceback" not in ended.stderr


PATH = "/v1/completions"


def test_clients_wait_in_the_backlog_while_descriptors_are_short():
    """Goal: nobody is refused or reset. Method: `accept` fails once with EMFILE."""

    class Short(socket.socket):
        is_short = True

        def accept(self):  # type: ignore[no-untyped-def] # as socket's
            if self.is_short:
                self.is_short = False
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    class Greeter(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(b"hello")
            transport.close()

    async def main() -> None:
        with listening()[0] as owner, socket.create_connection(owner.getsockname()) as client:
            client.setblocking(False)
            listener = SharedListener(lend(owner), Greeter)
            listener._sock = Short(fileno=listener._sock.detach())
            listener.start()
            await auntil(lambda: listener._retry is not None, "the pause")
            assert await asyncio.get_running_loop().sock_recv(client, 16) == b"hello"
            listener.stop()

    asyncio.run(main())


@pytest.mark.slow
def test_drain_beyond_its_budget_cuts(tmp_path: Path, model: Path):
    """Goal: the budget is kept. Method: a budget of nothing, a stream that lasts for
    half an hour."""

    async def main() -> None:
        async with (
            active_engine(tmp_path, model, "--token-interval-ms", "1000") as (stub, _, url),
            aiohttp.ClientSession() as client,
        ):
            post = client.post(f"{url}{PATH}", json={**LONG, "stream": True})
            async with post as response:
                await response.content.readline()
                assert isinstance(await stub.ask(DrainMsg(0)), DrainedMsg)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            assert (await health(stub)).in_flight == 0

    asyncio.run(main())
