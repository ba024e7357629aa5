"""Goal: what a user of a fleet on one machine meets. Method: the real commands: a drill in which
pods and their parts die under load; `up --replicas`, and that nothing is left when it stops.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from plumbing.service.procfs import is_alive
from tests.documents import mismatches
from tests.e2e.pods import AS_USERS_RUN_IT
from tests.helpers import until
from understudy.drill.schema import FleetDrillDocument
from understudy.pod.ports import free_offset
from understudy.schema import FrontView

UNDERSTUDY = str(Path(sys.executable).parent / "understudy")
ENVIRONMENT = {**os.environ, **AS_USERS_RUN_IT}
TARGETS = ("pod", "stop:pod", "backend-model", "gateway", "leave", "front")
WAIT_S = 300.0


@pytest.mark.slow
def test_drill_of_a_fleet_passes_and_prints_what_is_documented(tmp_path_factory):
    temporary = tmp_path_factory.mktemp("t")  # sockets have short paths only
    page = temporary / "drill.html"
    flags = [f"--target={each}" for each in TARGETS]
    flags += ["--replicas=2", f"--kills={len(TARGETS)}", f"--report={page}", "--json"]
    done = subprocess.run(
        [UNDERSTUDY, "drill", "--fleet", *flags],
        env={**ENVIRONMENT, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert mismatches(report, FleetDrillDocument) == []
    assert (report["passed"], report["pods"]) == (True, 2)
    assert report["killed"] == dict.fromkeys(TARGETS, 1)
    assert report["resumed"]
    assert "stop:pod of pod-" in page.read_text()
    assert os.listdir(temporary) == [page.name]


@pytest.mark.slow
def test_up_with_replicas_serves_at_one_port_and_leaves_no_process(tmp_path_factory):
    """Method: a request; SIGKILL of a pod's first process, which is started again; SIGTERM."""
    base = tmp_path_factory.mktemp("up")
    output, directory = base / "out", base / "fleet"
    flags = ["--replicas=2", f"--dir={directory}", f"--port-offset={free_offset(3)}"]
    with (
        output.open("w") as file,
        subprocess.Popen(
            [UNDERSTUDY, "up", *flags], stdout=file, stderr=file, env=ENVIRONMENT
        ) as up,
    ):
        try:
            until(lambda: "curl http" in output.read_text() or up.poll() is not None, "it", WAIT_S)
            assert up.poll() is None, output.read_text()
            (url,) = re.findall(r"^  curl (\S+)", output.read_text(), re.MULTILINE)
            body = json.dumps({"model": "random-model", "prompt": "a", "max_tokens": 4}).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                served = answer.headers["X-Understudy-Pod"]
            words = [UNDERSTUDY, "status", f"--dir={directory}", "--json"]
            view = subprocess.run(words, stdout=subprocess.PIPE, check=False).stdout
            assert mismatches(json.loads(view), FrontView) == []
            tree = {each.pid: each for each in psutil.Process(up.pid).children(recursive=True)}
            (pod,) = (it for it in tree.values() if f"--dir={directory}/{served}" in it.cmdline())
            pod.kill()
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.headers["X-Understudy-Pod"] != served
            again = "(runner) died of signal 9; restarting now"
            until(lambda: f"{served} | {again}" in output.read_text(), "its next life", WAIT_S)
            tree |= {each.pid: each for each in psutil.Process(up.pid).children(recursive=True)}
            up.send_signal(signal.SIGTERM)
            assert up.wait(60) == 0
        finally:
            up.kill()
    assert [pid for pid in tree if is_alive(pid)] == []
    assert "Traceback" not in output.read_text()
