"""A stream whose engine dies goes on at the other engine of a pod, behind the KV blocks of the dead
one: two engines behind the sockets at which a gateway asks them, and a test in its place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from plumbing import hop
from plumbing.hop import Journal
from plumbing.part.paths import engine_http_socket
from tests.e2e.processes import pod_ports
from tests.helpers import auntil
from tests.vllm.conftest import WHOLE_DEADLINE_S
from understudy.kubelet.runner import PodRunner
from understudy.status.gather import gather
from understudy.up.local_pod import LocalPod
from understudy.up.random_model import VLLM_RANDOM_MODEL

ANSWER_S = 60.0
WHOLE_POLL_S = 0.5  # a status of all parts costs more than the test's other polls
KILL_AFTER = 70  # groups
# On a busy machine the core runs ahead of the process that sends its tokens, by hundreds.
ANSWER_TOKENS = 1000
BLOCK_TOKENS = 32
ARGUMENTS = (
    *VLLM_RANDOM_MODEL.arguments,
    "--kv-memory=gms",
    f"--block-size={BLOCK_TOKENS}",
    "--enable-prompt-tokens-details",
)
BODY = {
    "prompt": [72, 101, 108, 108, 111],
    "max_tokens": ANSWER_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "temperature": 1.0,
    "seed": 4,
    "frequency_penalty": 0.4,
}


class Connection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=ANSWER_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(self.path)


class Engine:
    """One engine as the gateway finds it while it is active."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = engine_http_socket(str(directory), name)

    def hello(self) -> Any:
        with contextlib.closing(Connection(self.path)) as connection:
            connection.request("GET", hop.HELLO_PATH, headers={hop.GATEWAY: "1"})
            with connection.getresponse() as response:
                return json.load(response)

    def cached_tokens(self, prompt: list[int]) -> int:
        """How many tokens of `prompt` need not be computed."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        headers = {hop.GATEWAY: "1", "Content-Type": "application/json"}
        with contextlib.closing(Connection(self.path)) as connection:
            connection.request("POST", "/v1/completions", body, headers)
            with connection.getresponse() as response:
                usage = json.load(response)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def stream(self, journal: Journal | None = None, kill: int | None = None) -> bytes:
        """The answer, as far as it comes; after some groups the process `kill` dies."""
        body, headers = json.dumps(BODY).encode(), {hop.GATEWAY: "1"}
        headers["Content-Type"] = "application/json"
        if journal is not None:
            body, headers[hop.JOURNAL] = hop.with_journal(body, journal)
        text = b""
        with contextlib.closing(Connection(self.path)) as connection:
            connection.request("POST", "/v1/completions", body, headers)
            with connection.getresponse() as response:
                assert response.getheader(hop.CONTINUATION) == "state"
                with contextlib.suppress(HTTPException, ConnectionError):
                    while part := response.read1():
                        text += part
                        if kill is not None and text.count(hop.GROUP_MARK) >= KILL_AFTER:
                            os.kill(kill, signal.SIGKILL)
                            kill = None
        return text


def made_by(text: bytes) -> tuple[Journal, str]:
    """Tokens and text of the whole groups."""
    tokens: list[int] = []
    chunks: list[int] = []
    said = pending = ""
    for part in text.split(b"\n\n"):
        if part.startswith(hop.GROUP_MARK):
            ids, sizes = hop.read_group_end(part)
            tokens, chunks = tokens + ids, chunks + sizes
            said, pending = said + pending, ""
        elif part.startswith(b"data: {"):
            pending += "".join(each["text"] for each in json.loads(part[6:])["choices"])
    return Journal(tokens, chunks), said


async def whole(directory: Path) -> Any:
    """The pod's status once an engine is active and the other one is ready."""
    end = time.monotonic() + WHOLE_DEADLINE_S
    while time.monotonic() < end:
        view = await gather(directory)
        states = sorted(str((part["engine"] or {}).get("state")) for part in view["engines"])
        if view["active"] and states == ["active", "standby"]:
            return view
        await asyncio.sleep(WHOLE_POLL_S)
    raise AssertionError(f"after {WHOLE_DEADLINE_S:g} s the engines are {states}")


def test_a_stream_of_a_dead_engine_goes_on_at_the_other(tmp_path: Path, model: Path):
    """SIGKILL the engine core in the middle of a stream that is seeded and penalised. What came is
    cut behind a whole group and says nothing of an end; the other engine has the same continuation
    id, takes up the journal, and the whole is the answer that was not interrupted. It has adopted
    the blocks of the dead engine, those of the cut stream among them, and prefills behind them."""

    async def scenario() -> None:
        pod = LocalPod(
            tmp_path,
            model,
            pod_ports(),
            backend="vllm",
            backend_args=ARGUMENTS,
            # A pod without a gateway, whose lock server nevertheless lends to gateways only.
            is_direct=True,
            env={**VLLM_RANDOM_MODEL.env, "UNDERSTUDY_DIRECT": "no"},
        )
        containers = [
            replace(each, liveness=None, starts_in_order=False) for each in pod.containers()
        ]
        runner = PodRunner(containers, tmp_path / "log")
        try:
            await runner.start()
            view = await whole(tmp_path)
            (standby,) = {part["engine"]["id"] for part in view["engines"]} - {view["active"]}
            first = Engine(tmp_path, view["active"])
            before = await asyncio.to_thread(first.hello)
            expected = await asyncio.to_thread(first.stream)
            assert expected.endswith(hop.END)
            (core,) = (
                part["backend"]["pids"]["core"]
                for part in view["engines"]
                if part["engine"]["id"] == view["active"]
            )
            cut = await asyncio.to_thread(first.stream, None, core)
            assert not cut.endswith(hop.END)
            journal, begun = made_by(cut)
            assert KILL_AFTER <= len(journal.tokens) < ANSWER_TOKENS

            second = Engine(tmp_path, standby)
            await auntil(lambda: os.path.exists(second.path), "the other engine's socket")
            after = await asyncio.to_thread(second.hello)
            assert after["token"] > before["token"]
            assert after["continuation_id"] == before["continuation_id"] != ""
            assert (after["continuation"], after["problem"]) == ("state", None)
            view = await gather(tmp_path)
            (kv,) = (
                part["backend"]["kv"] for part in view["engines"] if part["engine"]["id"] == standby
            )
            assert (kv["memory"], kv["note"]) == ("gms", None)
            assert kv["adopted_blocks"] >= ANSWER_TOKENS // BLOCK_TOKENS
            text = [*BODY["prompt"], *journal.tokens]
            # The last block was in a step that the engine did not live to process.
            whole_blocks = len(text) // BLOCK_TOKENS - 1
            cached = await asyncio.to_thread(second.cached_tokens, text)
            assert cached >= whole_blocks * BLOCK_TOKENS
            resumed = await asyncio.to_thread(second.stream, journal)
            assert resumed.endswith(hop.END)
            assert made_by(resumed)[1] == made_by(expected)[1]
            assert made_by(resumed)[0].tokens == made_by(expected)[0].tokens
            assert made_by(expected)[1].startswith(begun)
        finally:
            await runner.stop()

    asyncio.run(scenario())
