"""What a killed backend has left in shared memory and among temporary files, removed by its name.

Every engine has a name that no other engine of the machine has. It is the name of the directory in
which its backend has its temporary files (TMPDIR), and vLLM's processes put it into the names of
their shared memory (`backends/vllm/process_tuning.py`). So a supervisor removes what its
predecessor's backend has left, too, of which it has seen nothing.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import tempfile

from plumbing.wire.server import guard_holder

SHM = "/dev/shm"  # where shm_open(3) and sem_open(3) keep their names, in no subdirectory
PREFIX, OWNER = "understudy-", "owner"
# vLLM's CPU build names shared memory after a temporary file: a name that no other file has.
UNIQUE_CHARS_MIN = 32


def directory_of(directory: str, engine: str) -> str:
    """The temporary directory of `engine` of the pod in `directory`."""
    about = f"{os.geteuid()} {os.path.realpath(directory)} {engine}"
    name = f"{PREFIX}{hashlib.sha256(os.fsencode(about)).hexdigest()[:12]}"
    return os.path.join(tempfile.gettempdir(), name)


def remake(path: str, guard: str) -> None:
    """An empty directory, for a backend that is about to start, with a link to `guard`, the lock
    file of its supervisor. Empty ones of supervisors that are gone are removed.

    Raises:
        OSError: it cannot be made, or another user has made it.
    """
    remove(path)
    for owner in glob.glob(os.path.join(os.path.dirname(path), f"{PREFIX}*", OWNER)):
        with contextlib.suppress(OSError):
            if guard_holder(os.readlink(owner)) is None:
                os.unlink(owner)
                os.rmdir(os.path.dirname(owner))
    os.mkdir(path, 0o700)
    os.symlink(guard, os.path.join(path, OWNER))


def remove(path: str) -> None:
    """Once no process of the backend is left. Best effort: the next launch does it again."""
    with contextlib.suppress(OSError):
        for name in in_shared_memory(path):
            os.unlink(os.path.join(SHM, name))
    shutil.rmtree(path, ignore_errors=True)


def in_shared_memory(path: str) -> list[str]:
    """What the backend with this temporary directory has there. Raises OSError."""
    files = os.listdir(path) if os.path.isdir(path) else []
    names = [os.path.basename(path), *(each for each in files if len(each) >= UNIQUE_CHARS_MIN)]
    return [each for each in os.listdir(SHM) if any(name in each for name in names)]
