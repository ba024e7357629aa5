"""Goal: an engine that rests has no KV memory, serves nobody, and goes on where it was when it is
woken. Method: real processes under the stub supervisor; the kernel says what they still have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import pytest

from engine.messages import DrainedMsg, DrainMsg, RestedMsg, RestMsg, WakeMsg
from lockserver.client import serving
from lockserver.core.names import WitnessState
from plumbing import gateway_protocol as hop
from tests.engine.reference.resuming import Stream, read_stream
from tests.engine.reference_process.active import (
    PATH,
    STATEFUL,
    activate,
    behind_gateway,
    complete,
    joined,
    read_to_the_end,
)
from tests.engine.reference_process.rig import (
    Supervisor,
    is_fault,
    kv_service,
    lend,
    listening,
    memory_service,
    supervisor,
)
from tests.helpers import STEADY_LOOKS, auntil, open_fds

BUDGET_MS = 20_000
PROMPT_TOKENS, TURNS, TURN_TOKENS = 100, 5, 33
POOL = "understudy_kv-"  # in the name of each of its parts


async def rest(stub: Supervisor, *, keep_kv: bool, resume: bool = False) -> None:
    assert isinstance(await stub.ask(DrainMsg(BUDGET_MS, resume)), DrainedMsg)
    rested = await stub.ask(RestMsg(keep_kv, BUDGET_MS))
    assert rested == RestedMsg(0), rested
    assert serving.scan(os.path.dirname(stub.serving_path))[0] == set()  # held by nobody
    for pid in stub.registered.values():
        assert POOL not in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "memory"), [(1, "gms"), (2, "gms"), (1, "private")])
def test_engine_rests_without_kv_memory_and_wakes_as_it_was(
    tmp_path: Path, model: Path, ranks: int, memory: str
):
    """Goal: nothing stays and nothing is lost, however often. Method: three rests under one token,
    during each of which a client asks; its answer is that of the first time. Then every process has
    the descriptors that it had after the first rest."""
    arguments = ("--model", str(model), "--tensor-parallel", str(ranks), "--kv-memory", memory)

    async def main() -> None:
        sock, url = listening()
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(sock)
            for rank in range(ranks):
                await stack.enter_async_context(memory_service(tmp_path, device=f"HOST-{rank}"))
                await stack.enter_async_context(kv_service(tmp_path, f"HOST-{rank}"))
            stub = await stack.enter_async_context(supervisor(tmp_path, *arguments))
            assert (await stub.prepared()).can_rest

            def descriptors() -> list[list[str]]:
                return [sorted(open_fds(pid).values()) for pid in stub.registered.values()]

            await activate(stub, sock, 1)
            assert stub.woken.kv_memory == memory
            async with aiohttp.ClientSession() as client:
                _, expected = await complete(client, url)
            before = None
            for _ in range(3):
                await rest(stub, keep_kv=False)
                # The servers of this test run in this process: it would have the memory.
                assert not [link for link in open_fds().values() if POOL in link]
                if before is None:
                    before = await settled(descriptors)
                async with aiohttp.ClientSession() as client:
                    asked = asyncio.ensure_future(complete(client, url))
                    await activate(stub, sock, 1)
                    assert stub.woken.adopted_blocks == 0
                    headers, answer = await asked
                    assert answer["choices"] == expected["choices"]
                    assert "Connection" not in headers  # as it was before the drain
            await rest(stub, keep_kv=False)
            await auntil(lambda: descriptors() == before, "the descriptors of the first rest")

    asyncio.run(main())


async def settled(look: Callable[[], list[list[str]]]) -> list[list[str]]:
    """What `look` says once it has said the same for a while: connections have been closed."""
    seen: list[list[list[str]]] = []

    def is_steady() -> bool:
        seen.append(look())
        return len(seen) >= STEADY_LOOKS and all(each == seen[-1] for each in seen[-STEADY_LOOKS:])

    await auntil(is_steady, "the descriptors to stay the same")
    return seen[-1]


async def serve_until(
    stub: Supervisor, gateway: aiohttp.ClientSession, asked: bytes, seen: Sequence[int], count: int
) -> Stream:
    """A stream that is resumed behind `seen`, and left to the next engine once it has `count` more
    tokens."""
    data, header = hop.with_journal(asked, hop.Journal(seen, [len(seen)]))
    more = {hop.JOURNAL: header} if seen else {}
    async with gateway.post(PATH, data=data if seen else asked, headers=more) as response:
        body = b""
        while len(read_stream(body).tokens) < len(seen) + count:
            body += await response.content.readuntil(b"\n\n: u=")
        reading = asyncio.ensure_future(read_to_the_end(response))
        await rest(stub, keep_kv=True, resume=True)
        return read_stream(body + await reading).beginning(len(seen) + count)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_living_engines_hand_a_stream_to_and_fro_with_its_blocks(
    tmp_path: Path, model: Path, ranks: int
):
    """Goal: a hand-over in place keeps what was computed, and who has handed over can be the next
    one again. Method: two engines serve one stream in turn, more often than engines may die with
    the same blocks; each adopts all full blocks. At the end one of them makes the whole answer from
    an empty cache, and is then told to wake for a token that is over."""
    arguments = ("--model", str(model), "--tensor-parallel", str(ranks))
    asked = json.dumps({**STATEFUL, "prompt": "h" * (PROMPT_TOKENS - 1)}).encode()

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for rank in range(ranks):
                await stack.enter_async_context(memory_service(tmp_path, device=f"HOST-{rank}"))
                await stack.enter_async_context(kv_service(tmp_path, f"HOST-{rank}"))
            start = stack.enter_async_context
            stubs = [
                await start(supervisor(tmp_path, *arguments, engine=f"engine-{number}"))
                for number in range(2)
            ]
            before = Stream([], (), is_whole=False)
            for turn in range(1, TURNS + 1):
                stub, seen = stubs[turn % 2], len(before.tokens)
                async with behind_gateway(tmp_path, stub, turn) as (gateway, _):
                    known = (PROMPT_TOKENS + seen - 1) // 32 if seen else 0
                    assert stub.woken.adopted_blocks >= known, stub.woken
                    stream = await serve_until(stub, gateway, asked, before.tokens, TURN_TOKENS)
                probed = serving.probe(stub.serving_path, stub.serving_file, turn)
                assert probed is WitnessState.FREE
                groups = [*before.groups, *stream.groups[1 if seen else 0 :]]
                before = Stream(groups, (), is_whole=False)
            async with behind_gateway(tmp_path, stub, TURNS + 1):
                await rest(stub, keep_kv=False)
            async with behind_gateway(tmp_path, stub, TURNS + 1) as (gateway, _):
                assert (stub.woken.adopted_blocks, stub.woken.kv_note[-15:]) == (
                    0,
                    "the pool is new",
                )
                async with gateway.post(PATH, data=asked) as response:
                    whole = read_stream(await response.read())
            assert joined(before, Stream([], (), is_whole=False)) == joined(
                Stream([], (), is_whole=False), whole.beginning(TURNS * TURN_TOKENS)
            )
            with listening()[0] as sock:
                late = await stubs[1 - TURNS % 2].ask(WakeMsg(TURNS - 1, "late"), lend(sock))
            assert is_fault(late, "serving.over"), late

    asyncio.run(main())
