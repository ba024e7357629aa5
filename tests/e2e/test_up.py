"""`understudy up` where another pod was, or is: what a user of one machine meets in the first
hour."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import urllib.request

import pytest

from plumbing.errors import UnderstudyError
from plumbing.service.config import resolve
from tests.e2e.test_commands import ENVIRONMENT, UNDERSTUDY, check_status, running_pod
from tests.helpers import until
from understudy.cli.settings import UP_OPTIONS, ports_of
from understudy.pod.ports import check_ports
from understudy.up.models import make_random_model

LEFT_BY_A_POOL = ("pool.sock", "engine_chat-0.sock", "gms_HOST-0.chat_weights.sock")


def understudy(*words: str, deadline_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [UNDERSTUDY, *words],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        timeout=deadline_s,
    )


def free_offset() -> int:
    """An offset that moves all ports of a pod to free ones."""
    while True:
        offset = random.randrange(6_000, 20_000)
        try:
            check_ports(ports_of(resolve(UP_OPTIONS, {"port_offset": str(offset)}, {})))
        except UnderstudyError:
            continue
        return offset


def complete_with_each_model(port: int) -> int:
    """How many models there are."""
    url, head = f"http://127.0.0.1:{port}/v1", {"Content-Type": "application/json"}
    with urllib.request.urlopen(f"{url}/models", timeout=60) as answer:
        models = [each["id"] for each in json.load(answer)["data"]]
    for model in models:
        body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{url}/completions", body, head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"]
    return len(models)


@pytest.mark.slow
def test_up_is_a_plain_pod_where_a_pool_was_and_the_next_one_is_told_whose_it_is(
    tmp_path_factory: pytest.TempPathFactory,
):
    """Method: what a killed pool leaves (sockets without a server, a state file); `up`, whose ports
    one flag moves; its status; a second `up` in the same directory, and one elsewhere whose ports
    collide."""
    base = tmp_path_factory.mktemp("up")
    directory, output = base / "pod", base / "up.txt"
    directory.mkdir(mode=0o700)
    for name in LEFT_BY_A_POOL:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(directory / name))
    (directory / "pool.json").write_text("of a pool")
    offset = free_offset()
    with running_pod(directory, output, [f"--port-offset={offset}"]) as up:
        said = output.read_text()
        assert str(directory / "aside") in said
        aside = {path.name for path in (directory / "aside").iterdir()}
        assert aside == {*LEFT_BY_A_POOL, "pool.json"}
        assert (directory / "aside" / "pool.json").read_text() == "of a pool"
        check_status(directory)
        models = f"http://127.0.0.1:{8000 + offset}/v1/models"
        with urllib.request.urlopen(models) as answer:
            assert json.load(answer)["data"]

        second = understudy("up", f"--dir={directory}")
        assert second.returncode == 1
        assert "[pod.already_running]" in second.stderr
        assert f"pid {up.pid} " in second.stderr
        assert f"127.0.0.1:{8000 + offset}" in second.stderr
        other = understudy("up", f"--dir={base / 'other'}", f"--port-offset={offset}")
        assert other.returncode == 1
        assert "[pod.port_in_use]" in other.stderr
        assert "--port-offset" in other.stderr
        assert not (base / "other" / "random-model").exists()
        assert up.poll() is None
        check_status(directory)
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0


@pytest.mark.slow
def test_plain_pod_and_pool_alternate_in_one_directory(tmp_path_factory: pytest.TempPathFactory):
    """Goal: a pod that was used decides nothing about the next one in its directory. Method: a
    plain pod, a pool, a plain pod, each with a request to every model; the lock server's file keeps
    the locks that the earlier ones held."""
    base = tmp_path_factory.mktemp("up")
    directory, file = base / "pod", base / "pool.yaml"
    directory.mkdir(mode=0o700)
    model = asyncio.run(make_random_model(base / "model"))
    each = f"{{model: {model}, backend: reference}}"
    file.write_text(f"devices: [HOST-0]\nmargin: 16MiB\nmodels: {{chat: {each}, coder: {each}}}\n")
    offset = free_offset()
    pool = [f"--pool={file}", "--device-bytes=400MiB"]
    for number, more in enumerate([[f"--model={model}"], pool, [f"--model={model}"]]):
        output = base / f"up{number}.txt"
        with running_pod(directory, output, [f"--port-offset={offset}", *more]) as up:
            assert complete_with_each_model(8000 + offset) == (2 if more is pool else 1)
            view = json.loads(understudy("status", "--json", f"--dir={directory}").stdout)
            assert (view["pool"] is not None) == (more is pool)
            assert view["state"] == "healthy", view["problems"]
            up.send_signal(signal.SIGINT)
            assert up.wait(60) == 0


@pytest.mark.slow
def test_pod_that_is_stopped_under_a_request_says_what_it_waits_for(
    tmp_path_factory: pytest.TempPathFactory,
):
    """Method: Ctrl-C while a stream has a minute to go: what `up` and the status say; Ctrl-C again
    ends it at once."""
    base = tmp_path_factory.mktemp("up")
    directory, output, offset = base / "pod", base / "up.txt", free_offset()
    directory.mkdir(mode=0o700)
    flags = [f"--port-offset={offset}", "--", "--token-interval-ms=200", "--served-model-name=m"]
    with running_pod(directory, output, flags) as up:
        body = {"model": "m", "prompt": "Hello", "stream": True, "max_tokens": 300}
        raw = json.dumps({**body, "min_tokens": 300, "ignore_eos": True}).encode()
        head = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{8000 + offset}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, raw, head), timeout=60) as stream:
            assert stream.readline().startswith(b"data: ")
            up.send_signal(signal.SIGINT)
            until(lambda: " s for 1 request\n" in output.read_text(), "what it waits for")
            said = understudy("status", f"--dir={directory}").stdout
            assert said.split()[:2] == ["pod", "stopping"]
            assert "not running" not in said
            up.send_signal(signal.SIGINT)
            assert up.wait(60) == 130
        assert "SIGINT: killed the pod" in output.read_text()
