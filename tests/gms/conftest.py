"""A server per test, in a directory of its own that is short enough for sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests.gms.bench import ClientProcess, GmsProcess


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="gms-")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def gms(directory: str) -> Iterator[GmsProcess]:
    server = GmsProcess(directory).start()
    yield server
    server.stop()


@pytest.fixture
def client(directory: str) -> Iterator[Callable[..., ClientProcess]]:
    """Starts client processes that end with the test."""
    started: list[ClientProcess] = []

    def start(mode: str = "rw_or_ro", engine: str = "engine-9") -> ClientProcess:
        started.append(ClientProcess(directory, mode, engine))
        return started[-1]

    yield start
    for process in started:
        process.kill()
