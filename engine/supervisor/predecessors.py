"""What earlier supervisors of this engine left behind, where no lock server looks after it.

On one host the lock server holds the next grant back until the witness of the last holder is free.
Over TCP it cannot see witnesses: a supervisor that comes back after its death looks itself, before
it launches anything, whether a process of the old tree still lives and may touch the device.
"""

from __future__ import annotations

import os
import re

from lockserver.client import witness
from plumbing.service import procfs

POLL_MS = 100.0  # between two looks; what is left usually ends in milliseconds, or never


def clear(directory: str, engine: str) -> str | None:
    """Remove the witnesses of `engine` that nobody holds; None, or who holds one, as a sentence."""
    pattern = re.compile(rf"{witness.PREFIX}{re.escape(engine)}_[0-9a-f]{{16}}")
    for name in sorted(os.listdir(directory)):
        if not pattern.fullmatch(name):
            continue
        path = os.path.join(directory, name)
        try:
            found = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not witness.discard(path, found.st_dev, found.st_ino):
            pids = ", ".join(str(pid) for pid in procfs.holders_of(found.st_dev, found.st_ino))
            who = f"pid {pids}" if pids else f"a process not visible here has {name} open"
            return (
                f"not launched: of an earlier launch of {engine} there is still {who}, which may"
                " use the device; kill it if it does not end"
            )
    return None
