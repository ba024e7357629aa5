"""With `--kv-audit`, a block whose bytes have changed since it was published is not adopted."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.adopter import audited, joined
from engine.kv.writer import LatePublisher
from tests.engine.kv.indexes import adopted_from, block_hash, blocks_of, memory, writer_over


class Bytes:
    """What blocks hold, as one number each, on two ranks; and which were asked for."""

    def __init__(self) -> None:
        self.of = {block: [block, block] for block in range(8)}
        self.asked: list[list[int]] = []

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        self.asked.append(list(blocks))
        return [joined(self.of[block]) for block in blocks]


def published(blocks: Sequence[int], found: Bytes) -> bytearray:
    content = memory()
    publisher = LatePublisher(writer_over(content), found.checksums)
    for block in blocks:
        publisher.prepare(block, block_hash(block), 0, 16)
    publisher.step_sent()
    assert publisher.step_processed() == len(blocks)
    return content


def test_torn_block_is_not_adopted_by_anyone_and_the_others_are():
    """Goal: one altered byte costs its block. Method: alter the part of the second rank; the engine
    that finds it goes on, and its successor, which checks nothing, does not find the block."""
    found = Bytes()
    content = published([1, 2, 3], found)
    found.of[2][1] += 1
    adoption = audited(adopted_from(content), found.checksums)
    assert (blocks_of(adoption), adoption.torn, adoption.why_empty) == ([1, 3], {2}, "")
    writer_over(content, adoption=adoption)
    assert blocks_of(adopted_from(content, "engine-3")) == [1, 3]


def test_only_blocks_that_are_published_are_asked_for_once_a_step():
    """One question per step that publishes, none for a block that was handed out again, and none of
    a successor where no checksum was published."""
    found, content = Bytes(), memory()
    writer = writer_over(content)
    publisher = LatePublisher(writer, found.checksums)
    for block in (1, 2, 3):
        publisher.prepare(block, block_hash(block), 0, 16)
    publisher.step_sent()
    publisher.step_sent()
    writer.invalidate(2)
    assert [publisher.step_processed(), publisher.step_processed()] == [2, 0]
    assert found.asked == [[1, 3]]
    plain = memory()
    LatePublisher(writer_over(plain))
    writer_over(plain).publish(1, 0, block_hash(1), 0, 16)
    assert blocks_of(audited(adopted_from(plain), found.checksums)) == [1]
    assert found.asked == [[1, 3]]
