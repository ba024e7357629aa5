"""A directory for a pod, and processes in it that end with the test."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest


@pytest.fixture
def directory() -> Iterator[str]:
    """A directory for a pod, short enough for a GPU's socket."""
    base = tempfile.mkdtemp(prefix="doctor-")
    path = os.path.join(base, "pod")
    os.mkdir(path, 0o700)
    yield path
    shutil.rmtree(base)


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """`start(process)`: started, and ended with the test."""
    with ExitStack() as stack:

        def started(process: Any) -> Any:
            stack.callback(process.stop if hasattr(process, "stop") else process.close)
            process.start()
            return process

        yield started
