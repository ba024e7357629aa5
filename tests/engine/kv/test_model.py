"""Goal: an adopted block's bytes are those of its hash, whenever its engine died, and no proven
block is lost. Method: random histories of `world`, and the same with one rule left out, which must
be caught."""

from __future__ import annotations

import contextlib
import itertools
from random import Random

import pytest

from engine.kv.writer import IndexWriter
from tests.engine.kv.indexes import HEADER, adopted_from, memory
from tests.engine.kv.world import (
    HASHES,
    NUMBERS,
    DyingPage,
    Fuse,
    Killed,
    LostBlocksError,
    Mutation,
    World,
    WrongBytesError,
)

SCHEDULES = 10_000


def failure_of(seed: int, mutation: Mutation) -> type[AssertionError] | None:
    try:
        World(seed, mutation).run()
    except (LostBlocksError, WrongBytesError) as error:
        return type(error)
    return None


def test_ten_thousand_histories_adopt_only_what_is_true():
    adopted = 0
    for seed in range(SCHEDULES):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        adopted += world.adopted
    assert adopted > SCHEDULES  # else nothing was tried


@pytest.mark.parametrize("mutation", [each for each in Mutation if each is not Mutation.NONE])
def test_each_rule_that_is_left_out_is_caught(mutation):
    expected = LostBlocksError if mutation is Mutation.KEEP_OPEN else WrongBytesError
    assert any(failure_of(seed, mutation) is expected for seed in range(SCHEDULES))


def write(content: bytearray, fuse: Fuse, possible: list[dict[int, int]]) -> None:
    """A writer with a use for every kind of store; `possible`: the truths during each call."""
    writer = IndexWriter([DyingPage(content, fuse)], [HEADER], "engine-1", "c1")
    truth: dict[int, int] = {}
    for block, number in ((0, 0), (1, 1), (0, 2), (2, 3), (2, 4)):
        before, without = truth, {key: truth[key] for key in truth if key != block}
        if block != 2:  # else its record is replaced as it is
            possible[:] = before, without
            writer.invalidate(block)
            before = without
        truth = {**without, block: number}
        possible[:] = before, without, truth
        writer.publish(block, writer.use(block), HASHES[number], 0, 16)
        if number == 2:
            possible[:] = truth, {}
            writer.clear()
            truth = {}


def test_death_at_each_store_leaves_what_was_true_before_or_after():
    """Goal: no half-written record, header or clear is believed. Method: the same writer killed at
    each of its stores, ten times where a store can be cut anywhere; over fresh memory, and over the
    index of another engine."""
    used = memory()
    write(used, Fuse(), [])
    before = {each.block: NUMBERS[each.block_hash] for each in adopted_from(used).records}
    for start, seed in itertools.product((memory(), used), range(10)):
        for stores in itertools.count():
            content, possible = bytearray(start), [before if start is used else {}, {}]
            fuse = Fuse(stores, Random(seed))
            with contextlib.suppress(Killed):
                write(content, fuse, possible)
            found = {each.block: NUMBERS[each.block_hash] for each in adopted_from(content).records}
            assert found in possible, (stores, seed)
            if fuse.stores >= 0:
                break
        assert stores > 20
