"""The pod of a manifest on one machine: drilled, kept up, drilled from inside a container."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from plumbing.service.procfs import descendants
from tests.deploy.manifests import DEPLOY, RENDERED
from tests.e2e.processes import Processes
from tests.e2e.test_commands import ENVIRONMENT, UNDERSTUDY, check_status, running_pod
from tests.helpers import free_ports, until
from understudy.drill.records import PARTS, TARGETS
from understudy.kubelet import namespaces
from understudy.status.gather import pids_of

HAS_NAMESPACES = asyncio.run(namespaces.wanted("auto"))
WITHOUT_A_GPU = {
    "cpu": (),
    "no-dra": (
        "--set=flag.backend=reference",
        "--set=flag.memory=host",
        "--set=flag.kv-cache-memory-bytes=",
    ),
}


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory with a short name, because a socket's path is limited to 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="us-"))
    yield path
    shutil.rmtree(path)


def drill(home: Path, *flags: str) -> dict:
    """The report of a drill that passed and left nothing behind."""
    done = subprocess.run(
        [UNDERSTUDY, "drill", "--json", *flags],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, "TMPDIR": str(home)},
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(home) == []
    report: dict = json.loads(done.stdout)
    assert (report["refused"], report["wrong_tokens"], report["double_active"]) == (0, 0, 0)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("overlay", WITHOUT_A_GPU)
def test_drill_of_a_manifest_kills_everything_in_it_once(home: Path, overlay: str):
    """Goal: the drill runs exactly what is deployed. Method: the command on the overlay itself;
    every process of an engine, then every other part; its report lists the differences from a
    cluster."""
    targets = (*TARGETS, *PARTS)
    flags = ("-f", str(DEPLOY / "overlays" / overlay), *WITHOUT_A_GPU[overlay])
    report = drill(home, *flags, f"--kills={len(targets)}")
    assert report["killed"] == dict.fromkeys(targets, 1)
    assert report["manifest"].endswith(overlay)
    assert report["restart_backoff_max_s"] == 1
    assert report["pid_namespaces"] is HAS_NAMESPACES


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("-f", str(RENDERED / "cpu.yaml")), ()])
def test_hung_supervisor_is_replaced(home: Path, flags: tuple[str, ...]):
    """Goal: a hang that only a probe can detect. Method: SIGSTOP the active engine's supervisor, in
    a pod from a manifest and in one from flags."""
    report = drill(home, *flags, "--target=stop:supervisor", "--kills=1")
    assert report["killed"]["stop:supervisor"] == 1
    assert report["failover_ms"]["max"] > 0


@pytest.mark.slow
@pytest.mark.skipif(
    not HAS_NAMESPACES or shutil.which("nsenter") is None, reason="needs PID namespaces"
)
def test_running_pod_is_drilled_from_inside_a_container_and_stops_in_order(home: Path):
    """Goal: `kubectl exec … understudy drill --attach`. Method: `up -f`, the drill in the lock
    server's namespace, where no other process is visible; then SIGTERM, and a check for
    leftovers."""
    directory, output = home / "pod", home / "up.txt"
    first = free_ports(6)
    names = ("http", "lockserver", "gms", "gateway", "engine-0", "engine-1")
    ports = [f"--set=port.{name}={first + number}" for number, name in enumerate(names)]
    with running_pod(directory, output, ["-f", str(RENDERED / "cpu.yaml"), *ports]) as up:
        shared = directory / "vol/shared/understudy"
        token = check_status(shared)
        lock_server = asyncio.run(pids_of(shared)).lockserver
        done = subprocess.run(
            [
                *("nsenter", "--target", str(lock_server), "--pid", "--mount"),
                *(UNDERSTUDY, "drill", "--attach", "--yes", "--kills=3", "--json"),
                f"--dir={shared}",
            ],
            capture_output=True,
            text=True,
            check=False,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["killed"] == dict.fromkeys(TARGETS, 1)
        assert check_status(shared) >= token + 3
        with Processes([up.pid, *descendants(up.pid)]) as processes:
            up.send_signal(signal.SIGTERM)
            assert up.wait(60) == 0
            until(lambda: not processes.alive(), "every process to end with `up`")
    text = output.read_text()
    assert text.count("ignored on one machine: ") == 1
    assert "(runner) still there" not in text
