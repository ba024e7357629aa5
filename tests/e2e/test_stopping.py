"""Stopping a pod under streams: each is finished, or ends with a marked error, and none in silence.

`understudy up` runs as users run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from plumbing.service.procfs import descendants
from tests.e2e.pods import ENVIRONMENT, UNDERSTUDY
from understudy.pod.ports import free_offset

EVERY_PROCESS = 0  # SIGTERM to all, where others name a signal to `understudy up`
INTERVAL_MS = 200
STREAMS = 12
START_S = 180.0  # on a busy machine
END_S = 120.0  # a hang is a failure; what is right ends long before
BEGUN = 2  # events of a stream before the order
AFTER_S = 15.0  # after its last stream every pod has ended, on a busy machine too; else within 2 s


class Stopped:
    """One pod that was stopped under streams: how each ended, and what `understudy up` said."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.ended_s: list[float] = []  # of each stream
        self.gone_s = 0.0
        self.exit_code: int | None = None
        self.said = b""  # from the first stream on

    @property
    def lingered_s(self) -> float:
        """For how long the pod was there after its last stream."""
        return self.gone_s - max(self.ended_s)


async def stream(port: int, tokens: int, stopped: Stopped, begun: asyncio.Semaphore) -> None:
    body = {"model": "m", "prompt": "Hello", "max_tokens": tokens, "stream": True}
    raw = json.dumps({**body, "min_tokens": tokens, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {len(raw)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
    events, how = 0, "silent"  # no event said that it is over
    with contextlib.suppress(OSError):
        while how == "silent" and (line := await reader.readline()):
            if line.strip() == b"data: [DONE]":
                how = "whole"
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                how = event["error"]["code"] if "error" in event else how
                events += 1
                if events == BEGUN:
                    begun.release()
    stopped.ends[how] += 1
    stopped.ended_s.append(time.monotonic())
    writer.close()


async def stop(directory: Path, number: int, *, tokens: int, env: dict[str, str]) -> Stopped:
    """Start a pod, begin streams of `tokens` tokens, stop it with the signal `number`."""
    offset = free_offset()
    port = 8000 + offset
    command = [UNDERSTUDY, "up", f"--dir={directory}", f"--port-offset={offset}"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--", f"--token-interval-ms={INTERVAL_MS}", "--slots=16", "--served-model-name=m"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**ENVIRONMENT, **env},
        start_new_session=True,  # a terminal's Ctrl-C goes to this group
    )
    stopped, begun = Stopped(), asyncio.Semaphore(0)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            while b"is in standby" not in await process.stdout.readline():
                pass
        reading = asyncio.create_task(process.stdout.read())
        clients = [
            asyncio.create_task(stream(port, tokens, stopped, begun)) for _ in range(STREAMS)
        ]
        async with asyncio.timeout(START_S):
            for _ in clients:
                await begun.acquire()
        if number == EVERY_PROCESS:
            for pid in sorted([process.pid, *descendants(process.pid)]):
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    os.kill(pid, signal.SIGTERM)
        elif number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        async with asyncio.timeout(END_S):
            stopped.exit_code = await process.wait()
            stopped.gone_s = time.monotonic()
            *_, stopped.said = await asyncio.gather(*clients, reading)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return stopped


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, EVERY_PROCESS], ids=["ctrl-c", "to every process"]
)
def test_stopped_pod_finishes_every_stream(tmp_path_factory: pytest.TempPathFactory, number: int):
    """Goal: stopping a pod costs no stream. Method: twelve of them, and one signal to
    `understudy up`, or to every process as by Slurm's scancel; each is whole, and the pod ends soon
    after the last one."""
    stopped = asyncio.run(stop(tmp_path_factory.mktemp("stop"), number, tokens=30, env={}))
    assert stopped.ends == {"whole": STREAMS}
    assert stopped.lingered_s < AFTER_S
    assert b"waiting up to" in stopped.said
    assert stopped.exit_code == 0


@pytest.mark.slow
def test_streams_that_outlast_the_grace_end_with_a_marked_error(
    tmp_path_factory: pytest.TempPathFactory,
):
    """Goal: none ends in silence. Method: a short drain, and streams that last longer."""
    env = {"UNDERSTUDY_DRAIN_MS": "3000", "UNDERSTUDY_DRAIN_TIMEOUT": "3"}
    directory = tmp_path_factory.mktemp("stop")
    stopped = asyncio.run(stop(directory, signal.SIGTERM, tokens=200, env=env))
    assert stopped.ends == {"gateway.stopping": STREAMS}
    assert stopped.lingered_s < AFTER_S
    assert stopped.exit_code == 0
