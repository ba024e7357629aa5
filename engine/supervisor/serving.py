"""Which other engine on this machine holds the lock, whether or not the lock server answers."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from engine.supervisor import state_file
from plumbing.pod.paths import engine_socket, engine_states


def serving_engine(directory: str, engine: str) -> str | None:
    """The other engine that holds the lock and needs this machine, by its state file.

    A supervisor that has just started launches before it is connected to the lock server, so it
    cannot ask there. A file that a dead supervisor has left does not count.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):  # no descriptor left to look
        names = [path.stem.removeprefix("engine_") for path in engine_states(Path(directory))]
    for name in names:
        is_other = name != engine and state_file.is_holding(directory, name)
        if is_other and _is_listening(engine_socket(directory, name)):
            return name
    return None


def _is_listening(path: str) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
            sock.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        pass  # too busy to accept, or we have no descriptor left: not a proof of its end
    return True
