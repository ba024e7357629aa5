"""Goal: a full disk stops no switch, no wake and no takeover, fails no model for good, and all is
well again once there is room. Method: the pod of a pool in a directory of 24 MiB, filled to the
last byte."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lockserver.messages import CATALOGUE, StatusMsg
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import lockserver_socket
from plumbing.wire.blocking import BlockingClient
from tests.e2e.pools import WAIT_S, RunningPool, running_pool
from tests.e2e.test_pool import DEVICE_BYTES, TWO
from tests.helpers import auntil
from tests.small_disk import needs_root, small_disk

pytestmark = [needs_root, pytest.mark.slow]


async def answers(pod: RunningPool, *models: str) -> None:
    for model in models:
        status, body = await asyncio.to_thread(pod.ask, model, max_tokens=4)
        assert status == 200, body


def has_socket(pod: RunningPool) -> bool:
    """Whether the lock server keeps the service socket, and a gateway has it."""
    path = lockserver_socket(str(pod.directory))
    with contextlib.suppress(UnderstudyError), BlockingClient(path, CATALOGUE) as client:
        reply: Any = client.request(StatusMsg()).message
        (service,) = reply.document["service"].values()
        return bool(service["state"] == "lent")
    return False


def kill_backend(pod: RunningPool, engine: str) -> None:
    os.kill(pod.model_process(engine), signal.SIGKILL)


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
                    # Only two deaths at the same time may lose the listening socket.
                    await auntil(lambda: has_socket(pod), "the socket to be lent", WAIT_S)
                await answers(pod, "a", "b")

    asyncio.run(scenario())
