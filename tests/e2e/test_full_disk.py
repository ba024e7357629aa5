"""Goal: a full disk stops no switch, no wake and no takeover, fails no model for good, and all is
well again once there is room. Method: the pod of a pool in a directory of 24 MiB, filled to the
last byte and to the last name."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.messages import CONTROL
from plumbing.part.cli import ask_status
from plumbing.part.paths import engine_socket
from tests.e2e.pools import RunningPool, running_pool
from tests.e2e.test_pool import DEVICE_BYTES, TWO
from tests.helpers import auntil
from tests.small_disk import needs_root, small_disk

pytestmark = [needs_root, pytest.mark.slow]

LAUNCHES = 4  # one more than the faults that fail a model


def test_full_disk_stops_nothing_and_fails_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def answers(pod: RunningPool, *models: str) -> None:
        for model in models:
            status, body = await asyncio.to_thread(pod.ask, model, max_tokens=4)
            assert status == 200, body

    def model(pod: RunningPool, name: str) -> dict[str, Any]:
        return next(each for each in pod.status()["models"] if each["model"] == name)

    def kill_backend(pod: RunningPool, name: str) -> None:
        os.kill(pod.model_process(f"{name}-0"), signal.SIGKILL)

    async def scenario() -> None:
        with small_disk(tmp_path / "pod", "size=24m,nr_inodes=400") as disk:
            async with running_pool(disk.path, monkeypatch, TWO, DEVICE_BYTES) as pod:
                await answers(pod, "a", "b")
                disk.fill()
                await answers(pod, "a", "b", "a")
                kill_backend(pod, "a")
                await answers(pod, "a", "b")
                for container in ("pool", "lockserver", "gms", "gateway", "b-0"):
                    disk.fill()
                    os.kill(pod.runner.pids()[container], signal.SIGKILL)
                    await auntil(
                        lambda name=container: pod.runner.restarts()[name] == 1,
                        f"{container} to be back",
                    )
                    await answers(pod, "a", "b")

                disk.fill_names()
                seen: set[int] = set()

                def is_tried_again_and_again() -> bool:
                    found = model(pod, "b")
                    assert found["state"] != "failed", found
                    engine = ask_status(engine_socket(str(disk.path), "b-0"), CONTROL)
                    seen.add(engine["engine"]["number"])
                    return len(seen) > LAUNCHES

                kill_backend(pod, "b")
                await auntil(is_tried_again_and_again, "b to be tried again")
                assert any("No space left" in each for each in pod.status()["problems"])
                disk.clear()
                await answers(pod, "b", "a")
                assert not any("No space left" in each for each in pod.status()["problems"])

    asyncio.run(scenario())
