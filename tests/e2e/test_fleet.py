"""Goal: what a user of a fleet on one machine meets. Method: the real command: `up --replicas`,
also of a pool, and that nothing is left when it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from plumbing.service.procfs import is_alive
from tests.documents import mismatches
from tests.e2e.pods import UNDERSTUDY, running_pod
from tests.e2e.test_pool import DEVICE_BYTES, TWO
from tests.helpers import POLL_S, auntil, until
from understudy.drill.clients import inside_target, send, stream_without_pause
from understudy.drill.outcomes import classify
from understudy.drill.records import Outcome, Prompt
from understudy.pod.ports import free_offset
from understudy.schema import FrontView
from understudy.status.gather import part_of, status_of
from understudy.up.models import make_random_model

WAIT_S = 300.0
STREAM = {"prompt": "one rainy day", "max_tokens": 300, "temperature": 0, "stream": True}


class RunningFleet:
    """`understudy up` of two pods, in `directory`, at `url`; `tree`: every process that it had."""

    def __init__(self, directory: Path, output: Path, up: subprocess.Popen[bytes]) -> None:
        self.directory, self.output, self.up = directory, output, up
        self.tree: dict[int, psutil.Process] = {}
        self._kills: Counter[str] = Counter()
        (self.url,) = re.findall(r"^  curl (\S+)", output.read_text(), re.MULTILINE)

    def has_standbys(self) -> bool:
        words = [UNDERSTUDY, "status", "--json"]
        pods = self.directory.glob("pod-[0-9]")
        views = [subprocess.run([*words, f"--dir={pod}"], stdout=PIPE, check=False) for pod in pods]
        return all(json.loads(each.stdout)["standbys"] for each in views)

    def look(self) -> list[psutil.Process]:
        found = psutil.Process(self.up.pid).children(recursive=True)
        self.tree |= {each.pid: each for each in found}
        return found

    def kill(self, pod: str) -> None:
        """Every process of it."""
        self._kills[pod] += 1
        words = f"--dir={self.directory / pod}"
        (first,) = (each for each in self.look() if words in each.cmdline())
        for each in [first, *first.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    def until_restarted(self, pod: str) -> None:
        again = f"{pod} | (runner) died of signal 9; restarting"  # a second death may have to wait
        count = self._kills[pod]
        until(lambda: self.output.read_text().count(again) == count, "its next life", WAIT_S)


@contextlib.contextmanager
def fleet_up(base: Path, *more: str) -> Iterator[RunningFleet]:
    """It is stopped at the end, and leaves nothing."""
    output, directory = base / "out", base / "fleet"
    flags = ["--replicas=2", f"--port-offset={free_offset(3)}", *more]
    with running_pod(directory, output, flags, WAIT_S) as up:
        fleet = RunningFleet(directory, output, up)
        yield fleet
        fleet.look()
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0
    assert [pid for pid in fleet.tree if is_alive(pid)] == []


@pytest.mark.slow
def test_up_with_replicas_serves_at_one_port_and_leaves_no_process(tmp_path_factory):
    """Method: a request; SIGKILL of a pod, which is started again; SIGTERM."""
    with fleet_up(tmp_path_factory.mktemp("up")) as fleet:
        body = json.dumps({"model": "random-model", "prompt": "a", "max_tokens": 4}).encode()
        request = urllib.request.Request(fleet.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            served = answer.headers["X-Understudy-Pod"]
        words = [UNDERSTUDY, "status", f"--dir={fleet.directory}", "--json"]
        view = subprocess.run(words, stdout=PIPE, check=False).stdout
        assert mismatches(json.loads(view), FrontView) == []
        # What is said last is where clients connect; a pod says later that it has a standby.
        until(lambda: fleet.has_standbys(), "each pod's standby", WAIT_S)
        lines = [it for it in fleet.output.read_text().splitlines() if "waiting for" not in it]
        assert fleet.url.startswith(re.findall(r"http://[\d.:]+", "\n".join(lines))[-1])
        # Two models would have two names and two continuation ids: no stream could move.
        assert list(fleet.directory.glob("pod-*/random-model*")) == []
        fleet.kill(served)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.headers["X-Understudy-Pod"] != served
        fleet.until_restarted(served)


@pytest.mark.slow
async def test_streams_of_two_models_go_on_when_a_pod_with_both_is_killed(tmp_path_factory):
    """Method: two pods of two models that do not fit together; clients of both all the while; the
    pod that has more of them is killed, twice. So its streams go on where their model sleeps."""
    base = tmp_path_factory.mktemp("up")
    file, model = base / "pool.yaml", await make_random_model(base / "model")
    file.write_text(TWO.replace("MODEL", str(model)))
    answers, stopping, expected = [], asyncio.Event(), {}
    with fleet_up(base, f"--pool={file}", f"--device-bytes={DEVICE_BYTES}") as fleet:
        address = urlsplit(fleet.url).netloc
        target, front = inside_target(address), part_of(fleet.directory, "gateway")

        async def pods() -> dict[str, Any]:
            """By name, once both take requests."""
            found: dict[str, Any] = {}
            async with asyncio.timeout(WAIT_S):
                while [each["state"] for each in found.values()] != ["ready"] * 2:
                    await asyncio.sleep(POLL_S)
                    document = await status_of(front)
                    found = {each["name"]: each for each in document.get("pods", ())}
            return found

        prompts = [Prompt(each, "/v1/completions", {**STREAM, "model": each}) for each in "ab"]
        expected = {each.key: await send(target, each) for each in prompts}
        clients = [
            asyncio.create_task(
                stream_without_pause(
                    target, [each], 0, answers.append, stopping, silence_max_s=WAIT_S
                )
            )
            for each in prompts * 2
        ]
        for _ in range(2):
            before = len(answers)
            await auntil(
                lambda before=before: {each.prompt for each in answers[before:]} == {"a", "b"},
                "an answer of both models",
                WAIT_S,
            )
            found = await pods()
            busiest = max(found, key=lambda name: found[name]["streams"])
            fleet.kill(busiest)
            await asyncio.to_thread(fleet.until_restarted, busiest)
        await pods()
        stopping.set()
        await asyncio.gather(*clients)
        losses = (await status_of(front))["losses"]
    outcomes = {classify(each, expected) for each in answers}
    assert outcomes == {Outcome.OK}, [(each.end, each.status, each.detail) for each in answers]
    assert losses["gone"] == 2
