"""The pool's manifest as processes: what `kubectl apply -k` would run, without a GPU.

Three models that fit only one at a time answer, one after another; the pool's container is killed
between them; SIGTERM ends everything.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plumbing.part.paths import pool_socket
from plumbing.service.procfs import descendants
from plumbing.wire.blocking import BlockingClient
from pool.messages import CATALOGUE, StatusMsg
from tests.deploy.manifests import RENDERED
from tests.e2e.processes import Processes
from tests.e2e.test_commands import running_pod
from tests.helpers import free_ports, until

PORTS = ("http", "lockserver", "gms", "gateway", "pool", *(f"engine-{n}" for n in range(4)))
ENGINES = ("chat-0", "chat-1", "coder-0", "batch-0")
WAIT_S = 60.0


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory with a short name, because a socket's path is limited to 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="us-"))
    yield path
    shutil.rmtree(path)


def status(shared: Path) -> dict[str, Any]:
    with BlockingClient(pool_socket(str(shared)), CATALOGUE) as client:
        return dict(client.request(StatusMsg(), timeout_s=WAIT_S).message.document)


def states(shared: Path) -> dict[str, str]:
    return {each["model"]: each["state"] for each in status(shared)["models"]}


def answer(port: int, model: str) -> str:
    asked = {"model": model, "prompt": "one rainy day", "max_tokens": 8, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request(
        "POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    document = json.loads(response.read())
    connection.close()
    assert response.status == 200, document
    assert document["model"] == model
    return str(document["choices"][0]["text"])


@pytest.mark.slow
def test_pool_of_a_manifest_answers_for_every_model_and_survives_its_pool(home: Path):
    """Goal: `up -f` runs what is deployed. Method: the rendered file; a request to each model, by
    turns; SIGKILL to the pool; then SIGTERM, and a look for leftovers."""
    first = free_ports(len(PORTS))
    ports = [f"--set=port.{name}={first + number}" for number, name in enumerate(PORTS)]
    flags = ["-f", str(RENDERED / "pool-cpu.yaml"), *ports]
    with running_pod(home / "pod", home / "up.txt", flags, 2 * WAIT_S) as up:
        shared = home / "pod/vol/shared/understudy"
        assert "chat, coder, batch" in (home / "up.txt").read_text()
        # Preloaded, with its shadow: nobody has asked for it.
        until(lambda: states(shared)["chat"] in ("warm", "awake"), "chat to be loaded", WAIT_S)
        texts = {model: answer(first, model) for model in ("chat", "coder", "batch")}
        assert states(shared)["batch"] == "awake"
        assert states(shared)["chat"] != "awake"  # there is room for one KV cache
        # The shadow is launched once its model has been loaded.
        until(lambda: engine_of(shared, "chat-1")["state"] == "standby", "the shadow", WAIT_S)
        before = {engine: engine_of(shared, engine)["incarnation"] for engine in ENGINES}
        os.kill(pid_of_pool(up.pid), signal.SIGKILL)
        assert {model: answer(first, model) for model in texts} == texts
        after = {engine: engine_of(shared, engine)["incarnation"] for engine in ENGINES}
        assert after == before
        with Processes([up.pid, *descendants(up.pid)]) as processes:
            up.send_signal(signal.SIGTERM)
            assert up.wait(WAIT_S) == 0
            until(lambda: not processes.alive(), "every process to end with `up`")
    text = (home / "up.txt").read_text()
    assert re.search(r"ignored on one machine: ", text)
    assert "(runner) still there" not in text


def pid_of_pool(up: int) -> int:
    """By its command line: its own word would be that of its PID namespace."""
    found = []
    for pid in descendants(up):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if len(line) > 2 and line[1].endswith(b"/pool") and line[2] == b"serve":
            found.append(pid)
    (pid,) = found
    return pid


def engine_of(shared: Path, engine: str) -> dict[str, Any]:
    """From its state file."""
    return dict(json.loads((shared / f"engine_{engine}.json").read_text())["engine"])
