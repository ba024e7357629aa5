"""The ranks of a tensor-parallel model: rank 0 leads, and every other process does the same steps.

Owns their pipes, and the sums and logits that they exchange. Rank 0 has the others call a method by
its name; both ends are processes of one engine, so what they send is pickled. A pipe waits without
a deadline: the end of a rank is noticed at once, and a hang is the supervisor's to notice.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from engine.backends import process
from engine.backends.reference.config import Settings
from plumbing.errors import UnderstudyError

Array = NDArray[np.float32]

# The number of a rank's socket to rank 0.
PEERS_ENV = "UNDERSTUDY_PEERS"
MODULE = "engine.backends.reference.rank"
# A process of this engine has ended: the cause is that one's to report.
RANK_LOST = "engine.rank_lost"


class Ready(Struct, frozen=True):
    """Weights are mapped; there is no KV memory yet. Joined by rank 0, the sizes are sums over all
    ranks, and `epoch` names every rank's."""

    weights_bytes: int
    kv_bytes: int
    max_context: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    epoch: str
    identity: dict[str, Any]


class Pipe:
    """A connection to another rank, `name`. Every call raises UnderstudyError RANK_LOST."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock, self._reader, self._name = sock, sock.makefile("rb"), name

    def send(self, message: Any) -> None:
        try:
            self._sock.sendall(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> Any:
        try:
            return pickle.load(self._reader)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._lost() from error

    def close(self) -> None:
        """Have the other end notice; repeated calls do nothing."""
        self._reader.close()
        self._sock.close()

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

    def call(self, method: str, *arguments: Any) -> None:
        """Have the other ranks do it, too; on a rank above 0, rank 0 has told them."""
        self._tell((method, arguments))

    def answers(self) -> list[Any]:
        """The answer of every other rank, in order."""
        return [pipe.receive() for pipe in self._followers]

    def sum(self, partial: Array) -> Array:
        """The sum over all ranks, in their order, the same bits on each."""
        if self.leader is not None:
            self.leader.send(partial)
            total: Array = self.leader.receive()
            return total
        if self._followers:
            for part in self.answers():
                partial = partial + part
            self._tell(partial)
        return partial

    def gather(self, part: Array) -> Array:
        """The logits, on rank 0."""
        if self.leader is not None:
            self.leader.send(part)
        return np.concatenate([part, *self.answers()]) if self._followers else part

    def _tell(self, message: Any) -> None:
        for pipe in self._followers:
            pipe.send(message)


_children: list[subprocess.Popen[bytes]] = []  # kept: one that is forgotten warns


def start_ranks(settings: Settings) -> Peers:
    """Start the processes of ranks 1, 2, …, which inherit the witness on descriptor 0. No copy of
    their sockets stays here, so each rank notices the end of another; the supervisor watches all.

    Call it on the main thread: a child dies when the thread that started it ends.
    """
    pipes = list[Pipe]()
    for rank in range(1, settings.ranks):
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            environment = {**process.child_environment(), PEERS_ENV: str(number)}
            about = msgspec.json.encode(replace(settings, rank=rank)).decode()
            command = [sys.executable, "-m", MODULE, about]
            _children.append(subprocess.Popen(command, env=environment, pass_fds=[number]))
        pipes.append(Pipe(ours, f"rank {rank}"))
    return Peers(pipes)
