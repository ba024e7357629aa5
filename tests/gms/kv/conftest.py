"""A KV server, and processes that borrow from it, which end with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gms.kv.kv_bench import (
    Borrow,
    BorrowerProcess,
    KvProcess,
)


@pytest.fixture
def kv(directory: str, device: str) -> Iterator[KvProcess]:
    server = KvProcess(directory, device).start()
    yield server
    server.stop()


@pytest.fixture
def borrow(kv: KvProcess) -> Iterator[Borrow]:
    """Starts processes that borrow, which end with the test."""
    started: list[BorrowerProcess] = []

    def start(token: int, **more: float) -> BorrowerProcess:
        started.append(BorrowerProcess(kv, token, **more))
        return started[-1]

    yield start
    for process in started:
        process.kill()
