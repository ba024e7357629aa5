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


CPU_V1 = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000


class Throttle:
    """A cgroup of its own with `pids` in it, which get a share of one CPU."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._is_v1 = (CPU_V1 / "cgroup.procs").exists()
        self._parent = CPU_V1 if self._is_v1 else V2
        self._path = self._parent / f"understudy-cpu-{os.getpid()}"
        try:
            self._path.mkdir()
            for pid in pids:
                (self._path / "cgroup.procs").write_text(str(pid))
            self.set(1.0)
        except OSError as error:
            self.close()
            pytest.skip(f"this machine gives no cgroup for CPUs: {error}")

    def set(self, share: float) -> None:
        quota = round(PERIOD_US * share)
        if self._is_v1:
            (self._path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._path / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._path / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            for pid in (self._path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it has ended since
                    (self._parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            self._path.rmdir()


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
