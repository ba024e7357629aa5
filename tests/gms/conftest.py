"""A server per test, in a directory of its own that is short enough for sockets.

What asks for `gms` or `device` runs twice, on host memory and on CUDA through the stand-in for the
driver; `tests.gms.kinds` has marks for what only one promises.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

from gms import names
from tests.gms.bench import DEVICE, GPU, ClientProcess, GmsProcess
from tests.gms.kv.kv_bench import Borrow, BorrowerProcess
from tests.standin import build


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="gms-")
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["host", "cuda"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of memory."""
    if request.param == "cuda":
        build.use(monkeypatch)
    return str(request.param)


@pytest.fixture
def device(kind: str) -> str:
    return DEVICE if kind == "host" else GPU


@pytest.fixture
def gms(directory: str, device: str) -> Iterator[GmsProcess]:
    server = GmsProcess(directory, device=device).start()
    yield server
    server.stop()


@pytest.fixture
def host(gms: GmsProcess) -> Iterator[GmsProcess]:
    """The server of the host copies of what `gms` serves."""
    server = GmsProcess(gms.directory, device=names.offload_device(gms.device)).start()
    yield server
    server.stop()


@pytest.fixture
def client(directory: str, device: str) -> Iterator[Callable[..., ClientProcess]]:
    """Starts client processes that end with the test."""
    started: list[ClientProcess] = []

    def start(mode: str = "rw_or_ro", engine: str = "engine-9") -> ClientProcess:
        started.append(ClientProcess(directory, mode, engine, device))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def borrow(gms: GmsProcess) -> Iterator[Borrow]:
    """Starts processes that borrow, which end with the test."""
    started: list[BorrowerProcess] = []

    def start(token: int, **more: float) -> BorrowerProcess:
        started.append(BorrowerProcess(gms, token, **more))
        return started[-1]

    yield start
    for process in started:
        process.kill()
