"""`understudy up` where another pod was, or is: what a user of one machine meets in the first
hour."""

from __future__ import annotations

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
from understudy.cli.settings import UP_OPTIONS, ports_of
from understudy.pod.ports import check_ports

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
