"""A cgroup freezer for tests: real processes that are frozen for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers import until

V1 = Path("/sys/fs/cgroup/freezer")
V2 = Path("/sys/fs/cgroup")


class Freezer:
    """A cgroup of its own with `pids` in it; `is_v1`: frozen, they cannot be killed."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.is_v1 = (V1 / "cgroup.procs").exists()
        self.parent = V1 if self.is_v1 else V2
        self.path = self.parent / f"understudy-test-{os.getpid()}"
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"this machine gives no cgroup freezer: {error}")
        try:
            for pid in pids:
                (self.path / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            self.path.rmdir()
            pytest.skip(f"this machine gives no cgroup freezer: {error}")

    def freeze(self) -> None:
        self._set("FROZEN" if self.is_v1 else "1")
        until(self.is_frozen, "the processes to be frozen")

    def thaw(self) -> None:
        self._set("THAWED" if self.is_v1 else "0")
        until(lambda: not self.is_frozen(), "the processes to be thawed")

    def is_frozen(self) -> bool:
        if self.is_v1:
            return (self.path / "freezer.state").read_text().strip() == "FROZEN"
        return "frozen 1" in (self.path / "cgroup.events").read_text()

    def _set(self, value: str) -> None:
        name = "freezer.state" if self.is_v1 else "cgroup.freeze"
        (self.path / name).write_text(value)

    def close(self) -> None:
        self.thaw()
        for pid in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended since
                (self.parent / "cgroup.procs").write_text(pid)
        until(self._is_removed, "the cgroup to be removed")

    def _is_removed(self) -> bool:
        with contextlib.suppress(OSError):  # a process of it is ending
            self.path.rmdir()
        return not self.path.exists()


@contextlib.contextmanager
def freezer_of(pids: Iterable[int]) -> Iterator[Freezer]:
    """A freezer with `pids`, which are thawed at the end; skips where there is none."""
    freezer = Freezer(pids)
    try:
        yield freezer
    finally:
        freezer.close()
