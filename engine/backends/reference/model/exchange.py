"""Data exchange of tensor-parallel ranks while they compute: one step, then float32 sums.

Rank 0 has a stream socket to every other rank; these have one to rank 0. Owns the protocol on
them: per step a fixed header and its tokens, then, at the same places of every rank's arithmetic,
bare float32 arrays whose sizes both ends know. No frames: a step of a small model exchanges more
often than it computes. Knows nothing of weights, requests or HTTP.

The surprising thing: rank 0 adds in the order of the ranks and sends the result to all of them.
Adding in the order of arrival, or on every rank separately, would change the last bits now and
then, and with them the tokens.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from engine.backends.reference.config import head_span
from engine.backends.reference.link import RANK_LOST
from engine.backends.reference.model.decoder import Array
from plumbing.errors import UnderstudyError

HEADER = struct.Struct("<IIII")  # cache, slot, start, number of tokens
DISTRUST = 0xFFFF_FFFF  # in place of a cache: the canary failed
# In place of a cache: a step over a block, whose number is in place of that of the tokens.
BlockKind = Literal["save", "load", "checksum"]
BLOCK_KINDS: dict[BlockKind, int] = {
    "save": 0xFFFF_FFFE,
    "load": 0xFFFF_FFFD,
    "checksum": 0xFFFF_FFFC,
}
DONE = struct.Struct("<I")  # with a checksum, or 0


class ForwardStep(NamedTuple):
    """One call of `Decoder.forward`, by the number of the cache."""

    cache: int
    slot: int
    tokens: tuple[int, ...]
    start: int


class BlockStep(NamedTuple):
    """A copy between the chunk at `start` of a slot and a block, or the block's checksum."""

    kind: BlockKind
    slot: int
    start: int
    block: int


class Leader:
    """Rank 0: `peers` are the sockets of ranks 1, 2, …, in this order; with one rank, none."""

    def __init__(self, peers: Sequence[socket.socket], vocab_size: int) -> None:
        self._peers = peers
        self._vocab_size = vocab_size

    def begin(self, cache: int, slot: int, tokens: Sequence[int], start: int) -> None:
        packed = np.asarray(tokens, "<u4").tobytes()
        self._send(HEADER.pack(cache, slot, start, len(tokens)) + packed)

    def sum(self, partial: Array) -> Array:
        total = partial
        for number, peer in enumerate(self._peers, 1):
            received = np.empty(partial.shape, np.float32)
            receive(peer, received.data, number)
            total = total + received
        self._send(np.ascontiguousarray(total).data.cast("B"))
        return total

    def gather(self, part: Array) -> Array:
        logits = np.empty(self._vocab_size, np.float32)
        logits[: part.size] = part
        for number, peer in enumerate(self._peers, 1):
            first, end = head_span(self._vocab_size, number, len(self._peers) + 1)
            receive(peer, logits[first:end].data, number)
        return logits

    def distrust(self) -> None:
        """Have every rank report that a canary failed; returns when they have."""
        self._send(HEADER.pack(DISTRUST, 0, 0, 0))
        self.confirmed()

    def begin_block(self, step: BlockStep) -> None:
        """The step that every rank runs now; then wait until all have `confirmed` it."""
        self._send(HEADER.pack(BLOCK_KINDS[step.kind], step.slot, step.start, step.block))

    def confirmed(self) -> list[int]:
        """Every other rank's answer, in order."""
        answers: list[int] = []
        for number, peer in enumerate(self._peers, 1):
            answer = bytearray(DONE.size)
            receive(peer, memoryview(answer), number)
            answers += DONE.unpack(answer)
        return answers

    def _send(self, data: bytes | memoryview) -> None:
        for number, peer in enumerate(self._peers, 1):
            send(peer, data, number)


class Follower:
    """A rank above 0, with its socket to rank 0."""

    def __init__(self, leader: socket.socket) -> None:
        self._leader = leader

    def fileno(self) -> int:
        """Lend the socket's descriptor: readable means a step, or the end of rank 0."""
        return self._leader.fileno()

    def next_step(self) -> ForwardStep | BlockStep | None:
        """The step that rank 0 begins; None: it distrusts the weights. `confirm` that, and a step
        over a block."""
        header = bytearray(HEADER.size)
        receive(self._leader, memoryview(header), 0)
        cache, slot, start, count = HEADER.unpack(header)
        if cache == DISTRUST:
            return None
        for kind, number in BLOCK_KINDS.items():
            if cache == number:
                return BlockStep(kind, slot, start, count)
        tokens = np.empty(count, "<u4")
        receive(self._leader, tokens.data, 0)
        return ForwardStep(cache, slot, tuple(tokens.tolist()), start)

    def confirm(self, answer: int = 0) -> None:
        send(self._leader, DONE.pack(answer), 0)

    def begin(self, cache: int, slot: int, tokens: Sequence[int], start: int) -> None:
        """Rank 0 began it."""

    def sum(self, partial: Array) -> Array:
        send(self._leader, np.ascontiguousarray(partial).data.cast("B"), 0)
        total = np.empty(partial.shape, np.float32)
        receive(self._leader, total.data, 0)
        return total

    def gather(self, part: Array) -> Array:
        send(self._leader, np.ascontiguousarray(part).data.cast("B"), 0)
        return part


def send(sock: socket.socket, data: bytes | memoryview, rank: int) -> None:
    """Send all of `data` to `rank`. Raises UnderstudyError `engine.rank_lost`."""
    try:
        sock.sendall(data)
    except OSError as error:
        raise lost(rank) from error


def receive(sock: socket.socket, into: memoryview, rank: int) -> None:
    """Fill `into` from `rank`. Raises UnderstudyError `engine.rank_lost`."""
    rest = into.cast("B")
    while rest:
        try:
            count = sock.recv_into(rest, 0, socket.MSG_WAITALL)
        except OSError as error:
            raise lost(rank) from error
        if not count:
            raise lost(rank)
        rest = rest[count:]


def lost(rank: int) -> UnderstudyError:
    return UnderstudyError(
        RANK_LOST,
        f"rank {rank} of the model has ended during a step; an engine cannot compute without all"
        " of its ranks, so this one exits",
        rank=rank,
    )
