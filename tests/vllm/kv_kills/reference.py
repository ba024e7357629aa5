"""The reference backend's model in one process, for `kv_kills`: loaded, with no KV memory yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.backends.kv_range import KvRange
from engine.backends.memory_session import KeptPools
from engine.backends.process_memory import read_room
from engine.backends.reference.checkpoint import open_checkpoint
from engine.backends.reference.decoder import Decoder, KVCache, weights_from
from engine.backends.reference.generation import Generator, SamplingParams, TokenRequest
from engine.backends.reference.kv_blocks import (
    BLOCK_TOKENS,
    BlockStore,
    KvSize,
    PrefixCache,
    headers_of,
)
from engine.backends.reference.ranks import Peers
from engine.kv.layout import index_bytes
from engine.messages import Counts
from gms.client import BEGUN, KvClaim, borrow_pool
from gms.messages import NO_ERA
from tests.engine.reference.support import load

DEVICE = "HOST-0"
DEADLINE_S = 30.0
SLOTS, CONTEXT, BLOCKS = 4, 256, 96
ANSWER_TOKENS = 40


class ParkedReference:
    """See `load`."""

    def __init__(self, model: str, directory: str, engine: str) -> None:
        self._directory, self._engine = directory, engine
        checkpoint = open_checkpoint(model)
        config, memory = checkpoint.config, load(checkpoint)
        self._config, self._leader = config, Peers()
        self._decoder = Decoder(config, weights_from(config, memory.__getitem__), self._leader)
        slots_bytes = KVCache.bytes_needed(config, SLOTS, CONTEXT)
        kv_bytes = slots_bytes + KVCache.bytes_needed(config, BLOCKS, BLOCK_TOKENS)
        self._size = KvSize(CONTEXT, BLOCKS, slots_bytes, kv_bytes)
        self._kept: KeptPools | None = None
        self._generator: Generator | None = None

    def wake(self, token: int) -> Mapping[str, Any]:
        config, size = self._config, self._size
        if not token:
            cache = KVCache(config, bytearray(size.slots_bytes), SLOTS, CONTEXT)
            self._generator = Generator(self._decoder, cache)
            return {}
        claim = KvClaim(
            self._engine, f"i-{token}", token, NO_ERA, size.kv_bytes, index_bytes(BLOCKS)
        )
        lease = borrow_pool(self._directory, DEVICE, claim, DEADLINE_S)
        self._kv = KvRange(DEVICE, size.kv_bytes, read_room)
        self._kv.borrow(lease.slabs, is_new=lease.is_fresh)
        lease.mark(BEGUN)
        view = self._kv.view()
        cache = KVCache(config, view, SLOTS, CONTEXT)
        blocks = view[size.slots_bytes :]
        store = BlockStore(config, blocks, BLOCKS, cache, self._leader)
        headers = headers_of(config, size, [("", "", "")])
        kept = self._kept = KeptPools([lease], headers, may_adopt=True, counts=Counts())
        prefixes = PrefixCache(store, BLOCKS, kept.writer, kept.adopted)
        self._generator = Generator(self._decoder, cache, prefixes)
        kept.trust()
        return {"adopted": len(kept.adopted), "why_empty": kept.why_empty}

    def ask(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        generator = self._generator
        assert generator is not None
        made: list[list[int]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0)
            generator.submit(TokenRequest(number, tuple(prompt), ANSWER_TOKENS, sampling))
        while generator.has_work:
            produced = generator.step()
            if self._kept is not None:
                self._kept.writer.stepped()
            if produced is not None:
                made[produced.request].append(produced.token)
        return made

    def is_clear(self, prompt: list[int]) -> bool:
        return True
