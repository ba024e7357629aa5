"""Chats of several turns through two fronts, and how much of them their pods have computed before.

    python -m tests.gateway.server.fleet_chats

Four pods with a prefix cache each, beside one pod with a cache as large as all of these; nothing is
computed. Chats take turns in random order, some at the same time, and each turn goes to any front.
Half of them begin with one of a few system prompts. What a pod has of a prompt is counted in
blocks, of which the least recently used are forgotten. `share`: what is cached of all prompts with
four pods, of what is with one; `room`: for the open chats. Exit code 1: it is below 0.9.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from tests.figures import Figures, document, report
from tests.gateway.server.fleet_bench import fleet
from tests.gateway.server.harness import CHAT, Client
from tests.gateway.stub_engine import StubReply, StubRequest

PODS, FRONTS = 4, 2
OPEN, AT_ONCE, TURNS = 40, 16, 8
ANSWER_S = 0.3
CHATS = 160
BLOCK_BYTES = 64
SYSTEM_BYTES, SAID_BYTES, TOKENS = 2048, 300, 12
SYSTEMS = 4
# Blocks of the open chats, half of whose turns are over on average, and of the system prompts.
NEED = (OPEN * TURNS * (SAID_BYTES + 8 * TOKENS) // 2 + SYSTEMS * SYSTEM_BYTES) // BLOCK_BYTES
ROOM = (2.0, 3.0, 4.0)  # of that, in all caches
SHARE_MIN = 0.9


class PrefixCache:
    """Of a pod's engine, which answers `route`."""

    def __init__(self, blocks: int) -> None:
        self.cached = self.asked = 0
        self._blocks = blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def route(self, request: StubRequest, reply: StubReply) -> None:
        text = json.dumps(request.json()["messages"]).encode()
        self._take(text[: len(text) - len(text) % BLOCK_BYTES])
        await asyncio.sleep(ANSWER_S)  # some times as long as from report to report
        await reply.engine.stream(request, reply)

    def _take(self, text: bytes) -> None:
        digest, is_known = b"", True
        for start in range(0, len(text), BLOCK_BYTES):
            digest = blake2b(digest + text[start : start + BLOCK_BYTES], digest_size=16).digest()
            is_known = is_known and digest in self._known
            self.cached += is_known
            self.asked += 1
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > self._blocks:
            self._known.popitem(last=False)


class Chats:
    """The same for every fleet: `OPEN` at a time, as long as there are some."""

    def __init__(self, count: int) -> None:
        self._rng = random.Random(1)
        systems = [self._words(SYSTEM_BYTES) for _ in range(SYSTEMS)]
        heads = [[{"role": "system", "content": each}] for each in systems]
        choice = self._rng.choice
        self._new = [list(choice(heads)) if each % 2 else [] for each in range(count)]
        self._open = [(self._new.pop(), TURNS) for _ in range(min(OPEN, count))]

    def _words(self, size: int) -> str:
        return "".join(self._rng.choices("abcdefgh ", k=size))

    async def go_on(self, ports: list[int]) -> None:
        """Turns of one chat after the other, until none is left."""
        while self._open:
            messages, left = self._open.pop(self._rng.randrange(len(self._open)))
            messages.append({"role": "user", "content": self._words(SAID_BYTES)})
            port = self._rng.choice(ports)
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            body = {"model": "stub", "stream": True, "max_tokens": TOKENS, "messages": messages}
            client.ask(CHAT, body)
            answer = await client.answer()
            client.close()
            assert answer.is_whole
            messages.append({"role": "assistant", "content": answer.text()})
            if left > 1:
                self._open.append((messages, left - 1))
            elif self._new:
                self._open.append((self._new.pop(), TURNS))


async def cached(base: Path, pods: int, blocks: int, count: int) -> tuple[int, int]:
    """How many blocks of all prompts were cached, and how many there were."""
    caches = [PrefixCache(blocks // pods) for _ in range(pods)]
    base.mkdir()
    async with fleet(base) as bench:
        for each in caches:
            await bench.pod(routes={CHAT: each.route})
        ports = []
        for _ in range(FRONTS):
            await bench.front()
            ports.append(bench.port)
        chats = Chats(count)
        await asyncio.gather(*(chats.go_on(ports) for _ in range(AT_ONCE)))
    return sum(each.cached for each in caches), sum(each.asked for each in caches)


async def compared(base: Path, room: float, count: int = CHATS) -> Figures:
    """Four pods beside one, whose caches have room for so much of the open chats."""
    blocks = int(NEED * room)
    ours, asked = await cached(base / f"{room:g}-{PODS}", PODS, blocks, count)
    theirs, same = await cached(base / f"{room:g}-1", 1, blocks, count)
    parts = {"cached": round(ours / asked, 3), "cached_by_one_pod": round(theirs / same, 3)}
    share = ours / asked / (theirs / same)
    return {"room": room, "blocks": asked, **parts, "share": round(share, 3)}


async def measure(base: Path) -> Figures:
    found = [await compared(base, room) for room in ROOM]
    low = [f"{each['share']} at {each['room']}" for each in found if each["share"] < SHARE_MIN]
    about = {"pods": PODS, "fronts": FRONTS, "chats": CHATS, "open": OPEN, "turns": TURNS}
    return document({**about, "rooms": found}, low)


if __name__ == "__main__":
    report(measure)
