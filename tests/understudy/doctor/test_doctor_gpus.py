"""`understudy doctor` on GPUs, which are the stand-in's, and on drivers that are broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gms.bench import GmsProcess
from tests.gms.kinds import stand_in_only
from tests.standin import build
from tests.understudy.doctor.examining import FAIL, PASS, SKIP, examined
from understudy import doctor
from understudy.doctor import Finding


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with two GPUs, of the stand-in."""
    build.use(monkeypatch)
    return build.GPU_A


@stand_in_only
def test_device_that_the_driver_does_not_list_is_named(
    directory: str, start, gpu: str, monkeypatch: pytest.MonkeyPatch
):
    """Goal: containers that were given different devices. Method: a server of a GPU, looked at from
    where only the other one is."""
    start(GmsProcess(directory, device=gpu))
    assert examined(directory)["device_uuid"] == Finding(PASS, gpu)
    monkeypatch.setenv("STANDIN_DEVICES", build.GPU_B)
    finding = examined(directory)["device_uuid"]
    assert finding.status is FAIL
    assert finding.found == f"the memory service serves {gpu}; the driver lists {build.GPU_B}"


@stand_in_only
def test_gpu_memory_that_a_process_outside_the_pod_holds_is_named(directory: str, start, gpu: str):
    """Goal: a takeover that finds no room. Method: a process takes memory of the pod's GPU beside
    the pod's own server."""
    writer = start(GmsProcess(directory, device=gpu)).load(64)
    # This process started the server, as a supervisor does, so what it maps is the pod's.
    assert examined(directory)["memory_outside"].status is PASS
    writer.close()
    program = (
        "import os, sys\nfd = os.memfd_create(sys.argv[1])\nprint(flush=True)\nsys.stdin.read()"
    )
    name = f"standin:{os.environ['STANDIN_MACHINE']}:{gpu}:{3 << 20}"
    with subprocess.Popen(
        [sys.executable, "-c", program, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        finding = examined(directory)["memory_outside"]
        stranger.kill()
    assert finding.status is FAIL
    assert finding.found == f"pid {stranger.pid} (python) (3.0 MiB) uses memory of {gpu}"


@pytest.mark.parametrize(
    ("setting", "value", "check", "status", "words"),
    [
        ("COMPUTE_MODE", "3", "sharing_mode", FAIL, "exclusive_process"),
        ("DEVICES", "GPU-aa=MIG-bb+MIG-cc", "mig_mode", PASS, "GPU-aa (2 instances)"),
        ("NVML_INIT", "9", "driver", SKIP, "Driver Not Loaded"),
        ("NVML_INIT", "999", "driver", FAIL, "NVML reports"),
    ],
)
def test_settings_of_a_gpu_are_asked_of_its_driver(
    directory: str, monkeypatch: pytest.MonkeyPatch, setting, value, check, status, words
):
    """Goal: through NVML itself. Method: a machine that is set so, one thing at a time."""
    build.use(monkeypatch, **{setting: value})
    finding = examined(directory)[check]
    assert (finding.status, words in finding.found) == (status, True), finding


@pytest.mark.parametrize(
    ("program", "deadline_s", "words"),
    [
        ("exec sleep 1000", 0.2, "did not answer in 0.2 s"),
        ("kill -9 $$", doctor.NVML_DEADLINE_S, "process that asked the driver died"),
    ],
)
def test_driver_that_hangs_or_crashes_is_named_and_costs_no_more(
    directory: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    deadline_s: float,
    words: str,
):
    """Goal: a broken driver must not break the doctor. Method: in place of the process that
    asks the driver, one that never ends, and one that is killed."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o700)
    monkeypatch.setattr(doctor, "NVML_DEADLINE_S", deadline_s)
    monkeypatch.setattr(sys, "executable", str(path))
    finding = examined(directory)["driver"]
    assert (finding.status, words in finding.found) == (FAIL, True), finding
