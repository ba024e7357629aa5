"""Two models in one directory: reference engines, the memory service, a lock server."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine.backends.reference.random_model import write_random_model
from gms.report import collect
from plumbing.errors import UnderstudyError
from tests.engine.pod import Engine, Pod, environment, program
from tests.engine.test_in_place import shall
from tests.helpers import free_port, until


@pytest.fixture
def start(pod: Pod, tmp_path: Path) -> Iterator[Any]:
    """`start(engine, model)`, once the lock server and the memory service of both models run."""
    for number, model in enumerate(("chat", "coder")):
        write_random_model(str(tmp_path / model), seed=number)
    where, models = ("--dir", str(pod.directory)), ("--model", "chat", "--model", "coder")
    http = ("--http-port", str(free_port()))
    servers = [
        subprocess.Popen([*program(name), "serve", *where, *models, *more], env=environment())
        for name, more in (
            ("lockserver", (*http, "--service", f"active=127.0.0.1:{pod.address[1]}")),
            ("gms", ("--devices", "1", "--http-port", str(free_port()))),
        )
    ]

    def is_ready() -> bool:
        with suppress(UnderstudyError):
            devices = collect(str(pod.directory), in_full=False)["devices"]
            served = [
                each for each in devices if each["online"] and (each["kv"] or {}).get("online")
            ]
            return len(served) == 2 and bool(pod.lock_status())
        return False

    until(is_ready, "both services")

    def engine(name: str, model: str) -> Engine:
        backend = ("reference", "--model", str(tmp_path / model))
        return pod.engine(name, flags=("--model-name", model), backend=backend)

    try:
        yield engine
    finally:
        pod.close()
        for server in servers:
            server.send_signal(signal.SIGTERM)
            server.wait()


@pytest.mark.slow
def test_two_models_are_active_at_once_and_each_fails_over_alone(pod, start):
    """Goal: one directory serves two models: their locks, weights and KV memory are apart. Method:
    two engines of one model, one of another; the first holder is killed."""
    chats = [start("chat-0", "chat"), start("chat-1", "chat")]
    coder = start("coder-0", "coder")
    coder.until("active")
    first = until(lambda: next((e for e in chats if e.state == "active"), None), "one of two")
    (second,) = {*chats} - {first}
    second.until("standby")
    found = collect(str(pod.directory), in_full=False)["devices"]
    devices = {each["device_uuid"]: each for each in found}
    assert set(devices) == {"HOST-0.chat", "HOST-0.coder"}
    assert {each["model"] for each in devices.values()} == {"chat", "coder"}
    assert {each["device"] for each in devices.values()} == {"HOST-0"}
    assert len({each["epoch"] for each in devices.values()}) == 2
    assert {each["kv"]["holder"]["engine"] for each in devices.values()} == {first.name, "coder-0"}
    with coder.client() as client:
        word = shall(client, None).pool
    assert word is not None
    assert word.weights_bytes["HOST-0"] > 0
    assert word.kv_bytes["HOST-0"] > 0
    assert word.base_bytes["HOST-0"] > 0
    assert word.can_resume

    launched, pids = coder.until("active")["engine"]["incarnation"], coder.pids()
    first.kill("backend-model")
    second.until("active")
    locks = pod.lock_status()["locks"]
    assert locks["active:chat"]["holder"]["engine"] == second.name
    assert locks["active:coder"]["holder"]["engine"] == "coder-0"
    assert (coder.until("active")["engine"]["incarnation"], coder.pids()) == (launched, pids)
    first.until("standby", number=2)
    assert sorted(path.name for path in pod.directory.glob("kv_layout*")) == [
        *("kv_layout_chat.json", "kv_layout_coder.json"),
    ]
