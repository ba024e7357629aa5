"""Goal: a full disk stops no switch, no wake and no takeover, fails no model for good, and all is
well again once there is room. Method: the pod of a pool in a directory of 24 MiB, filled to the
last byte and to the last name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from engine.messages import CONTROL
from plumbing.pod.cli import ask_status
from plumbing.pod.paths import engine_socket
from plumbing.service.procfs import descendants
from tests.e2e.pools import WAIT_S, RunningPool, running_pool
from tests.e2e.test_pool import DEVICE_BYTES, TWO
from tests.helpers import auntil
from tests.small_disk import SmallDisk, needs_root, small_disk

pytestmark = [needs_root, pytest.mark.slow]

LAUNCHES = 5  # more than the faults that fail a model, and as many as the deaths of a crash loop


async def answers(pod: RunningPool, *models: str) -> None:
    for model in models:
        status, body = await asyncio.to_thread(pod.ask, model, max_tokens=4)
        assert status == 200, body


def kill_backend(pod: RunningPool, engine: str) -> None:
    os.kill(pod.model_process(engine), signal.SIGKILL)


async def kill_without_a_free_name(disk: SmallDisk, engine: str) -> None:
    """The death frees the name of the KV pool's witness and that of a socket; with both, an engine
    starts. Its supervisor, which removes the socket, is stopped until the first one is taken."""
    document = await asyncio.to_thread(ask_status, engine_socket(str(disk.path), engine), CONTROL)
    supervisor = document["engine"]["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    for pid in descendants(supervisor):
        os.kill(pid, signal.SIGKILL)
    await auntil(
        lambda: not [*disk.path.glob(f"pool_witness_{engine}_*")], "the end of its KV pool", WAIT_S
    )
    disk.fill_names()
    with contextlib.suppress(ProcessLookupError):  # init has replaced it meanwhile
        os.kill(supervisor, signal.SIGCONT)


def test_disk_without_a_free_byte_stops_no_switch_wake_or_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def scenario() -> None:
        with small_disk(tmp_path / "pod", "size=24m") as disk:
            async with running_pool(disk.path, monkeypatch, TWO, DEVICE_BYTES) as pod:
                await answers(pod, "a", "b")
                disk.fill()
                await answers(pod, "a")
                kill_backend(pod, "a-0")
                await answers(pod, "a", "b")
                for container in ("pool", "lockserver", "gms", "gateway", "a-0"):
                    disk.fill()
                    os.kill(pod.runner.pids()[container], signal.SIGKILL)
                    await auntil(
                        lambda name=container: pod.runner.restarts()[name] == 1,
                        f"{container} to be back",
                        WAIT_S,
                    )
                await answers(pod, "a", "b")

    asyncio.run(scenario())


def test_disk_without_a_free_name_fails_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        with small_disk(tmp_path / "pod", "size=24m,nr_inodes=400") as disk:
            async with running_pool(disk.path, monkeypatch, TWO, DEVICE_BYTES) as pod:
                await answers(pod, "a", "b")
                disk.fill_names()
                seen: set[int] = set()

                def is_tried_again_and_again() -> bool:
                    assert pod.states()["b"] != "failed"
                    engine = ask_status(engine_socket(str(disk.path), "b-0"), CONTROL)
                    seen.add(engine["engine"]["number"])
                    return len(seen) > LAUNCHES

                await kill_without_a_free_name(disk, "b-0")
                await auntil(is_tried_again_and_again, "b to be tried again", WAIT_S)
                assert any("No space left" in each for each in pod.status()["problems"])
                disk.clear()
                await answers(pod, "b", "a")
                assert not any("No space left" in each for each in pod.status()["problems"])

    asyncio.run(scenario())
