"""Goal: the blocks of a killed engine are the next one's, and nobody can tell by the tokens.
Method: real processes on a real memory service; the gateway is played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from plumbing import gateway_protocol as hop
from tests.engine.reference.resuming import Stream, read_stream
from tests.engine.reference_process.active import (
    PATH,
    STATEFUL,
    behind_gateway,
    health,
    joined,
    read_to_the_end,
)
from tests.engine.reference_process.rig import kv_service, memory_service, supervisor

PROMPT_TOKENS, SEEN_TOKENS, NEW_TOKENS = 100, 40, 200
# At the kill the stream is 20 tokens before the end of a KV block, and must not complete it: of a
# block with tokens that no client has seen, the next engine computes its part again.
SLOWLY = ("--token-interval-ms", "50")
LONG = {**STATEFUL, "prompt": "h" * (PROMPT_TOKENS - 1), "max_tokens": NEW_TOKENS}
KEPT = ("--kv-memory", "gms", "--kv-audit")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(1, "model"), (2, "model-1")])
def test_next_engine_goes_on_with_the_blocks_of_a_killed_one(
    tmp_path: Path, model: Path, ranks: int, victim: str
):
    """Goal: nothing is computed again, and the tokens are those of an engine that was never killed.
    Method: kill a rank in the middle of a stream, resume at the next
    engine; count its steps; ask an engine without a cache for the whole answer."""
    asked = json.dumps(LONG).encode()

    async def main() -> None:
        arguments = ("--model", str(model), "--tensor-parallel", str(ranks))
        async with contextlib.AsyncExitStack() as stack:
            for rank in range(ranks):
                await stack.enter_async_context(memory_service(tmp_path, device=f"HOST-{rank}"))
                await stack.enter_async_context(kv_service(tmp_path, f"HOST-{rank}"))
            start = stack.enter_async_context
            first = await start(supervisor(tmp_path, *arguments, *KEPT, *SLOWLY))
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
            assert report.progress == NEW_TOKENS - len(before.tokens)
            assert report.replayed == len(before.tokens)
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
