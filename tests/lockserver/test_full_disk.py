"""A disk without a free byte: what must continue to work, and what must fail with one clear
error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

import pytest

from tests.helpers import auntil
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess
from tests.small_disk import needs_root, small_disk

pytestmark = needs_root


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "small", "size=64k") as disk:
        yield disk


def server_on(directory: str) -> ServerProcess:
    server = ServerProcess(directory)
    server.log_path = f"{directory}.log"
    return server


def test_full_disk_stops_no_grant_takeover_or_restart(disk):
    """Goal: the state file, a seal, a socket and the guard never need space. Method: fill a tmpfs
    after the start, and again while the server is dead."""

    async def scenario() -> None:
        async with (
            Engine(str(disk.path), "engine-0") as holder,
            Engine(str(disk.path), "engine-1") as next_,
        ):
            holder.launch()
            next_.launch()
            disk.fill()
            holder.want("active")
            assert await holder.granted() == 1
            next_.want("active")
            await auntil(lambda: next_.heard, "the news of who is active")
            holder.reap()
            holder.relent()
            assert await next_.granted() == 2
            server.kill()
            disk.fill()
            await asyncio.to_thread(server.start)
            await auntil(lambda: server.lock()["state"] == "held", "the holder to be heard again")
            assert server.lock()["holder"]["token"] == 2

    with contextlib.closing(server_on(str(disk.path))) as server:
        server.start()
        asyncio.run(scenario())


def test_first_start_on_a_full_disk_is_one_clear_error_and_leaves_nothing_behind(disk):
    """Goal: no half-created state. Method: fill the disk, start, free some space, start again."""
    disk.fill()
    server = server_on(str(disk.path))
    command = [*server.command, "serve", "--dir", str(disk.path), "--http-port", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.strip().endswith("[lock.state_unwritable]")
    assert "Traceback" not in ran.stderr
    assert not [name for name in os.listdir(disk.path) if name.startswith("lockserver.json")]
    disk.clear()
    with contextlib.closing(server):
        server.start()
        assert server.lock()["state"] == "free"
