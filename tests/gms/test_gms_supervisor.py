"""`gms serve` as operators run it: probes, restarts in place, ends, relayed events, and the
reading commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gms.client import Reader
from gms.server.supervisor import Child, ServerMetrics
from plumbing.pod.paths import read_device_names
from plumbing.service import procfs
from plumbing.service.events import EventLog
from plumbing.service.metrics import Metrics
from tests.fake_clock import FakeClock
from tests.gms.bench import GmsProcess
from tests.gms.kinds import host_only
from tests.helpers import free_port, http_get, run_command, until
from tests.standin import build

DEVICES = {"host": ("HOST-0", "HOST-1"), "cuda": (build.GPU_A, build.GPU_B)}


class Serve:
    """`gms serve` with two devices."""

    def __init__(self, directory: str, kind: str) -> None:
        if kind == "cuda" and build.REAL_GPU is not None:
            pytest.skip("it takes two devices")
        self.directory = directory
        self.first, self.second = DEVICES[kind]
        self.memory = "host memory" if kind == "host" else "cuda 13.0 memory (no context)"
        self.flags = ["--memory", kind, *(["--devices", "2"] if kind == "host" else [])]
        self.stderr = open(f"{directory}/stderr", "w+b")  # noqa: SIM115 - closed by `stop`
        self.port = free_port()
        self.process = self.launch(self.stderr)

    def launch(self, stderr: Any) -> subprocess.Popen[bytes]:
        flags = ["--dir", self.directory, *self.flags, "--http-port", str(self.port)]
        return subprocess.Popen(
            [sys.executable, "-m", "gms.cli", "serve", *flags, "--device-bytes", "64MiB"],
            stderr=stderr,
            env={**os.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
        )

    def get(self, path: str) -> tuple[int, str]:
        try:
            return http_get(self.port, path)
        except ConnectionRefusedError:
            return 0, "it does not listen yet"

    def devices(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.get("/status")[1])["devices"]
        return found

    def started(self) -> Serve:
        """With its KV servers, which /startup does not wait for."""
        until(lambda: self.get("/startup")[0] == 200, "/startup to be 200")
        until(
            # A host copy's device has no KV server.
            lambda: all("pid" in each for d in self.devices() for each in (d, d["kv"] or d)),
            "the status of every device's servers",
        )
        return self

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        self.stderr.close()


@pytest.fixture
def serve(directory: str, kind: str) -> Iterator[Serve]:
    running = Serve(directory, kind)
    yield running
    running.stop()


@pytest.fixture(scope="module", params=DEVICES)
def shared(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """One of each kind for the tests that leave it as it was."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "cuda":
            build.use(monkeypatch)
        directory = tempfile.mkdtemp(prefix="gms-")
        running = Serve(directory, request.param).started()
        yield running
        running.stop()
        shutil.rmtree(directory)


def load(shared: Serve) -> Reader:
    return GmsProcess(shared.directory, device=shared.first).reload(4096)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-W", "error", "-m", "gms.cli", *words])


@pytest.mark.slow
def test_dead_server_is_restarted_in_place(serve: Serve):
    """SIGKILL one device's server: a new one serves it, the other device's never noticed."""
    first, second = serve.started().devices()
    os.kill(first["pid"], signal.SIGKILL)
    until(
        lambda: serve.devices()[0].get("pid") not in (None, first["pid"]), "another server process"
    )
    until(lambda: serve.get("/startup")[0] == 200, "/startup to be 200 again")
    fresh, other = serve.devices()
    assert fresh["restarts_total"] == 1
    assert other["pid"] == second["pid"]
    assert other["restarts_total"] == 0
    wanted = f'gms_restarts_total{{device_uuid="{serve.first}"}} 1.0'
    assert wanted in serve.get("/metrics")[1]


@host_only  # PDEATHSIG, likewise
def test_servers_die_with_their_supervisor(serve: Serve):
    """SIGKILL the supervisor: its servers go too, and a new one can start at once."""
    pids = [device["pid"] for device in serve.started().devices()]
    serve.process.kill()
    serve.process.wait()
    until(lambda: not any(map(procfs.is_alive, pids)), "the servers to be gone")


def test_sigterm_ends_it_with_exit_code_zero(serve: Serve):
    """SIGTERM: the servers are stopped, the sockets removed, exit 0, no stack trace."""
    serve.started()
    serve.process.terminate()
    assert serve.process.wait(60) == 0
    assert not [name for name in os.listdir(serve.directory) if name.endswith(".sock")]
    serve.stderr.seek(0)
    assert b"Traceback" not in serve.stderr.read()


def test_second_supervisor_is_refused_with_a_sentence(shared: Serve):
    """`gms serve` on a directory that has one: who it is, exit 1, and nothing is disturbed."""
    second = command("serve", "--dir", shared.directory, "--http-port", "0")
    assert second.returncode == 1
    assert f"pid {shared.process.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    assert shared.get("/startup")[0] == 200
    assert read_device_names(shared.directory) == (shared.first, shared.second)


def test_status_reads_from_the_sockets(shared: Serve):
    """As text and as JSON; the other device is shown too."""
    with load(shared):
        document = json.loads(command("status", "--dir", shared.directory, "--json").stdout)
        assert [d["device_uuid"] for d in document["devices"]] == [shared.first, shared.second]
        assert document["devices"][0]["state"] == "committed"
        assert document["devices"][0]["sessions"][0]["engine"] == "engine-0"
        said = command("status", "--dir", shared.directory).stdout
        assert f"{shared.first}  committed, {shared.memory}, " in said


def test_status_without_a_server_is_an_offline_view(gms: GmsProcess):
    """The server was killed: the journal says what was committed; exit code 3. The reason is said
    once, on stderr; a watch, which only has stdout, says it there."""
    session = gms.load(4096)
    assert isinstance(session, Reader)
    gms.kill()
    found = command("status", "--dir", gms.directory)
    assert found.returncode == 3
    assert "offline view" in found.stdout
    assert session.epoch[:8] in found.stdout
    reason = "no server is listening on the socket"
    assert (found.stdout.count(reason), found.stderr.count(reason)) == (0, 1)
    words = [sys.executable, "-m", "gms.cli", "status", "--dir", gms.directory, "--watch"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watching:
        assert "offline view" in watching.stdout.readline()
        assert reason in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
    session.close()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("status", "--dir", "{}"), "no memory service in"),
        (("status", "--dir", "{}/missing"), "cannot read"),
        (("serve", "--dir", "{}/missing/deeper"), "service.directory_refused"),
        (("serve", "--dir", "{}", "--memory", "disk"), "one of host, cuda"),
        (("serve", "--dir", "{}", "--device", "GPU-1"), "requires --memory cuda"),
        (("serve", "--dir", "{}", "--device-bytes", "lots"), "such as 4GiB"),
    ],
)
def test_bad_usage_is_one_sentence(directory: str, words: tuple[str, ...], sentence: str):
    """Wrong flags and missing places: a sentence, exit 2 or 3, no stack trace."""
    found = command(*(word.format(directory) for word in words))
    assert found.returncode in (2, 3)
    assert sentence in found.stderr
    assert "Traceback" not in found.stderr


def test_a_relayed_event_is_counted_once():
    """Goal: the supervisor's record has each event of a server once, with its own times."""
    ours, theirs = EventLog("gms", FakeClock(5)), EventLog("gms-HOST-0", FakeClock(start_ms=9))
    metrics = ServerMetrics(Metrics(), ["HOST-0"], "weights")
    ours.subscribe(metrics.count)
    parent: Any = SimpleNamespace(
        log=ours, clock=FakeClock(), directory="/nowhere", metrics=(metrics,)
    )
    (served,) = Child(parent, "HOST-0", "the server", lambda *_: [], ["HOST-0"]).served
    kinds = ["gms.serving", "gms.recovered", "gms.condemned"]
    for kind in kinds:
        theirs.record(kind, "so it is", "warning", {"epoch": "e"})
    for event in theirs.kept_since(0):
        served._relay(event.to_dict())
    told = ours.kept_since(0)
    assert [event.type for event in told] == kinds
    expected = {
        **theirs.kept_since(2)[0].to_dict(),
        "data": {"epoch": "e", "device_uuid": "HOST-0"},
    }
    assert told[2].to_dict() == expected  # its own times and source; the ids agree by chance
    page = metrics.metrics.render().decode()
    for name in ("recoveries", "condemnations"):
        assert f'understudy_gms_{name}_total{{device_uuid="HOST-0"}} 1.0' in page
