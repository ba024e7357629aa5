"""A file system of its own that a test can fill: to the last byte, or to the last name."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


class SmallDisk:
    """A tmpfs at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Take every byte, including what has been freed since."""
        with (
            open(self.path / "filler", "ab", buffering=0) as filler,
            contextlib.suppress(OSError),
        ):
            while filler.write(b"x" * 512):
                pass
        assert shutil.disk_usage(self.path).free == 0

    def fill_names(self) -> None:
        """No file can be made any more."""
        (self.path / "names").mkdir(exist_ok=True)
        with contextlib.suppress(OSError):
            for number in range(len(os.listdir(self.path / "names")), 1 << 20):
                (self.path / "names" / str(number)).touch()
        assert not os.statvfs(self.path).f_favail

    def clear(self) -> None:
        """Give back what was taken."""
        (self.path / "filler").unlink(missing_ok=True)
        shutil.rmtree(self.path / "names", ignore_errors=True)


@contextlib.contextmanager
def small_disk(at: Path, options: str) -> Iterator[SmallDisk]:
    """Mounted at `at`, which is made; `options` as of tmpfs, such as `size=64k,nr_inodes=100`."""
    at.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "tmpfs", str(at)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        yield SmallDisk(at)
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)
