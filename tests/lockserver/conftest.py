"""A pod's directory, and lock servers and engines that are stopped after each test."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.lockserver.engines import EngineProcess
from tests.lockserver.processes import ServerProcess


@pytest.fixture
def pod_dir(tmp_path):
    tmp_path.chmod(0o700)
    return str(tmp_path)


@pytest.fixture
def start_server(pod_dir):
    """`start_server(*flags)`: a lock server running in its own process."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> ServerProcess:
            server = ServerProcess(pod_dir, *flags)
            stack.callback(server.close)
            server.start()
            return server

        yield start


@pytest.fixture
def start_engine(pod_dir):
    """`start_engine(name, …)`: a supervisor process with two backend processes."""
    with contextlib.ExitStack() as stack:

        def start(name: str, **options: Any) -> EngineProcess:
            engine = EngineProcess(pod_dir, name, **options)
            stack.callback(engine.close)
            return engine

        yield start
