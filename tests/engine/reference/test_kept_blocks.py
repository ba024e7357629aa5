"""Goal: rank 0 adopts what an earlier engine has published about the pools of all ranks, or begins
empty and says why. Method: leases in plain memory, engines one after another."""

from __future__ import annotations

from typing import cast

import pytest
from msgspec import structs

from engine.backends.reference.kv_blocks import (
    KeptBlocks,
    KvSize,
    header_of,
    headers_of,
)
from engine.backends.reference.link import TakeMemoryMsg
from engine.kv.layout import IndexPage, index_bytes
from engine.kv.writer import PROOF_STEPS
from gms.client import ADOPTED, ADOPTING, KvClaim, KvLease
from tests.engine.kv.indexes import block_hash
from tests.engine.reference.support import decoder_of, golden

BLOCKS, RANKS, CHECKSUM = 4, 2, 77
SIZE = KvSize(64, BLOCKS, 1, 2)
TAKE = TakeMemoryMsg(1, "e" * 16, ("epoch 0", "epoch 1"), ("identity 0", "identity 1"))


class PlainLease:
    """A pool whose index is in this process."""

    def __init__(self, rank: int) -> None:
        self.pool = f"pool {rank}"
        self.index = bytearray(index_bytes(BLOCKS))
        self.claim = KvClaim("engine", "engine-1", 1, "e" * 16, 2, index_bytes(BLOCKS))
        self.marks: list[str] = []

    def mark(self, mark: str) -> None:
        self.marks.append(mark)

    def discard(self, why: str) -> None:
        self.marks.append(why)


class Pools:
    def __init__(self) -> None:
        self.leases = [PlainLease(rank) for rank in range(RANKS)]

    def engine(
        self, number: int, take: TakeMemoryMsg = TAKE, *, may_adopt: bool = True, slots: int = 4
    ) -> KeptBlocks:
        for lease in self.leases:
            lease.claim = structs.replace(lease.claim, incarnation=f"engine-{number}")
            lease.marks.clear()
        config = decoder_of(golden("untied-gqa-bf16")).config
        common = header_of(config, SIZE, slots, RANKS)
        return KeptBlocks(
            cast("list[KvLease]", self.leases),
            [IndexPage.over(memoryview(lease.index)) for lease in self.leases],
            headers_of(common, [lease.pool for lease in self.leases], take),
            may_adopt=may_adopt,
            checksum=lambda block: CHECKSUM,
        )

    @property
    def marks(self) -> list[list[str]]:
        return [lease.marks for lease in self.leases]


@pytest.fixture(name="pools")
def pools_fixture() -> Pools:
    """With a block that engine-1 has published."""
    pools = Pools()
    first = pools.engine(1)
    assert (first.adopted, first.why_empty) == ((), "rank 0: the pool is new")
    first.writer.publish(2, first.writer.use(2), block_hash(2), 0, 32, CHECKSUM)
    return pools


def test_next_engine_adopts_and_reports_it_to_every_pool(pools: Pools):
    kept = pools.engine(2)
    assert [record.block for record in kept.adopted] == [2]
    kept.canary_passed()
    assert pools.marks == [[ADOPTING, ADOPTED]] * RANKS
    kept.discard("a canary failed")
    assert pools.engine(3).why_empty == "no block is published"


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("field", ["epochs", "identities"])
def test_other_weights_on_any_rank_mean_empty(pools: Pools, rank: int, field: str):
    values = list(getattr(TAKE, field))
    values[rank] = "other"
    why = pools.engine(2, structs.replace(TAKE, **{field: tuple(values)})).why_empty
    assert why.startswith(f"rank {rank}: the ")
    assert pools.marks == [[]] * RANKS


def test_other_layout_or_the_users_wish_means_empty(pools: Pools):
    assert "layout digest" in pools.engine(2, slots=8).why_empty
    assert pools.engine(3, may_adopt=False).why_empty == "--no-kv-adoption"


def test_block_that_was_changed_is_not_adopted_and_is_counted(pools: Pools):
    kept = pools.engine(2)
    kept.writer.publish(3, kept.writer.use(3), block_hash(3), 0, 32, CHECKSUM + 1)
    third = pools.engine(3)
    assert ([record.block for record in third.adopted], third.torn) == ([2], 1)
    assert third.why_empty == ""


def test_adoption_is_proven_by_steps(pools: Pools):
    """Two engines die soon after they have read what they adopted, and the third discards it,
    unless one of them has computed for a while."""
    kept = [pools.engine(number) for number in (2, 3)]
    for each in kept:
        assert each.adopted
        each.writer.rely_on([2])
    for _ in range(PROOF_STEPS):
        kept[1].writer.stepped()
    for number in (4, 5):
        pools.engine(number).writer.rely_on([2])
    assert pools.engine(6).why_empty == "2 engines in a row died with these blocks"
