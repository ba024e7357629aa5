"""What `gms status`, `inspect` and `drop` print, for real servers in real trouble.

On host memory only: the words are the same for every kind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gms import names, report
from gms import upkeep as operate
from plumbing.errors import DegradedError
from tests.gms.bench import ClientProcess, GmsProcess
from tests.gms.kinds import host_only
from tests.helpers import until


def words(gms: GmsProcess, *, in_full: bool = False) -> str:
    document = report.collect(gms.directory, in_full=in_full)
    return report.render_in_full(document) if in_full else report.render(document)


def drop(gms: GmsProcess) -> None:
    operate.drop(gms.directory, gms.device, epoch=None, even_if_mapped=True)


@host_only
def test_status_shows_two_copies_and_who_maps_the_old_one(gms: GmsProcess):
    """Drop what two engines map, then load anew: both times the old copy and its readers are
    shown; that the next load doubles the weights is said for as long as it is to come."""
    assert "superseded" not in words(gms)
    old = [gms.load(nbytes=3 << 20), gms.reader(engine="engine-1", incarnation="i-1")]
    drop(gms)
    said = words(gms)
    assert "  superseded 3.0 MiB, mapped by engine-0, engine-1; nothing is in service" in said
    with gms.load(engine="engine-2", incarnation="i-2"):
        line = next(line for line in words(gms).splitlines() if "superseded" in line)
        assert line == "  superseded 3.0 MiB, mapped by engine-0, engine-1"
    for reader in old:
        reader.close()


@host_only
def test_recovering_memory_names_pids_and_their_engines(gms: GmsProcess):
    """A reader that is stopped while its server dies: `status` and `drop` name its pid, and its
    engine by the state file."""
    gms.load().close()
    client = ClientProcess(gms.directory, "ro")
    try:
        client.expect("reader")
        os.kill(client.pid, signal.SIGSTOP)
        gms.kill()
        gms.start()
        until(lambda: gms.status()["unowned"][0]["holders"], "the pid of who holds it")
        state = Path(gms.directory, "engine_engine-9.json")
        state.write_text("no JSON")
        assert f", mapped by pid {client.pid}" in words(gms)
        about = {"id": "engine-9", "pid": 1}
        state.write_text(json.dumps({"engine": about, "backend": {"pids": {"model": client.pid}}}))
        assert f"is orphaned, 4.0 KiB, mapped by pid {client.pid} (engine-9)" in words(gms)
        with pytest.raises(DegradedError, match=rf"pid {client.pid} \(engine-9\)"):
            drop(gms)
    finally:
        os.kill(client.pid, signal.SIGCONT)
        client.kill()


@host_only
def test_inspect_does_not_count_tensors_that_it_cannot_know(gms: GmsProcess):
    """Condemned memory that came back after a restart has no manifest: `unknown`, not 0."""
    with gms.load() as reader:
        assert "tensors 1" in words(gms, in_full=True)
        drop(gms)
        gms.kill()
        gms.start()
        reader.rejoin(10)
        assert "superseded: slabs 1, 4.0 KiB, tensors unknown" in words(gms, in_full=True)


@pytest.mark.slow
@host_only
def test_devices_that_hang_are_waited_for_together(
    gms: GmsProcess, monkeypatch: pytest.MonkeyPatch
):
    """Two servers are stopped and one is not: the limit is waited for once."""
    asked: list[int] = []
    monkeypatch.setattr(report, "TIMEOUT_S", 1.0)
    more = [GmsProcess(gms.directory, device=f"HOST-{n}").start() for n in (1, 2)]
    try:
        for server in more:
            os.kill(server.pid, signal.SIGSTOP)
        ask = report._ask

        def counted(*args, **options):
            asked.append(len(asked))
            until(lambda: len(asked) == 3, "the others to be asked meanwhile")
            return ask(*args, **options)

        monkeypatch.setattr(report, "_ask", counted)
        online = [
            each["online"] for each in report.collect(gms.directory, in_full=False)["devices"]
        ]
        assert online == [True, False, False]
    finally:
        for server in more:
            server.stop()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gms.cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@host_only
def test_drop_reports_a_missing_device_before_it_asks_for_confirmation(
    gms: GmsProcess, tmp_path: Path
):
    """No service, no such device, then a device that is there: only the last one asks."""
    nowhere = run("drop", "--dir", str(tmp_path))
    assert (nowhere.returncode, "gms.no_devices" in nowhere.stderr) == (3, True)
    unknown = run("drop", "--dir", gms.directory, "--device", "HOST-7")
    assert (unknown.returncode, "gms.bad_device" in unknown.stderr) == (2, True)
    known = run("drop", "--dir", gms.directory)
    assert (known.returncode, "--yes" in known.stderr) == (2, True)


@pytest.mark.slow
def test_status_shows_how_often_a_server_was_restarted(directory: str):
    """`gms serve`, its device's server killed twice: none, then `restarts 2` and since when."""
    with subprocess.Popen(
        [sys.executable, "-m", "gms.cli", "serve", "--dir", directory, "--http-port", "0"],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
    ) as service:
        try:
            path = names.socket_path(directory, "HOST-0")
            until(lambda: os.path.exists(path), "the server's socket")

            def online() -> dict | None:
                (device,) = report.collect(directory, in_full=False)["devices"]
                return device if device["online"] else None

            first = until(online, "its word")
            assert first["restarts_total"] == 0
            assert "restarts" not in report.render({"devices": [first]})
            for number in (1, 2):
                os.kill((online() or first)["pid"], signal.SIGKILL)
                until(
                    lambda number=number: (online() or first)["restarts_total"] == number,
                    "the next server",
                )
            second = until(online, "its word")
            said = report.render({"devices": [second]})
            assert f", restarts 2 (last {second['since']})" in said
        finally:
            service.terminate()
            service.wait()
