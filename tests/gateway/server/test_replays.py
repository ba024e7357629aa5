"""Goal: a replay keeps nobody waiting, however long it is. Method: real sockets and stub engines;
what the loop does in one turn is counted."""

import asyncio
import json

import pytest

from gateway.core.client_request import Attempt
from gateway.server import upstream
from gateway.server import upstream as upstream_owner
from tests.gateway.server.harness import CHAT, scene
from tests.gateway.stub_engine import text_of

TOKENS = 1500
STREAMS = 4
ASKED = {"messages": [], "stream": True, "max_tokens": TOKENS}
WANTED = text_of(json.dumps(ASKED).encode(), TOKENS)
SLICE_BYTES = 2048  # of groups with more than 100 each


@pytest.fixture
def groups_a_turn(monkeypatch):
    """How many groups of replays each turn of the loop has read."""
    monkeypatch.setattr(upstream, "SLICE_BYTES", SLICE_BYTES)
    monkeypatch.setattr(upstream_owner, "TURN_S", 0.0)  # one slice
    counts = [0]
    group = Attempt.group

    def counted(self, *what):
        counts[-1] += self.is_replaying
        return group(self, *what)

    monkeypatch.setattr(Attempt, "group", counted)
    return counts


async def count_turns(counts):
    while True:
        await asyncio.sleep(0)
        counts.append(0)


@pytest.mark.parametrize("chunk_tokens", [1, 40])
@pytest.mark.parametrize("keeps_alive", [False, True])
@scene()
async def test_long_replays_are_read_in_slices_and_in_turns(
    bench, groups_a_turn, chunk_tokens, keeps_alive
):
    dying = await bench.active(cut_after_groups=TOKENS - 100)
    clients = [await bench.client() for _ in range(STREAMS)]
    for client in clients:
        client.ask(CHAT, ASKED)
    answers = [asyncio.ensure_future(client.answer()) for client in clients]
    await dying.died.wait()
    turns = asyncio.ensure_future(count_turns(groups_a_turn))
    successor = await bench.engine(
        "engine-1", 2, chunk_tokens=chunk_tokens, keeps_alive=keeps_alive
    )
    await bench.grant(successor)
    for answer in await asyncio.gather(*answers):
        assert answer.is_whole
        assert answer.text() == WANTED
    turns.cancel()
    accepted = successor.accepted
    assert (await bench.once(CHAT, ASKED)).text() == WANTED
    assert successor.accepted == accepted + (not keeps_alive)
    assert sum(groups_a_turn) > STREAMS * (TOKENS - 100) // chunk_tokens // 2
    assert max(groups_a_turn) <= SLICE_BYTES // 100 + 1
