"""A backend of two ranks, each on a device of its own: real processes, real memory services."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from plumbing.service import procfs
from tests.engine.reference_process.active import activate, active_engine
from tests.engine.reference_process.rig import (
    listening,
    memory_service,
    supervisor,
)
from tests.helpers import auntil

GREEDY = {"prompt": "hello", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
TWO = ("--tensor-parallel", "2")


@asynccontextmanager
async def two_devices(directory: Path) -> AsyncIterator[tuple[Any, Any]]:
    async with (
        memory_service(directory) as first,
        memory_service(directory, device="HOST-1") as second,
    ):
        yield first, second


async def complete(url: str) -> Any:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/completions", json=GREEDY) as response,
    ):
        assert response.status == 200, await response.text()
        return (await response.json())["choices"]


@pytest.mark.slow
def test_two_ranks_share_their_devices_with_a_second_engine(tmp_path: Path, model: Path):
    """Goal: each rank maps its own device, weights are loaded once, and every engine answers as one
    process would. Method: load in one engine, map in another that may only read, kill the
    first, compare answers, also with a backend of one rank."""

    async def main() -> None:
        (tmp_path / "one").mkdir(mode=0o700)
        async with active_engine(tmp_path / "one", model) as (_, _, url_of_one_rank):
            expected = await complete(url_of_one_rank)
        sock, url = listening()
        arguments = ("--model", str(model), *TWO)
        with sock:
            async with (
                two_devices(tmp_path),
                supervisor(tmp_path, *arguments) as first,
            ):
                prepared = await activate(first, sock, 1)
                assert set(first.registered) == {"model", "model-1"}
                witness = os.stat(first.witness_path)
                for pid in first.registered.values():
                    assert procfs.flock_held(pid, 0, witness.st_dev, witness.st_ino)
                attached = {each.rank: each for each in first.attached}
                assert set(attached) == {0, 1}
                assert attached[0].epoch != attached[1].epoch
                assert attached[0].identity == attached[1].identity
                assert attached[0].identity["tp_size"] == 2
                assert prepared.epoch == f"{attached[0].epoch},{attached[1].epoch}"
                assert prepared.kv_bytes == 2 * 4 * 2 * 2 * 2 * 2048 * 16 * 4  # as with one rank
                assert await complete(url) == expected
                reader = supervisor(tmp_path, *arguments, engine="engine-1", load_mode="ro")
                async with reader as second:
                    assert (await second.prepared()).epoch == prepared.epoch
                    first.backend.kill()
                    await first.ended()
                    await activate(second, sock, 2)
                    assert await complete(url) == expected

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["model", "model-1"])
def test_death_of_any_rank_ends_all(tmp_path: Path, model: Path, victim: str):
    """Goal: no part of a model lingers. Method: SIGKILL one process, wait for both."""

    async def main() -> None:
        async with (
            two_devices(tmp_path),
            supervisor(tmp_path, "--model", str(model), *TWO) as stub,
        ):
            await stub.prepared()
            os.kill(stub.registered[victim], signal.SIGKILL)
            status = await stub.ended()
            if victim != "model":
                assert status == 1
                report = await stub.fault_report()
                assert report.code in ("engine.model_died", "engine.rank_lost")
                assert not report.permanent

    asyncio.run(main())


def is_attached(server: Any) -> bool:
    status = server.status()
    return status["state"] == "committed" and len(status["sessions"]) == 1


@pytest.mark.slow
def test_engine_serves_on_while_its_memory_services_die_and_come_back(tmp_path: Path, model: Path):
    """Goal: with gms dead nothing is lost and no request waits. Method: close both services under a
    serving engine of two ranks, ask it; start others, which get the same epochs back; ask again."""

    async def main() -> None:
        sock, url = listening()
        with sock:
            async with (
                two_devices(tmp_path) as (first, second),
                supervisor(tmp_path, "--model", str(model), *TWO) as stub,
            ):
                prepared = await activate(stub, sock, 1)
                expected = await complete(url)
                await first.close()
                await second.close()
                assert await complete(url) == expected
                async with two_devices(tmp_path) as servers:
                    for server, epoch in zip(servers, prepared.epoch.split(","), strict=True):
                        await auntil(partial(is_attached, server), "the rank to be back")
                        assert server.status()["epoch"] == epoch
                    assert await complete(url) == expected
                    assert not stub.is_channel_closed

    asyncio.run(main())


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
