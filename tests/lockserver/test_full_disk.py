"""A disk without a free byte: what must continue to work, and what must fail with one clear
error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess

import pytest

from tests.helpers import auntil
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a file system of 64 KiB."""
    directory = str(tmp_path / "small")
    os.mkdir(directory, 0o700)
    options = "size=64k,mode=0700"
    mounting = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory]
    if subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    yield directory
    subprocess.run(["umount", directory], check=True)


def server_on(directory: str) -> ServerProcess:
    server = ServerProcess(directory)
    server.log_path = f"{directory}.log"
    return server


def fill(directory: str) -> None:
    """Fill the disk to the last byte, including what has been freed since."""
    with (
        open(os.path.join(directory, "filler"), "ab", buffering=0) as filler,
        contextlib.suppress(OSError),
    ):
        while filler.write(b"x" * 512):
            pass
    assert shutil.disk_usage(directory).free == 0


def test_full_disk_stops_no_grant_takeover_or_restart(small_disk):
    """Goal: the state file, a seal, a socket and the guard never need space. Method: fill a tmpfs
    after the start, and again while the server is dead."""

    async def scenario() -> None:
        async with (
            Engine(small_disk, "engine-0") as holder,
            Engine(small_disk, "engine-1") as next_,
        ):
            holder.launch()
            next_.launch()
            fill(small_disk)
            holder.want("active")
            assert await holder.granted() == 1
            next_.want("active")
            await auntil(lambda: next_.heard, "the news of who is active")
            holder.reap()
            holder.relent()
            assert await next_.granted() == 2
            server.kill()
            fill(small_disk)
            await asyncio.to_thread(server.start)
            await auntil(lambda: server.lock()["state"] == "held", "the holder to be heard again")
            assert server.lock()["holder"]["token"] == 2

    with contextlib.closing(server_on(small_disk)) as server:
        server.start()
        asyncio.run(scenario())


def test_first_start_on_a_full_disk_is_one_clear_error_and_leaves_nothing_behind(small_disk):
    """Goal: no half-created state. Method: fill the disk, start, free some space, start again."""
    fill(small_disk)
    server = server_on(small_disk)
    command = [*server.command, "serve", "--dir", small_disk, "--http-port", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.strip().endswith("[lock.state_unwritable]")
    assert "Traceback" not in ran.stderr
    assert not [name for name in os.listdir(small_disk) if name.startswith("lockserver.json")]
    os.unlink(os.path.join(small_disk, "filler"))
    with contextlib.closing(server):
        server.start()
        assert server.lock()["state"] == "free"
