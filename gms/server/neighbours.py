"""What other models have on a device, as their servers have filed it.

Each model has servers of its own, and one device has one limit. Asked without any server, so that
no model waits for another. What is still being loaded is in no file yet: in a pool the books know
that, and a GPU's driver has the last word.
"""

from __future__ import annotations

import contextlib

from gms import names, pool_file
from gms.server import journal


def bytes_elsewhere(directory: str, place: str) -> int:
    """Weights and KV memory of the other models on the device of `place`."""
    with contextlib.suppress(OSError):
        return sum(_bytes_of(directory, each) for each in names.neighbours(directory, place))
    return 0


def _bytes_of(directory: str, place: str) -> int:
    record = journal.peek(names.journal_path(directory, place))
    return (record.size_bytes if record else 0) + pool_file.kv_bytes(directory, place)
