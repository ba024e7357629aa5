"""Which other engine on this machine holds the lock, as far as one can tell from here."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from engine.supervisor import state_file
from engine.supervisor.lock_side import LockSide
from plumbing.part.paths import engine_socket, engine_states


def serving_engine(directory: str, engine: str, lock: LockSide) -> str | None:
    """The other engine that holds the lock and needs this machine, as far as is known here.

    Before the lock server has answered, the state files must do; one that a dead supervisor has
    left does not count.
    """
    if lock.other is not None:
        candidates: dict[str, int | None] = {lock.other.engine: lock.other.token}
    elif lock.client.is_connected:
        return None
    else:
        candidates = {}
        with contextlib.suppress(OSError):  # no descriptor left to look
            for path in engine_states(Path(directory)):
                candidates[path.stem.removeprefix("engine_")] = None
    for name, token in candidates.items():
        is_other = name != engine and state_file.is_holding(directory, name, token)
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
