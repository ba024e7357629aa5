"""The `understudy` command as users run it: subprocesses, their output and their exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest

from plumbing.service.procfs import children, descendants
from tests.e2e.pods import ENVIRONMENT, UNDERSTUDY, running_pod
from tests.e2e.processes import Processes
from tests.helpers import run_command, until
from understudy.pod.ports import free_offset

LEFT_BY_A_POOL = ("pool.sock", "engine_chat-0.sock", "gms_HOST-0.chat_weights.sock")
# Below `up`: an init for each of six containers; the page; a lock server; a memory service and a
# device's server; a gateway; two engines of two processes.
PROCESSES = 6 + 1 + 1 + 2 + 1 + 2 * 2


@pytest.mark.slow
def test_up_takes_over_a_used_directory_dies_and_stops_in_reverse_order(
    tmp_path_factory: pytest.TempPathFactory,
):
    """Goal: what a user of one machine meets in the first hour. Method: what a killed pool leaves;
    `up`, whose ports one flag moves, its page and its status; SIGKILL; `up` again on the files that
    left, SIGTERM: pidfds show the order of the ends, the exit code and the directory what is
    left."""
    base = tmp_path_factory.mktemp("up")
    directory, output, offset = base / "pod", base / "up.txt", free_offset()
    flags = [f"--port-offset={offset}"]
    directory.mkdir(mode=0o700)
    for name in LEFT_BY_A_POOL:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(directory / name))
    with running_pod(directory, output, flags) as up:
        assert not [name for name in LEFT_BY_A_POOL if (directory / name).exists()]
        token = check_status(directory)
        (page,) = re.findall(r"http://\S+:\d+/(?=\n)", output.read_text())
        with urlopen(page) as shown:
            assert b"<title>" in shown.read()
        with urlopen(f"http://127.0.0.1:{8000 + offset}/v1/models") as answer:
            assert json.load(answer)["data"]
        until(lambda: len(descendants(up.pid)) == PROCESSES, "every process of the pod")
        with Processes([up.pid, *descendants(up.pid)]) as processes:
            assert len(processes.alive()) == 1 + PROCESSES
            up.kill()
            until(lambda: not processes.alive(), "every process to end with `up`")
    with running_pod(directory, output, flags) as up:
        assert check_status(directory) > token
        by_name = {
            name_of(program): init for init in children(up.pid) for program in children(init)
        }
        assert set(by_name) == {
            "lockserver",
            "gms",
            "gateway",
            "engine-0",
            "engine-1",
            "ui",
        }
        engines = [by_name["engine-0"], by_name["engine-1"]]
        with Processes([up.pid, *descendants(up.pid)]) as processes:
            up.send_signal(signal.SIGTERM)
            until(lambda: by_name["gateway"] not in processes.alive(), "the end of the gateway")
            assert not processes.alive().intersection(engines)
            until(lambda: by_name["gms"] not in processes.alive(), "the end of gms")
            until(lambda: by_name["lockserver"] not in processes.alive(), "the lock server's end")
            assert processes.alive() <= {up.pid}
            assert up.wait(60) == 0
            assert not processes.alive()
    check_leavings(directory)


def check_status(directory: Path) -> int:
    """The pod is healthy, and the status says so in a few lines; returns the active engine's
    token."""
    status = [UNDERSTUDY, "status", "--check", f"--dir={directory}"]
    done = run_command(status, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failover ready" in done.stdout
    assert len(done.stdout.splitlines()) < 15
    (token,) = re.findall(r"held by engine-[01] +token (\d+)", done.stdout)
    return int(token)


def name_of(pid: int) -> str:
    """`engine-0` or the program's name, for one of the pod's containers; `ui` is the page."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    program = os.path.basename(words[1]).decode().replace("understudy", "ui")
    ids = [each.partition(b"=")[2].decode() for each in environment if each[:10] == b"ENGINE_ID="]
    return ids[0] if program == "engine" else program


def check_leavings(directory: Path) -> None:
    """State and logs stay, for the next start and for the operator; no socket and no half-written
    file.

    Witnesses, serving files and epochs are evidence: the next start judges and removes those of the
    dead. An engine's next incarnation replaces its queue page.
    """
    for path in directory.iterdir():
        assert not path.is_socket()
        known = (
            r"(log|random-model|.*\.(json|lock|epoch|pool|queue)"
            r"|(witness|serving)_engine-[01]_[0-9a-f]{16})"
        )
        assert re.fullmatch(known, path.name), path.name
    logs = {path.name for path in (directory / "log").iterdir()}
    parts = {"lockserver", "gms", "gateway", "engine-0", "engine-1"}  # the page says nothing
    assert logs == {f"{part}.log" for part in parts}
