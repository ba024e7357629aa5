"""The file of a KV pool: as an epoch's (`epoch_file`), and it says how much memory the pool has.

So whoever shares the directory knows what KV memory takes, whether or not its server answers: the
weights' server counts it, and needs no connection for that. Size and mark are the file's length,
which takes no space: an engine must wake also on a full disk.
"""

from __future__ import annotations

import contextlib
import os

from gms import epoch_file, names

# The length is twice the number of these, and one more once the pool is discarded. A file as long
# as the pool would be too long for some file systems, and for programs that copy the directory.
UNIT_BYTES = 4096


def create(path: str, size_bytes: int) -> None:
    """Create the file of a new pool of whole units, before its memory.

    Raises:
        OSError: no room, no permission; then there is no file.
    """
    epoch_file.create(path)
    try:
        os.truncate(path, 2 * (size_bytes // UNIT_BYTES))
    except OSError:
        os.unlink(path)
        raise


def mark_discarded(path: str) -> None:
    """So that no restarted server lends it again. A missing file needs no mark.

    Raises:
        OSError: it cannot be marked.
    """
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, os.stat(path).st_size | 1)


def is_discarded(path: str) -> bool:
    try:
        return os.stat(path).st_size % 2 == 1
    except FileNotFoundError:
        return False


def kv_bytes(directory: str, device: str) -> int:
    """Memory of the KV pools of `device`. What cannot be seen is not counted."""
    total = 0
    with contextlib.suppress(OSError):
        for pool in names.pools_on_disk(directory, device):
            path = os.path.join(directory, names.pool_file(device, pool))
            with contextlib.suppress(OSError):
                total += os.stat(path).st_size // 2 * UNIT_BYTES
    return total
