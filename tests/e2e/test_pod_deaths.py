"""The whole pod, real processes, under load: what each death costs, and what it must not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.pods import pod_under_load
from tests.helpers import auntil, until
from understudy.pod.drill.records import Outcome
from understudy.pod.gather import gather

UNDERSTUDY = str(Path(sys.executable).parent / "understudy")


async def more_answers(pod, count: int = 12) -> None:
    """Wait until so many more requests were answered in full."""
    goal = pod.counts()[Outcome.OK] + count
    await auntil(lambda: pod.counts()[Outcome.OK] >= goal, f"{count} more answers")


def test_drill_of_a_real_pod_passes_and_prints_one_document():
    """Goal: the drill as users run it. Method: the command, each target once, its JSON."""
    done = subprocess.run(
        [UNDERSTUDY, "drill", "--kills", "3", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] == 3
    assert set(report["killed"].values()) == {1}
    assert (report["refused"], report["wrong_tokens"], report["double_active"]) == (0, 0, 0)
    assert all(report["phases_ms"][phase]["max"] is not None for phase in report["phases_ms"])


def test_lock_server_killed_under_load_costs_nothing(tmp_path):
    """Goal: no failover, no request lost. Method: SIGKILL, restart, then kill the active one."""

    async def main():
        async with pod_under_load(tmp_path) as pod:
            before = await pod.whole()
            await more_answers(pod)
            pod.kill("lockserver")
            await auntil(lambda: pod.runner.restarts()["lockserver"] == 1, "its restart")
            after = await pod.whole()
            assert (after.engine, after.token) == (before.engine, before.token)
            await more_answers(pod)
            counts = pod.counts()
            assert sum(counts.values()) == counts[Outcome.OK]
            pod.kill(after.engine)
            assert (await pod.whole()).engine != after.engine
            await more_answers(pod)
            counts = pod.counts()
            assert counts[Outcome.REFUSED] == counts[Outcome.WRONG] == counts[Outcome.HUNG] == 0

    asyncio.run(main())


def test_lock_server_and_active_engine_killed_together_refuse_nothing(tmp_path):
    """Goal: the listening socket survives both. Method: two SIGKILLs in a row under load."""

    async def main():
        async with pod_under_load(tmp_path) as pod:
            before = await pod.whole()
            await more_answers(pod)
            pod.kill("lockserver")
            pod.kill(before.engine)
            await auntil(lambda: pod.runner.restarts()["lockserver"] == 1, "its restart")
            after = await pod.whole()
            assert after.token > before.token
            await more_answers(pod)
            counts = pod.counts()
            assert counts[Outcome.REFUSED] == counts[Outcome.WRONG] == counts[Outcome.HUNG] == 0

    asyncio.run(main())


def test_standby_killed_leaves_the_active_one_alone(tmp_path):
    """Goal: nothing is lost. Method: SIGKILL to the parked supervisor; it comes back."""

    async def main():
        async with pod_under_load(tmp_path) as pod:
            before = await pod.whole()
            (standby,) = before.standbys
            pod.kill(standby)
            await auntil(lambda: pod.runner.restarts()[standby] == 1, "its restart")
            after = await pod.whole()
            assert (after.engine, after.token) == (before.engine, before.token)
            await more_answers(pod)
            counts = pod.counts()
            assert sum(counts.values()) == counts[Outcome.OK]

    asyncio.run(main())


def test_memory_service_killed_under_load_comes_back_with_one_load(tmp_path):
    """Goal: both engines relaunch by themselves, the weights are loaded once. Method: SIGKILL."""

    async def main():
        async with pod_under_load(tmp_path) as pod:
            before = await pod.whole()
            await more_answers(pod)
            pod.kill("gms")
            await auntil(lambda: pod.runner.restarts()["gms"] == 1, "its restart")
            await pod.whole_after(before.token)
            view = await gather(pod.directory)
            assert [part["commits_total"] for part in view["gms"]] == [1]
            assert all(engine["engine"]["number"] >= 2 for engine in view["engines"])
            await more_answers(pod)
            assert pod.counts()[Outcome.WRONG] == 0
            assert sum(pod.runner.restarts()[name] for name in ("engine-0", "engine-1")) == 0

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_says_where_to_send_requests_and_stops_cleanly(tmp_path, number):
    """Goal: a pod for people. Method: `up` on free ports, `status --check`, then a signal."""
    from understudy.pod.local_pod import free_ports

    directory = str(tmp_path / "pod")
    service, lock, gms, engine, _ = free_ports(5)
    command = [UNDERSTUDY, "up", f"--dir={directory}", f"--service-port={service}"]
    command += [f"--lockserver-port={lock}", f"--gms-port={gms}", f"--engine-port={engine}"]
    output = tmp_path / "up.txt"
    with output.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        until(lambda: "curl http" in output.read_text(), "the example request")
        status = [UNDERSTUDY, "status", "--check", f"--dir={directory}"]
        done = subprocess.run(status, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "failover ready" in done.stdout
        assert len(done.stdout.splitlines()) < 15
        pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        mine = [pid for pid in pids if directory.encode() in _command_line(pid)]
        process.send_signal(number)
        assert process.wait(60) == 0
    until(lambda: not any(directory.encode() in _command_line(pid) for pid in mine), "all ends")


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
