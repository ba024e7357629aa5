"""Goal: the blocks of a killed engine are the next one's, and nobody can tell by the tokens.
Method: real processes on a real memory service; the gateway is played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.backends.reference.kv_blocks import page_of
from engine.messages import WokenMsg
from gms import names
from gms.client import KvClaim, borrow_pool
from gms.kv_messages import CATALOGUE, NO_ERA, StatusMsg
from plumbing import gateway_protocol as hop
from plumbing.wire.blocking import BlockingClient
from tests.engine.reference.resuming import Stream, read_stream
from tests.engine.reference_process.active import activate, health
from tests.engine.reference_process.rig import kv_service, listening, memory_service, supervisor
from tests.engine.reference_process.test_behind_gateway import (
    PATH,
    STATEFUL,
    behind_gateway,
    joined,
    read_to_the_end,
)

PROMPT_TOKENS, SEEN_TOKENS, NEW_TOKENS = 100, 60, 200
LONG = {**STATEFUL, "prompt": "h" * (PROMPT_TOKENS - 1), "max_tokens": NEW_TOKENS}
KEPT = ("--kv-memory", "gms", "--kv-audit")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(1, "model"), (2, "model-1")])
def test_next_engine_goes_on_with_the_blocks_of_a_killed_one(
    tmp_path: Path, model: Path, ranks: int, victim: str
):
    """Goal: only what is not in a full block is computed again, and the tokens are those of an
    engine that was never killed. Method: kill a rank in the middle of a stream, resume at the next
    engine; count its steps; ask an engine without a cache for the whole answer."""
    asked = json.dumps(LONG).encode()

    async def main() -> None:
        arguments = ("--model", str(model), "--tensor-parallel", str(ranks))
        async with contextlib.AsyncExitStack() as stack:
            for rank in range(ranks):
                await stack.enter_async_context(memory_service(tmp_path, device=f"HOST-{rank}"))
                await stack.enter_async_context(kv_service(tmp_path, f"HOST-{rank}"))
            start = stack.enter_async_context
            first = await start(supervisor(tmp_path, *arguments, *KEPT))
            async with (
                behind_gateway(tmp_path, first, 1) as (gateway, _),
                gateway.post(PATH, data=asked) as response,
            ):
                assert (first.woken.kv_memory, first.woken.adopted_blocks) == ("gms", 0)
                assert first.woken.kv_note.endswith("the pool is new")
                body = await response.content.readuntil(b"\n\n: u=")
                while len(read_stream(body).tokens) < SEEN_TOKENS:
                    body += await response.content.readuntil(b"\n\n: u=")
                os.kill(first.registered[victim], signal.SIGKILL)
                before = read_stream(body + await read_to_the_end(response)).beginning(SEEN_TOKENS)
            await first.ended()

            second = await start(supervisor(tmp_path, *arguments, *KEPT, engine="engine-1"))
            journal = hop.Journal(before.tokens, [len(before.tokens)])
            data, header = hop.with_journal(asked, journal)
            async with behind_gateway(tmp_path, second, 2) as (gateway, _):
                known = (PROMPT_TOKENS + len(before.tokens) - 1) // 32 * 32
                assert second.woken.adopted_blocks >= known // 32, second.woken
                headers = {hop.JOURNAL: header}
                async with gateway.post(PATH, data=data, headers=headers) as response:
                    resumed = read_stream(await response.read())
                report = await health(second)
            assert report.progress == PROMPT_TOKENS + NEW_TOKENS - 1 - known
            assert report.published_blocks > 0
            assert report.kept_blocks == second.woken.adopted_blocks + report.published_blocks
            await second.stop()

            plain = ("--cache-tokens", "0", "--kv-memory", "private")
            third = await start(supervisor(tmp_path, *arguments, *plain, engine="engine-2"))
            async with (
                behind_gateway(tmp_path, third, 3) as (gateway, _),
                gateway.post(PATH, data=asked) as response,
            ):
                whole = read_stream(await response.read())
            assert joined(before, resumed) == joined(Stream([], (), False), whole)

    asyncio.run(main())


@pytest.mark.slow
def test_ranks_whose_pools_do_not_belong_together_start_empty_and_say_why(
    tmp_path: Path, model: Path
):
    """Goal: what is on one rank only is not believed. Method: three engines of two ranks; before
    the second, rank 1's pool is lost with its server; before the third, it holds other content."""
    arguments = ("--model", str(model), "--tensor-parallel", "2", *KEPT)
    asked = {"prompt": "h" * PROMPT_TOKENS, "max_tokens": 12, "temperature": 0}

    async def answer_of(engine: str, token: int) -> tuple[str, WokenMsg]:
        """And its death, with blocks in the cache."""
        sock, url = listening()
        with sock:
            async with (
                supervisor(tmp_path, *arguments, engine=engine) as stub,
                aiohttp.ClientSession() as client,
            ):
                await activate(stub, sock, token)
                async with client.post(f"{url}/v1/completions", json=asked) as response:
                    document = await response.json()
                assert (await health(stub)).published_blocks >= PROMPT_TOKENS // 32
                return document["choices"][0]["text"], stub.woken

    def replace_content(token: int) -> None:
        """As an engine would that used only rank 1's pool meanwhile."""
        path = names.kv_socket_path(str(tmp_path), "HOST-1")
        with BlockingClient(path, CATALOGUE) as client:
            reply: Any = client.request(StatusMsg()).message
        found = reply.document
        size_bytes, index_bytes = found["pool_bytes"], found["index_bytes"]
        claim = KvClaim("engine-x", "x", token, NO_ERA, size_bytes, index_bytes)
        with borrow_pool(str(tmp_path), "HOST-1", claim, deadline_s=20) as lease:
            page = page_of(lease)
            written = page.read_header()
            assert written is not None
            page.write_header(written[0], "another cohort")

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for rank in range(2):
                await stack.enter_async_context(memory_service(tmp_path, device=f"HOST-{rank}"))
            await stack.enter_async_context(kv_service(tmp_path, "HOST-0"))
            async with kv_service(tmp_path, "HOST-1"):
                expected, woken = await answer_of("engine-0", 1)
                assert woken.kv_memory == "gms"
            await stack.enter_async_context(kv_service(tmp_path, "HOST-1"))
            text, woken = await answer_of("engine-1", 2)
            assert (text, woken.kv_memory, woken.adopted_blocks) == (expected, "gms", 0)
            assert woken.kv_note == "rank 1: the pool is new"
            await asyncio.to_thread(replace_content, 3)
            text, woken = await answer_of("engine-2", 4)
            assert (text, woken.kv_memory, woken.adopted_blocks) == (expected, "gms", 0)
            assert woken.kv_note == "the ranks' pools do not hold parts of the same content"

    asyncio.run(main())
