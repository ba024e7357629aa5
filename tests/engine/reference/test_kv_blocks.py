"""KV memory: an agreed size, blocks that are copied instead of computed, adoption of an index."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from engine.backends.memory_session import KeptPools
from engine.backends.reference.decoder import Decoder, KVCache
from engine.backends.reference.generation import Generator, SamplingParams, TokenRequest
from engine.backends.reference.kv_blocks import (
    BLOCK_TOKENS,
    BlockStore,
    KvSize,
    PrefixCache,
    headers_of,
)
from engine.backends.reference.ranks import Peers
from engine.kv.adopter import adoptable
from engine.kv.layout import IndexPage, IndexRecord, index_bytes
from engine.kv.writer import IndexWriter
from engine.messages import Counts
from gms.client import ADOPTED, ADOPTING, KvClaim
from plumbing.wire.fds import OwnedFd
from tests.engine.kv.indexes import HEADER, block_hash
from tests.engine.reference.support import (
    Spy,
    cache_for,
    decoder_of,
    golden,
    prompt,
    run,
    tokens_of,
)

BLOCKS, CONTEXT, SLOTS = 32, 160, 3
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7)
FACTS = structs.replace(HEADER, blocks=BLOCKS, block_tokens=BLOCK_TOKENS)


@pytest.fixture(scope="module", name="decoder")
def decoder_fixture() -> Decoder:
    return decoder_of(golden("untied-gqa-bf16"))


class Pool:
    """Slots, blocks and their index, which outlive generators."""

    def __init__(self, decoder: Decoder, blocks: int = BLOCKS) -> None:
        self.decoder, self.blocks = decoder, blocks
        size_bytes = KVCache.bytes_needed(decoder.config, blocks, BLOCK_TOKENS)
        self.memory = bytearray(b"\xff" * size_bytes)
        self.index = bytearray(index_bytes(blocks))
        self.facts = structs.replace(FACTS, blocks=blocks)
        self.slots = bytearray(b"\xff" * KVCache.bytes_needed(decoder.config, SLOTS, CONTEXT))

    def records(self, name: str = "next") -> tuple[IndexRecord, ...]:
        return adoptable([IndexPage(memoryview(self.index))], [self.facts], name).records

    def store(self, cache: KVCache) -> BlockStore:
        return BlockStore(self.decoder.config, self.memory, self.blocks, cache, Peers())

    def generator(self, decoder: Decoder, name: str = "e") -> tuple[Generator, PrefixCache]:
        page = IndexPage(memoryview(self.index))
        adoption = adoptable([page], [self.facts], name)
        writer = IndexWriter([page], [self.facts], name, f"of {name}", adoption)
        cache = KVCache(decoder.config, self.slots, SLOTS, CONTEXT)
        store = self.store(cache)
        prefixes = PrefixCache(store, self.blocks, writer, adoption.records)
        return Generator(decoder, cache, prefixes=prefixes), prefixes


def fresh(decoder: Decoder) -> Generator:
    return Generator(decoder, cache_for(decoder, SLOTS, CONTEXT))


@pytest.mark.parametrize("seed", range(4))
def test_logits_are_the_same_bits_with_the_cache_and_without(decoder: Decoder, seed: int):
    """Method: requests with common prefixes, resumed ones among them, through few blocks, so that
    these are evicted all the time; every logit is compared with that of a generator without."""
    source = random.Random(seed)
    generator, prefixes = Pool(decoder, blocks=20).generator(spy := Spy(decoder))
    for number in range(12):
        base = prompt(source.choice((20, 40, 64, 97)), source.randrange(2))
        request = TokenRequest(number, base, 24, SEEDED)
        plain = run(fresh(alone := Spy(decoder)), [request])[number]
        made = tuple(tokens_of(plain))[: source.choice((0, 0, 5, 20))]
        spy.seen.clear()
        resumed = run(generator, [structs.replace(request, made=made)])[number]
        assert tokens_of(resumed) == tokens_of(plain)[len(made) :]
        assert set(spy.seen) <= set(alone.seen)
    assert prefixes.reused > 0


def test_answer_is_not_taken_for_the_same_tokens_in_a_prompt(decoder: Decoder):
    """They were run one by one, and the last bits differ."""
    generator, prefixes = Pool(decoder).generator(decoder)
    base = prompt(32)
    answer = tokens_of(run(generator, [TokenRequest(1, base, 70, SEEDED)])[1])
    longer = TokenRequest(2, (*base, *answer[:68]), 4, SEEDED)
    assert tokens_of(run(generator, [longer])[2]) == tokens_of(run(fresh(decoder), [longer])[2])
    assert prefixes.reused == 32


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_the_same_whenever_engines_die(decoder: Decoder, seed: int):
    """Method: generators over one pool, each
    dropped at any moment; requests come between, and what is unfinished is resumed with a journal
    that lacks up to three tokens. Every answer is compared with one that was never cut."""
    source = random.Random(seed)
    pool, reused = Pool(decoder, blocks=24), 0
    made: dict[TokenRequest, list[int]] = {}
    for life in range(40):
        for number in range(3 * life, 3 * life + source.randrange(1, 4)):
            length = source.choice((3, 20, 40, 64))
            made.setdefault(TokenRequest(number, prompt(length, number), 30, SEEDED), [])
        generator, prefixes = pool.generator(decoder, f"engine {life}")
        for request in source.sample(sorted(made, key=hash), len(made)):
            made[request] = made[request][: -source.randrange(4) or None]
            generator.submit(structs.replace(request, made=tuple(made[request])))
        by_number = {request.number: request for request in made}
        for _ in range(source.randrange(100)):
            produced = generator.step()
            if produced is None:
                continue
            request = by_number[produced.request]
            made[request].append(produced.token)
            if produced.finish_reason is not None:
                assert made.pop(request) == tokens_of(
                    run(fresh(decoder), [request])[request.number]
                )
        reused += prefixes.reused
    assert reused > 0


def test_last_block_of_a_sequence_is_evicted_first(decoder: Decoder):
    """Else the rest of it, which is useless alone, would stay."""
    generator, prefixes = Pool(decoder, blocks=16).generator(decoder)
    long, short = prompt(97, 1), prompt(65, 2)
    run(generator, [TokenRequest(1, long, 1, SEEDED)])
    run(generator, [TokenRequest(2, short, 1, SEEDED)])  # eight blocks, of which four were free
    run(generator, [TokenRequest(3, long, 1, SEEDED)])
    assert prefixes.reused == 64


POOL_BLOCKS, RANKS = 4, 2
SIZE = KvSize(64, POOL_BLOCKS, 1, 2)
WEIGHTS = (("epoch 0", "identity 0"), ("epoch 1", "identity 1"))


class PlainLease:
    """A pool whose index is in this process."""

    def __init__(self, rank: int) -> None:
        self.pool = f"pool {rank}"
        self.index_bytes = index_bytes(POOL_BLOCKS)
        self.index = OwnedFd(os.memfd_create("index"))
        os.ftruncate(self.index.fileno(), self.index_bytes)
        self.claim = KvClaim("engine", "engine-1", 1, "e" * 16, 2, self.index_bytes)
        self.marks: list[str] = []

    def mark(self, mark: str) -> None:
        self.marks.append(mark)

    def discard(self, why: str) -> None:
        self.marks.append(why)


def engine(leases: list[Any], number: int, weights: Any = WEIGHTS) -> KeptPools:
    """The index of the engine `number`."""
    for lease in leases:
        lease.claim = structs.replace(lease.claim, incarnation=f"engine-{number}")
        lease.marks.clear()
    config = decoder_of(golden("untied-gqa-bf16")).config
    ranks = [(lease.pool, *each) for lease, each in zip(leases, weights, strict=True)]
    return KeptPools(leases, headers_of(config, SIZE, ranks), may_adopt=True, counts=Counts())


@pytest.fixture(name="leases")
def leases_fixture() -> Iterator[list[PlainLease]]:
    """With a block that engine-1 has published."""
    leases = [PlainLease(rank) for rank in range(RANKS)]
    first = engine(leases, 1)
    assert (first.adopted, first.why_empty) == ((), "rank 0: the pool is new")
    first.writer.publish(2, first.writer.use(2), block_hash(2), 0, 8)
    yield leases
    for lease in leases:
        lease.index.close()


def test_next_engine_adopts_and_reports_it_to_every_pool(leases: list[PlainLease]):
    kept = engine(leases, 2)
    assert [record.block for record in kept.adopted] == [2]
    kept.trust()
    assert [lease.marks for lease in leases] == [[ADOPTING, ADOPTED]] * RANKS
    kept.distrust("a canary failed")
    assert engine(leases, 3).why_empty == "no block is published"


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("fact", range(2))
def test_other_weights_on_any_rank_mean_empty(leases: list[PlainLease], rank: int, fact: int):
    weights = [list(each) for each in WEIGHTS]
    weights[rank][fact] = "other"
    assert engine(leases, 2, weights).why_empty.startswith(f"rank {rank}: the ")
    assert [lease.marks for lease in leases] == [[]] * RANKS
