"""The ranks of a tensor-parallel model: rank 0 leads, and every other process does the same steps.

Owns the messages between ranks, their pipes, and the sums and logits that they exchange. A message
that the supervisor's channel has, too, is the same one here (`engine.messages`). A pipe waits
without a deadline: the end of a rank is noticed at once, and a hang is the supervisor's to notice.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from engine.backends import process
from engine.backends.reference.config import Settings
from engine.messages import (
    Count,
    Id,
    PlaceWeightsMsg,
    RestedMsg,
    RestMsg,
    Sentence,
    WeightsPlacedMsg,
    WokenMsg,
)
from plumbing.errors import InvariantError, UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Catalogue, Message

Array = NDArray[np.float32]
M = TypeVar("M", bound=Message)

# The numbers of a rank's sockets to other ranks, comma-separated: of rank 0's to ranks 1, 2, ….
PEERS_ENV = "UNDERSTUDY_PEERS"
MODULE = "engine.backends.reference.rank"
# The logits of a vocabulary of 256 Ki tokens, or a chunk of hidden states of 32 Ki numbers.
FRAME_BYTES_MAX = 5 << 20
# A process of this engine has ended: the cause is that one's to report.
RANK_LOST = "engine.rank_lost"


class ReadyMsg(Message, frozen=True, tag="ready"):
    """Weights are mapped; there is no KV memory yet. Joined by rank 0, the sizes are sums over all
    ranks, and `epoch` names every rank's."""

    weights_bytes: Count
    kv_bytes: Count
    max_context: Count
    vocab_size: Count
    stop_token_ids: tuple[int, ...]
    epoch: Sentence
    identity: dict[str, Any]


class TakeMemoryMsg(Message, frozen=True, tag="take_memory"):
    """Take memory for the KV cache as the holder of `active` under `token`; answered by `woken`."""

    token: Count
    era: Id


class ForwardMsg(Message, frozen=True, tag="forward"):
    """Run tokens through a slot of a cache, together with rank 0. Has no answer."""

    cache: Count
    slot: Count
    start: Count
    tokens: tuple[int, ...]


class FloatsMsg(Message, frozen=True, tag="floats"):
    """A part of a sum or of the logits, or the sum."""

    data: bytes


class BlockMsg(Message, frozen=True, tag="block"):
    """Copy the chunk at `start` of `slot` into a block, or the other way; or answer its checksum.
    Answered by `done`."""

    kind: Literal["save", "load", "checksum"]
    slot: Count = 0
    start: Count = 0
    block: Count = 0


class DistrustMsg(Message, frozen=True, tag="distrust"):
    """Report that a canary failed; answered by `done`."""


class DoneMsg(Message, frozen=True, tag="done"):
    checksum: Count = 0


RANKS = Catalogue(
    *(ReadyMsg, TakeMemoryMsg, WokenMsg, RestMsg, RestedMsg, PlaceWeightsMsg, WeightsPlacedMsg),
    *(ForwardMsg, FloatsMsg, BlockMsg, DistrustMsg, DoneMsg),
    frame_bytes_max=FRAME_BYTES_MAX,
)


class Pipe:
    """A connection to another rank, `name`. Every call raises UnderstudyError RANK_LOST."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._client = BlockingClient.from_socket(sock, RANKS)
        self._name = name

    def send(self, message: Message) -> None:
        try:
            self._client.notify(message)
        except UnreachableError as error:
            raise self._lost() from error

    def receive(self) -> Message:
        while True:
            try:
                return self._client.receive().message
            except WaitTimeoutError:
                continue  # an engine that is parked has nothing to say
            except UnreachableError as error:
                raise self._lost() from error

    def receive_as(self, kind: type[M]) -> M:
        message = self.receive()
        if not isinstance(message, kind):
            raise InvariantError(f"{self._name} sent {message.TYPE} instead of {kind.__name__}")
        return message

    def _lost(self) -> UnderstudyError:
        what = f"{self._name} has ended, and an engine cannot continue without it"
        return UnderstudyError(RANK_LOST, what)


class Peers:
    """The other ranks of this model, as one rank sees them.

    Rank 0 has a pipe to each of ranks 1, 2, …, in this order; another rank has one, to rank 0. With
    one rank there are none.
    """

    def __init__(self, pipes: Sequence[Pipe] = (), *, rank: int = 0) -> None:
        self.leader = pipes[0] if rank else None
        self._followers = () if rank else tuple(pipes)

    @property
    def has_followers(self) -> bool:
        return bool(self._followers)

    def tell(self, message: Message) -> None:
        """Have the other ranks do it, too; on a rank above 0, rank 0 has told them."""
        for pipe in self._followers:
            pipe.send(message)

    def answers(self, kind: type[M]) -> list[M]:
        """The answer of every other rank, in order."""
        return [pipe.receive_as(kind) for pipe in self._followers]

    def sum(self, partial: Array) -> Array:
        """The sum over all ranks, in their order, the same bits on each."""
        if self.leader is not None:
            self.leader.send(_floats(partial))
            return _array(self.leader.receive_as(FloatsMsg)).reshape(partial.shape)
        if not self._followers:
            return partial
        total = partial
        for answer in self.answers(FloatsMsg):
            total = total + _array(answer).reshape(partial.shape)
        self.tell(_floats(total))
        return total

    def gather(self, part: Array) -> Array:
        """The logits, on rank 0."""
        if self.leader is not None:
            self.leader.send(_floats(part))
        if not self._followers:
            return part
        return np.concatenate([part, *map(_array, self.answers(FloatsMsg))])


def _floats(array: Array) -> FloatsMsg:
    return FloatsMsg(array.tobytes())


def _array(message: FloatsMsg) -> Array:
    return np.frombuffer(message.data, np.float32)


def start_ranks(settings: Settings) -> tuple[Peers, list[subprocess.Popen[bytes]]]:
    """Start the processes of ranks 1, 2, …, which inherit the witness on descriptor 0. No copy of
    their sockets stays here, so each rank notices the end of another.

    Call it on the main thread: a child dies when the thread that started it ends.
    """
    pipes, children = list[Pipe](), list[subprocess.Popen[bytes]]()
    for rank in range(1, settings.ranks):
        with ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            number = theirs.fileno()
            environment = {**process.child_environment(), PEERS_ENV: str(number)}
            about = msgspec.json.encode(replace(settings, rank=rank)).decode()
            command = [sys.executable, "-m", MODULE, about]
            children.append(subprocess.Popen(command, env=environment, pass_fds=[number]))
            pipes.append(Pipe(ours, f"rank {rank}"))
    return Peers(pipes), children


def leader_pipe() -> Pipe:
    """On a rank above 0: its pipe to rank 0, once."""
    return Pipe(socket.socket(fileno=int(os.environ.pop(PEERS_ENV))), "rank 0")


def digest_of(facts: Any) -> str:
    """What two processes compare in place of `facts`, which are JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
