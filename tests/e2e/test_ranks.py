"""Pods of tensor-parallel engines: drills as users run them, and an interrupted load."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gms.client import messages as gms_messages
from plumbing.pod.paths import gms_socket
from tests.e2e.pods import AS_USERS_RUN_IT, GRACE_S, WHOLE_DEADLINE_S
from tests.e2e.processes import Processes, kill, pod_ports
from tests.e2e.test_commands import ENVIRONMENT, UNDERSTUDY
from tests.helpers import POLL_S
from understudy.drill.killer import wait_whole
from understudy.drill.targets import TARGETS
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.status.gather import PodPart, engine_parts, status_of


def drill(temporary: Path, *flags: str) -> dict[str, Any]:
    """The report of a drill of two ranks that passed and left nothing behind."""
    done = subprocess.run(
        [UNDERSTUDY, "drill", "--tensor-parallel=2", "--json", *flags],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, "TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(temporary) == []
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["refused"], report["wrong_tokens"], report["double_active"]) == (0, 0, 0)
    return report


@pytest.mark.slow
def test_drill_kills_every_rank_in_turn(tmp_path_factory: pytest.TempPathFactory):
    """Goal: a dead rank is a dead engine, and the next engine gives the same answers. Method: the
    command, each process of the active engine once."""
    report = drill(tmp_path_factory.mktemp("t"), "--kills=3")
    assert report["killed"] == {**dict.fromkeys(TARGETS, 1), "backend-model-1": 1}
    assert report["failover_ms"]["max"] > 0
    assert "gms" not in report


@pytest.mark.slow
def test_drill_of_the_memory_service_costs_nothing(
    tmp_path_factory: pytest.TempPathFactory,
):
    """Goal: a crash without loss. Method: the command, two kills of each device's server; it checks
    requests, incarnations and physical memory itself."""
    report = drill(tmp_path_factory.mktemp("t"), "--target=gms", "--kills=4")
    assert report["killed"] == {**dict.fromkeys(TARGETS, 0), "gms": 4}
    assert report["lost_in_flight"] == 0
    assert report["gms"]["recovery_ms"]["max"] > 0
    assert 0 < report["gms"]["peak_physical_bytes"] <= report["gms"]["committed_bytes"]


@asynccontextmanager
async def running(pod: LocalPod, names: str) -> AsyncIterator[None]:
    """Those containers of `pod` whose names match. Engines are not waited for or probed: a liveness
    probe assumes an engine that has started."""
    named = [each for each in pod.containers() if re.match(names, each.name)]
    chosen = [
        replace(each, grace_s=GRACE_S, startup=None, liveness=None)
        if "engine" in each.name
        else replace(each, grace_s=GRACE_S)
        for each in named
    ]
    runner = PodRunner(chosen, pod.directory / "log")
    try:
        await runner.start()
        yield
    finally:
        await runner.stop()


async def device(pod: LocalPod, name: str) -> Mapping[str, Any]:
    path = gms_socket(str(pod.directory), name)
    return await status_of(PodPart(name, path, gms_messages.CATALOGUE))


async def engine(pod: LocalPod, name: str) -> Mapping[str, Any]:
    found = [part for part in engine_parts(pod.directory) if part.name == name]
    return await status_of(found[0]) if found else {}


def loads_of(pod: LocalPod) -> list[str]:
    """The devices that weights were loaded to, once per load."""
    logs = [path.read_text() for path in sorted((pod.directory / "log").glob("engine-*.log"))]
    return re.findall(r"loaded and committed .* on (HOST-\d)", "".join(logs))


async def eventually(
    look: Callable[[], Awaitable[Mapping[str, Any]]], is_so: Callable[[Mapping[str, Any]], bool]
) -> Mapping[str, Any]:
    """Poll until the condition holds; returns the last value."""
    async with asyncio.timeout(WHOLE_DEADLINE_S):
        while True:
            seen = await look()
            if is_so(seen):
                return seen
            await asyncio.sleep(POLL_S)


def with_role(pod: LocalPod, role: str) -> LocalPod:
    return replace(pod, env={**pod.env, "ENGINE_ROLE": role})


@pytest.mark.slow
@pytest.mark.parametrize("roles", [("primary", "shadow"), ("auto", "auto")])
def test_engine_killed_between_two_commits_leaves_the_first_one(
    tmp_path_factory: pytest.TempPathFactory, model: Path, roles: tuple[str, str]
):
    """Goal: committed weights stay, the rest is loaded once, and no engine waits for ever. Method:
    stop the second device's server, so that one rank commits and the other cannot; SIGKILL the
    engine while the other one waits, SIGCONT the server, and both engines start on the first
    device's old epoch."""
    directory = tmp_path_factory.mktemp("p") / "pod"
    directory.mkdir(mode=0o700)
    pod = LocalPod(directory, model, pod_ports(), env=AS_USERS_RUN_IT, tensor_parallel=2)

    async def main() -> None:
        async with running(pod, "lockserver|gms|gateway"):
            with Processes([(await device(pod, "HOST-1"))["pid"]]) as second:
                second.signal(signal.SIGSTOP)
                try:
                    async with running(with_role(pod, roles[0]), "engine-0"):
                        await scenario(second)
                finally:
                    second.signal(signal.SIGCONT)

    async def scenario(second: Processes) -> None:
        first = await eventually(
            lambda: device(pod, "HOST-0"), lambda it: it.get("state") == "committed"
        )
        async with running(with_role(pod, roles[1]), "engine-1"):
            await eventually(lambda: engine(pod, "engine-1"), has_both_ranks)
            kill((await engine(pod, "engine-0"))["backend"]["pids"]["model-1"])
            await eventually(
                lambda: engine(pod, "engine-0"), lambda it: it.get("engine", {}).get("number") == 2
            )
            for name in ("engine-0", "engine-1"):
                assert (await engine(pod, name))["engine"]["state"] == "init"
            second.signal(signal.SIGCONT)
            await wait_whole(directory, deadline_s=WHOLE_DEADLINE_S)
            devices = [await device(pod, name) for name in ("HOST-0", "HOST-1")]
            assert devices[0]["epoch"] == first["epoch"]
            for each in devices:
                assert each["commits_total"] == 1
                assert {it["engine"] for it in each["sessions"]} == {"engine-0", "engine-1"}
            assert sorted(loads_of(pod)) == ["HOST-0", "HOST-1"]

    asyncio.run(main())


def has_both_ranks(engine: Mapping[str, Any]) -> bool:
    return {"model", "model-1"} <= set(engine.get("backend", {}).get("pids", ()))
