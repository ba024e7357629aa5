"""The newest claims of a device's KV memory, for a restarted server: best effort, since the kernel
and the lock server protect the memory without them."""

from __future__ import annotations

import logging

import msgspec

from gms.kv.core.events import Claimant
from plumbing.service.files import write_atomic

logger = logging.getLogger(__name__)


class KeptTokens(msgspec.Struct, frozen=True):
    newest: tuple[Claimant, ...] = ()
    schema: int = 1


def read_tokens(path: str) -> tuple[Claimant, ...]:
    """Read what an earlier server wrote; nothing if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=KeptTokens).newest
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read, so older tokens are not refused: %s", path, error)
        return ()


def write_tokens(path: str, newest: tuple[Claimant, ...]) -> None:
    """
    Raises:
        OSError: no room, no permission.
    """
    write_atomic(path, msgspec.json.encode(KeptTokens(newest)), survives_power_cut=False)
