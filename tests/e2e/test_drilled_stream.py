"""The kills of a drill beside a user's long answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from plumbing.pod.paths import engine_sockets
from tests.e2e.pods import running_pod
from understudy.drill.killer import strike, wait_whole
from understudy.drill.records import Kill
from understudy.pod.ports import free_offset

TOKENS = 45
TOKEN_INTERVAL_MS = 500  # 32 tokens take 16 s, and the pod is whole again after three
KILLS = ("backend-model", "supervisor", "backend-model")
DEADLINE_S = 180.0


@pytest.mark.slow
def test_long_stream_survives_three_kills_of_a_drill(tmp_path_factory: pytest.TempPathFactory):
    """Goal: the deaths are the drill's deed, so the stream that was in all these engines is no
    suspect. Method: engines that make two tokens a second; the drill's own kills, each as soon as
    the pod is whole."""
    base = tmp_path_factory.mktemp("up")
    directory: Path = base / "pod"
    offset = free_offset()

    async def stream_and_kill() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", 8000 + offset)
        asked = {"prompt": "abc", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: pod\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        answer = await reader.readuntil(b"data: {")
        whole, token = await wait_whole(directory), 0
        for target in KILLS:
            while whole.token <= token:
                whole = await wait_whole(directory)
            token = whole.token
            kill = Kill(target, whole.engine, whole.token)
            await strike(engine_sockets(directory)[whole.engine], 0, kill)
        answer += await reader.read()
        writer.close()
        assert b"data: [DONE]\n\n" in answer, answer[-400:]

    flags = [f"--port-offset={offset}", "--", f"--token-interval-ms={TOKEN_INTERVAL_MS}"]
    with running_pod(directory, base / "up.txt", flags, DEADLINE_S):
        asyncio.run(asyncio.wait_for(stream_and_kill(), DEADLINE_S))
