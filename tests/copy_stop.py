"""Stops the process that copies weights in the middle of its first write, so that a test can kill
whom it likes at that point.

Owns a folder with a `sitecustomize.py`, which Python imports in every process that has the folder
in PYTHONPATH. Nothing of the product knows of it. Surprising: the process stops itself, so the
point is reached whatever the speed of the machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from plumbing.service import procfs

SITE = '''
import os, signal

_write, _here = os.pwrite, os.path.dirname(os.path.abspath(__file__))


def pwrite(fd, data, offset):
    """Weights are copied through the files of their slabs, and written in no other way."""
    if not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:understudy-"):
        return _write(fd, data, offset)
    try:
        os.unlink(f"{_here}/stop")
    except FileNotFoundError:
        return _write(fd, data, offset)
    written = _write(fd, data[: len(data) // 2], offset)
    with open(f"{_here}/written", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{_here}/written", f"{_here}/pid")
    os.kill(os.getpid(), signal.SIGSTOP)
    return written


os.pwrite = pwrite
'''


class CopyStop:
    """`environment` is for the processes that may be stopped."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "sitecustomize.py").write_text(SITE)
        self._mark, self._pid = directory / "stop", directory / "pid"
        paths = (str(directory), os.environ.get("PYTHONPATH", ""))
        self.environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def arm(self) -> None:
        """The next process that copies is stopped, once."""
        self._pid.unlink(missing_ok=True)
        self._mark.touch()

    def stopped(self) -> int | None:
        """Who is stopped in the middle of a copy, if anybody is yet."""
        if not self._pid.exists():
            return None
        pid = int(self._pid.read_text())
        return pid if procfs.is_stopped(pid) else None
