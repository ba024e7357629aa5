"""Tensor parallel: what each rank reads, and that ranks together answer as one process does."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from engine.backends.reference.checkpoint import identity, open_checkpoint
from engine.backends.reference.config import read_config
from engine.backends.reference.decoder import Decoder, KVCache, weights_from
from engine.backends.reference.generation import Generator, TokenRequest, canary
from engine.backends.reference.kv_blocks import BLOCK_TOKENS, BlockStore, PrefixCache
from engine.backends.reference.random_model import write_random_model
from engine.backends.reference.ranks import Array, Peers, Pipe
from engine.backends.shards import same_on_every_rank
from plumbing.errors import UnderstudyError, UsageError
from tests.engine.reference.support import (
    GREEDY,
    cache_for,
    decoder_of,
    golden,
    load,
    run,
    tokens_of,
)

# Those with an even number of key heads; tied and not, in one file and in three.
CUT = [name for name in sorted(os.listdir(golden(""))) if read_config(golden(name)).kv_heads > 1]
BLOCKS = 24


def rank_of(directory: str, peers: Peers, rank: int, ranks: int) -> Decoder:
    checkpoint = open_checkpoint(directory, rank, ranks)
    memory = load(checkpoint)
    weights = weights_from(checkpoint.config, memory.__getitem__)
    return Decoder(checkpoint.config, weights, peers)


def follow(decoder: Decoder, leader: Pipe, cache: KVCache) -> None:
    blocks = blocks_for(decoder, cache)
    while True:
        try:
            method, arguments = leader.receive()
        except UnderstudyError:
            return
        if method == "forward":
            decoder.forward(cache, *arguments[1:])
        else:
            leader.send(blocks.run(*arguments))


def blocks_for(decoder: Decoder, cache: KVCache) -> BlockStore:
    size_bytes = KVCache.bytes_needed(decoder.config, BLOCKS, BLOCK_TOKENS)
    return BlockStore(decoder.config, bytearray(size_bytes), BLOCKS, cache, decoder._peers)


@contextlib.contextmanager
def parallel(directory: str, ranks: int) -> Iterator[Decoder]:
    """Rank 0's decoder; the others follow it, each on a thread of its own."""
    pairs = [socket.socketpair() for _ in range(1, ranks)]
    pipes = [Pipe(ours, f"rank {rank}") for rank, (ours, _) in enumerate(pairs, 1)]
    leader = rank_of(directory, Peers(pipes), 0, ranks)
    threads = []
    for rank, (_, theirs) in enumerate(pairs, 1):
        pipe = Pipe(theirs, "rank 0")
        pipes.append(pipe)
        decoder = rank_of(directory, Peers([pipe], rank=rank), rank, ranks)
        arguments = (decoder, pipe, cache_for(decoder))
        threads.append(threading.Thread(target=follow, args=arguments))
    for thread in threads:
        thread.start()
    try:
        yield leader
    finally:
        for ours, _ in pairs:
            ours.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(30)
        for pipe in pipes:
            pipe.close()


def logits_of(decoder: Decoder, prompt: Sequence[int]) -> Array:
    return decoder.forward(cache_for(decoder), 0, prompt, 0)


@pytest.mark.parametrize("name", CUT)
def test_two_ranks_give_the_logits_and_tokens_of_one(name: str):
    """Goal: cutting the model changes nothing but the last bits. Method: golden checkpoints, each
    case on two ranks and on one: logits closely, greedy tokens exactly."""
    with open(os.path.join(golden(name), "golden.json"), encoding="utf-8") as file:
        cases = json.load(file)["cases"]
    plain = decoder_of(golden(name))
    with parallel(golden(name), 2) as cut:
        generator = Generator(cut, cache_for(cut))
        for number, case in enumerate(cases):
            np.testing.assert_allclose(
                logits_of(cut, case["prompt"]), logits_of(plain, case["prompt"]), atol=2e-4
            )
            request = TokenRequest(number, tuple(case["prompt"]), len(case["tokens"]), GREEDY)
            assert tokens_of(run(generator, [request])[number]) == case["tokens"]


def test_every_rank_has_its_part_of_a_block():
    """Goal: what one rank copies all do. Method: two ranks, a prompt repeated with the cache and
    without."""
    prompt = tuple(range(3, 75))
    first, again = TokenRequest(1, prompt, 30, GREEDY), TokenRequest(2, prompt, 30, GREEDY)
    with parallel(golden(CUT[0]), 2) as cut:
        expected = tokens_of(run(Generator(cut, cache_for(cut)), [first])[1])
    with parallel(golden(CUT[0]), 2) as cut:
        cache = cache_for(cut)
        store = blocks_for(cut, cache)
        prefixes = PrefixCache(store, BLOCKS)
        generator = Generator(cut, cache, prefixes=prefixes)
        assert tokens_of(run(generator, [first])[1]) == expected
        assert tokens_of(run(generator, [again])[2]) == expected
        assert prefixes.reused == 64


def test_four_ranks_give_the_same_bits_every_time(tmp_path):
    """Goal: same prompt, same tokens from any engine. Method: two sets of four ranks, whose sums
    are made in any order of arrival, and one process beside them."""
    directory = str(tmp_path / "model")
    write_random_model(directory, heads=8, kv_heads=4, layers=3)
    prompt = list(range(40, 75))
    with parallel(directory, 4) as one, parallel(directory, 4) as other:
        first = logits_of(one, prompt)
        assert np.array_equal(first, logits_of(other, prompt))
        assert np.array_equal(first, logits_of(one, prompt))
        assert canary(one, cache_for(one)) == canary(other, cache_for(other))
    np.testing.assert_allclose(first, logits_of(decoder_of(directory), prompt), atol=2e-3)


@pytest.mark.parametrize("ranks", [3, 8])
def test_ranks_that_do_not_divide_the_model_are_refused(ranks: int):
    """Goal: the error lists the valid numbers. Method: numbers that divide no count of heads."""
    with pytest.raises(
        UsageError, match=f"parallel {ranks} must divide .* choose one of"
    ) as caught:
        open_checkpoint(golden(CUT[0]), 0, ranks)
    assert caught.value.code == "engine.bad_tensor_parallel"


def test_rank_that_ends_ends_the_work():
    """Goal: no rank waits for a dead one. Method: a peer whose socket is closed."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(Pipe(ours, "rank 1")) as pipe:
        leader = rank_of(golden(CUT[0]), Peers([pipe]), 0, 2)
        theirs.close()
        for work in (lambda: logits_of(leader, [1, 2, 3]), pipe.receive):
            with pytest.raises(UnderstudyError, match="rank 1 has ended") as caught:
                work()
            assert caught.value.code == "engine.rank_lost"


def test_identity_differs_by_rank_and_in_nothing_else():
    """Goal: each device has its own epoch, the engine compares the rest. Method: two ranks."""
    first, second = (identity(golden(CUT[0]), rank=rank, size=2) for rank in range(2))
    assert first != second
    assert same_on_every_rank(first) == same_on_every_rank(second)
    assert same_on_every_rank(first) != same_on_every_rank(identity(golden(CUT[0])))
