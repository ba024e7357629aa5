"""Sessions with the memory service, as every backend opens them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends import memory_session as session
from gms.client import Writer
from plumbing.errors import UnderstudyError
from tests.gms.bench import GmsProcess
from tests.helpers import until

MEMBER: Any = SimpleNamespace(
    engine="engine-0",
    incarnation="engine-0-1",
    may_load=lambda *_: SimpleNamespace(mode="rw_or_ro"),
)
DEVICE = session.host_device(0)


@pytest.fixture
def directory(tmp_path_factory, monkeypatch) -> str:
    path = tmp_path_factory.mktemp("g")
    path.chmod(0o700)
    monkeypatch.setenv(session.SOCKET_DIR_ENV, str(path))
    return str(path)


def test_service_that_comes_later_is_waited_for(directory: str, caplog):
    """Attach without a service, and start it after the warning: one warning, and a session."""
    sessions: list[Any] = []
    waiting = threading.Thread(
        target=lambda: sessions.append(session.attach(MEMBER, DEVICE, {"m": 1}, 0, 1))
    )
    waiting.start()
    until(lambda: "waiting up to" in caplog.text, "the wait to be said")
    server = GmsProcess(directory).start()
    waiting.join()
    with sessions[0] as attached:
        assert isinstance(attached, Writer)
    server.stop()
    assert caplog.text.count("waiting up to") == 1


def test_device_that_is_too_small_is_told_from_one_that_is_full():
    """Both sizes where it can never fit; the service's own message where it may fit later."""
    full = UnderstudyError("gms.out_of_memory", "it is full", capacity_bytes=4 << 20)
    with (
        pytest.raises(UnderstudyError, match=r"need 5\.0 MiB as float32 .* has 4\.0 MiB"),
        session.loading(DEVICE, "m", "float32", 5 << 20),
    ):
        raise full
    with (
        pytest.raises(UnderstudyError, match="it is full"),
        session.loading(DEVICE, "m", "float32", 3 << 20),
    ):
        raise full
