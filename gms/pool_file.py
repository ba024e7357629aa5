"""The file of a KV pool: as an epoch's (`epoch_file`), and it says how much memory the pool has.

So whoever shares the directory knows what KV memory takes, whether or not its server answers: the
weights' server counts it, and needs no connection for that. The mark of a discarded pool is one
more byte.
"""

from __future__ import annotations

import contextlib
import os
import struct

from gms import epoch_file, names

_SIZE = struct.Struct("=Q")


def create(path: str, size_bytes: int) -> None:
    """Create the file of a new pool, before its memory.

    Raises:
        OSError: no room, no permission; then there is no file.
    """
    epoch_file.create(path)
    try:
        with open(path, "wb") as file:
            file.write(_SIZE.pack(size_bytes))
    except OSError:
        os.unlink(path)
        raise


def mark_discarded(path: str) -> None:
    """So that no restarted server lends it again. A missing file needs no mark.

    Raises:
        OSError: it cannot be marked.
    """
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, _SIZE.size + 1)


def is_discarded(path: str) -> bool:
    try:
        return os.stat(path).st_size != _SIZE.size
    except FileNotFoundError:
        return False


def kv_bytes(directory: str, device: str) -> int:
    """Memory of the KV pools of `device`. What cannot be read is not counted."""
    total = 0
    with contextlib.suppress(OSError):
        for pool in names.pools_on_disk(directory, device):
            path = os.path.join(directory, names.pool_file(device, pool))
            with contextlib.suppress(OSError, struct.error), open(path, "rb") as file:
                total += int(_SIZE.unpack(file.read(_SIZE.size))[0])
    return total
