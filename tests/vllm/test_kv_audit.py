"""A block's checksum is over its bytes in every layer and rank, however they are laid out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backends.vllm.kv.facts import asking, checksums
from engine.kv.adopter import joined
from plumbing.errors import UnderstudyError

BLOCKS = 6
# As the CPU and FlashAttention keep them; keys and values of all blocks apart; packed by blocks.
LAYOUTS = {
    "blocks first": lambda: torch.zeros(BLOCKS, 2, 4, 8, dtype=torch.bfloat16),
    "keys first": lambda: torch.zeros(2, BLOCKS, 4, 8, dtype=torch.float32),
    "packed": lambda: torch.zeros(BLOCKS, 3, 2, 4, dtype=torch.float32)[:, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_byte_of_a_block_and_no_other_counts(layout: str):
    """Change every element of the second layer in turn: only the checksum of its block changes."""
    caches = [LAYOUTS[layout](), LAYOUTS[layout]()]
    place = tuple(caches[1].shape).index(BLOCKS)
    everyone = list(range(BLOCKS))
    before = checksums(caches, BLOCKS, everyone)
    for block in everyone:
        part = caches[1].select(place, block)
        for element in range(part.numel()):
            part[tuple(torch.unravel_index(torch.tensor(element), part.shape))] += 1
            after = checksums(caches, BLOCKS, everyone)
            part.zero_()
            assert [each for each in everyone if after[each] != before[each]] == [block]


def test_ranks_answers_are_joined_and_their_errors_raised():
    def answering(*answers: dict[str, Any]) -> Any:
        return SimpleNamespace(collective_rpc=lambda method, timeout, args: list(answers))

    parts = [{"ok": True, "checksums": [1, 2]}, {"ok": True, "checksums": [3, 4]}]
    assert asking(answering(*parts))([7, 8]) == [joined([1, 3]), joined([2, 4])]
    failed = {"ok": False, "code": "vllm.worker_failed", "error": "no such block", "rank": 1}
    with pytest.raises(UnderstudyError, match="no such block"):
        asking(answering(parts[0], failed))([7, 8])
