"""Starts the model processes, one per tensor-parallel rank, each with a link to this process.

Owns what they inherit: the witness on descriptor 0, the link, and their sockets to each other. The
parent keeps no copy of those, so that a rank notices the end of another. Imports nothing slow,
because the model processes start first.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from engine.backends.process import child_environment
from engine.backends.reference.link import LINK, LINK_ENV, PEERS_ENV, ConfigureMsg
from plumbing.wire.frames import encode_frame

MODULE = "engine.backends.reference.model.main"
# Sums of floats depend on how many threads share them, and one thread starts faster than many.
# Set here because numpy reads them when it is imported.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class ModelProcess:
    """One rank: its process and our end of its link."""

    link: socket.socket
    child: subprocess.Popen[bytes]


def spawn(settings: ConfigureMsg) -> list[ModelProcess]:
    """Start the process of every rank, in order, with its settings on its link.

    Call it on the main thread: a child dies when the thread that started it ends. It inherits
    descriptor 0, the witness, so it counts as alive from its first instruction on.
    """
    pairs = [socket.socketpair() for _ in range(1, settings.ranks)]
    peers = [[leads for leads, _ in pairs], *([follows] for _, follows in pairs)]
    try:
        return [
            _spawn(structs.replace(settings, rank=rank), sockets)
            for rank, sockets in enumerate(peers)
        ]
    finally:
        for pair in pairs:
            for sock in pair:
                sock.close()


def _spawn(settings: ConfigureMsg, peers: Sequence[socket.socket]) -> ModelProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(encode_frame(LINK.encode(settings), 0))
        numbers = [sock.fileno() for sock in peers]
        environment = {
            **dict.fromkeys(THREAD_VARIABLES, "1"),
            **child_environment(),
            LINK_ENV: str(theirs.fileno()),
            PEERS_ENV: ",".join(map(str, numbers)),
        }
        command = [sys.executable, "-m", MODULE]
        inherited = [theirs.fileno(), *numbers]
        return ModelProcess(ours, subprocess.Popen(command, env=environment, pass_fds=inherited))
