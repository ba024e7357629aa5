"""Fixtures of the engine's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.backends.reference.random_model import write_random_model
from tests.engine.pod import Pod
from tests.engine.stub_lock import StubLock
from tests.helpers import LoopThread


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short 0700 directory: pytest's own paths are too long for socket names."""
    with tempfile.TemporaryDirectory(prefix="us") as path:
        yield Path(path)


@pytest.fixture
def pod(directory: Path) -> Iterator[Pod]:
    """A pod without a lock server yet; everything it started ends with the test."""
    made = Pod(directory)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def lock(directory: Path) -> Iterator[StubLock]:
    """A stub lock server that grants everything at once, unless a test sets `auto`."""
    thread = LoopThread()
    stub = StubLock(str(directory / "lockserver.sock"), auto=("active",))
    stub.call, stub.run = thread.call, thread.run
    stub.run(stub.start())
    yield stub
    stub.run(stub.stop())
    stub.close()
    thread.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, made once."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(str(directory))
    return directory
