"""Goal: what the memory service has said is joined by device, and nothing unknown looks free.

Method: stand-ins for its servers on the real sockets, and the events that the core would get.
"""

from __future__ import annotations

import asyncio

from gms.client import messages as weights_messages
from gms.client import offload_device
from plumbing.pod.paths import KV, WEIGHTS
from pool.core.events import AskMemory, MemoryIs
from pool.core.states import EntryKind
from pool.server.memory import GRAIN_BYTES, MemorySide
from tests.helpers import auntil
from tests.pool.neighbours import DEVICE, MIB, StandInPlace

BASE = 3 * MIB
COPY = "copy"


class Scene:
    """The servers of two models on one device, and the side that watches them."""

    def __init__(self, directory, *, copies=False):
        directory.chmod(0o700)
        self.events = []
        self.places, self.servers = [], {}
        for model in ("chat", "coder"):
            device = f"{DEVICE}.{model}"
            names = [device, offload_device(device)][: 1 + copies]
            places = [StandInPlace(str(directory), name, 100 * MIB) for name in names]
            self.places += [(model, place) for place in places]
            self.servers |= {(model, WEIGHTS): places[0].weights, (model, KV): places[0].kv}
            self.servers[model, COPY] = places[-1].weights
        host_bytes = 100 * MIB if copies else 0
        models = {"chat": (DEVICE,), "coder": (DEVICE,)}
        self.side = MemorySide(
            str(directory), models, host_bytes, self.events.append, lambda _: BASE
        )

    async def __aenter__(self):
        self._tasks = self.side.start()
        return self

    async def __aexit__(self, *_):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, place in self.places:
            await place.server.close()

    async def serve(self, *models):
        for model, place in self.places:
            if model in models:
                await place.server.start()

    def ask(self, model, number, *kinds, frees_weights=False):
        self.side.ask(AskMemory(model, number, frozenset(kinds), frees_weights))

    def last(self, kind):
        return next((each for each in reversed(self.events) if type(each) is kind), None)

    async def until(self, kind, check, what):
        def is_so():
            found = self.last(kind)
            return found is not None and check(found)

        await auntil(is_so, what)


async def test_device_is_unknown_until_all_of_its_servers_are_heard(tmp_path):
    """Goal: memory of a model whose server is away is not taken for free. Method: the servers of
    one model first, then those of the other."""
    async with Scene(tmp_path) as seen:
        await seen.serve("chat")
        seen.servers["chat", WEIGHTS].set(10 * MIB, is_mapped=True)
        chats = list(seen.side.links("chat"))
        await auntil(lambda: all(each.held is not None for each in chats), "chat's word")
        assert seen.events == []
        seen.servers["coder", KV].set(20 * MIB, is_mapped=True)
        await seen.serve("coder")
        held = {(EntryKind.WEIGHTS, "chat"): 10 * MIB, (EntryKind.KV, "coder"): 20 * MIB}
        whole = MemoryIs(DEVICE, 100 * MIB, held)
        await seen.until(MemoryIs, lambda found: found == whole, "both models' memory")


async def test_question_is_answered_by_a_look_after_it(tmp_path):
    """Goal: a word from before the question proves nothing. Method: the number comes back once the
    model's memory of that kind has been looked at again, and only for that one."""
    async with Scene(tmp_path) as seen:
        await seen.serve("chat", "coder")
        await seen.until(MemoryIs, lambda found: True, "the first word")
        assert seen.last(MemoryIs).asked == {}
        seen.ask("chat", 7, EntryKind.WEIGHTS)
        answer = {"chat": 7}
        await seen.until(MemoryIs, lambda found: found.asked == answer, "the answer")


async def test_memory_is_freed_once_nobody_maps_it_and_not_if_it_is_needed_again(tmp_path):
    """Goal: to free is a standing permission. Method: one that waits for a reader, and one that is
    withdrawn before the reader leaves."""
    async with Scene(tmp_path) as seen:
        await seen.serve("chat", "coder")
        chat, coder = seen.servers["chat", KV], seen.servers["coder", KV]
        for each in (chat, coder):
            each.set(20 * MIB, is_mapped=True)
        await seen.until(MemoryIs, lambda found: len(found.held) == 2, "both in use")
        seen.ask("chat", 1, EntryKind.KV)
        seen.ask("coder", 2, EntryKind.KV)
        seen.side.keep("coder", and_kv=True)
        for each in (chat, coder):
            each.set(20 * MIB, is_mapped=False)
        only = {(EntryKind.KV, "coder"): 20 * MIB}
        await seen.until(MemoryIs, lambda found: found.held == only, "chat's to be free")
        assert (chat.drops, coder.drops) == (1, 0)


async def test_copy_that_only_its_keeper_maps_is_dropped_with_the_weights(tmp_path):
    """Goal: an unloaded model gives its copy back. Method: a copy that an engine reads, too; once
    that has left, the keeper's session is the only one, and never ends by itself."""
    async with Scene(tmp_path, copies=True) as seen:
        await seen.serve("chat", "coder")
        copy = seen.servers["chat", COPY]
        keeper = {"engine": weights_messages.COPIER, "mode": "ro"}
        copy.sessions = [keeper, {"engine": "chat-0", "mode": "ro"}]
        copy.set(10 * MIB, is_mapped=True)
        held = {(EntryKind.COPY, "chat"): 10 * MIB}
        await seen.until(MemoryIs, lambda found: found.held == held, "the copy")
        seen.ask("chat", 1, EntryKind.COPY, frees_weights=True)
        answer = {"chat": 1}
        await seen.until(MemoryIs, lambda found: found.asked == answer, "an answer")
        assert copy.drops == 0
        copy.sessions = [keeper]
        copy.set(10 * MIB, is_mapped=True)
        await auntil(lambda: copy.drops == 1, "the copy to be dropped")


async def test_what_stands_for_offloaded_weights_is_forgotten_with_their_copy(tmp_path):
    """Goal: the next load does not wait for a copy that is gone. Method: weights that are offloaded
    take no memory, and are dropped all the same; but not where they may be needed."""
    async with Scene(tmp_path) as seen:
        chat, coder = seen.servers["chat", WEIGHTS], seen.servers["coder", WEIGHTS]
        chat.state = coder.state = "offloaded"
        await seen.serve("chat", "coder")
        seen.ask("chat", 1, EntryKind.KV, frees_weights=True)
        await auntil(lambda: chat.drops == 1, "chat's to be forgotten")
        seen.ask("coder", 1, EntryKind.KV)
        await seen.until(MemoryIs, lambda found: "coder" in found.asked, "an answer")
        assert coder.drops == 0


async def test_outside_is_what_nobody_of_the_pool_has(tmp_path):
    """Goal: a stranger's memory is seen, that of engines is not taken for a stranger's."""
    async with Scene(tmp_path) as seen:
        for model in ("chat", "coder"):
            seen.servers[model, WEIGHTS].used_bytes = 10 * MIB + BASE + 2 * GRAIN_BYTES + 1
        seen.servers["chat", WEIGHTS].set(10 * MIB, is_mapped=True)
        await seen.serve("chat", "coder")
        await seen.until(
            MemoryIs, lambda found: found.outside_bytes == 2 * GRAIN_BYTES, "the stranger"
        )
