"""A container's log: bounded, and never in the way of the process that writes to it."""

from __future__ import annotations

import asyncio
import os

from tests.helpers import auntil
from understudy.kubelet.log import LINE_MAX_BYTES, ContainerLog


def test_log_rotates_once_at_its_limit_and_cuts_endless_lines(tmp_path):
    """Goal: bounded disk and memory. Method: write past both limits through a real pipe."""

    async def main():
        said = []
        log = ContainerLog("big", tmp_path / "big.log", said.append, max_bytes=3 * LINE_MAX_BYTES)
        writing = log.open_pipe()
        os.set_blocking(writing, False)
        sent = 0
        while sent < 8 * LINE_MAX_BYTES:
            try:
                sent += os.write(writing, b"x" * 4096)
            except BlockingIOError:
                await asyncio.sleep(0)
        os.close(writing)
        await auntil(lambda: sum(map(len, said)) >= sent, "everything read")
        log.close()

    asyncio.run(main())
    kept = (tmp_path / "big.log").stat().st_size, (tmp_path / "big.log.1").stat().st_size
    assert all(size <= 4 * LINE_MAX_BYTES for size in kept)


def test_log_on_a_full_disk_keeps_reading(tmp_path):
    """Goal: a full disk must not stop the process that writes. Method: log to /dev/full."""

    async def main():
        said = []
        path = tmp_path / "full.log"
        path.symlink_to("/dev/full")
        log = ContainerLog("full", path, said.append, max_bytes=1000)
        writing = log.open_pipe()
        os.write(writing, b"one\ntwo")
        os.close(writing)
        await auntil(lambda: len(said) == 2, "both lines")
        assert said == ["full | one", "full | two"]

    asyncio.run(main())
