"""Two reference engines behind a gateway, with a real lock server and memory; the test is the
gateway."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.backends.reference.random_model import write_random_model
from plumbing import gateway_protocol as hop
from plumbing.pod.paths import engine_http_socket
from tests.engine.pod import Engine, Pod, environment, program
from tests.engine.reference_process.active import LONG
from tests.helpers import free_port, until


@pytest.fixture
def pair(pod: Pod, tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """engine-0 active, engine-1 standby; canaries come often."""
    write_random_model(str(tmp_path / "tiny"))
    pod.start_lock("--no-direct")
    where = ("--dir", str(pod.directory), "--memory", "host", "--devices", "1")
    command = [*program("gms"), "serve", *where, "--http-port", str(free_port())]
    with open(pod.directory / "gms.stderr", "ab") as stderr:
        gms = subprocess.Popen(command, env=environment(), stderr=stderr)
    try:
        backend = ("reference", "--model", str(tmp_path / "tiny"))
        first = pod.engine("engine-0", flags=("--idle-canary-ms", "200"), backend=backend)
        first.until("active")
        second = pod.engine("engine-1", backend=backend)
        second.until("standby")
        yield first, second
    finally:
        pod.close()
        gms.terminate()
        gms.wait()


def canaries(engine: Engine) -> float:
    """How many have passed."""
    name = 'understudy_engine_canary_total{result="ok"} '
    lines = engine.get("/metrics")[1].splitlines()
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.slow
def test_sigterm_leaves_a_stream_to_the_next_engine(pair: tuple[Engine, Engine]):
    """Goal: canaries through the private socket pass, and a departure waits for no stream. Method:
    a stream that the lock server's standby can continue, and SIGTERM: the engine hands it
    over, long before the stream's end, and the next one is active."""
    first, second = pair
    until(lambda: canaries(first) >= 3, "canaries that pass")
    until(lambda: first.status()["health"]["is_continued"], "the news of the standby")
    body = json.dumps({**LONG, "stream": True}).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(engine_http_socket(str(first.directory), "engine-0"))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: engine\r\n{hop.GATEWAY}: 1\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        said = b""
        while b"\n\n: u=" not in said:
            said += sock.recv(65536)
        first.terminate()
        while more := sock.recv(65536):
            said += more
    assert b"X-Understudy-Continuation: exact" in said
    assert hop.END not in said
    assert hop.HANDED_OVER in said
    assert first.wait() == 0
    assert "streams continue at the next engine" in first.errors.read_text()
    second.until("active")
