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


class Cgroup:
    """A cgroup of its own with `pids` in it, below `v1` where that version is mounted; it skips the
    test where there is none."""

    def __init__(self, pids: Iterable[int], v1: Path) -> None:
        self.is_v1 = (v1 / "cgroup.procs").exists()
        self.parent = v1 if self.is_v1 else V2
        self.path = self.parent / f"understudy-{type(self).__name__.lower()}-{os.getpid()}"
        try:
            self.path.mkdir()
            for pid in pids:
                (self.path / "cgroup.procs").write_text(str(pid))
            self._begin()
        except OSError as error:
            self.close()
            pytest.skip(f"this machine gives no cgroup: {error}")

    def _begin(self) -> None:
        """Raises OSError: it cannot do what it is for."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            for pid in (self.path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it has ended since
                    (self.parent / "cgroup.procs").write_text(pid)
            until(self._is_removed, "the cgroup to be removed")

    def _is_removed(self) -> bool:
        with contextlib.suppress(OSError):  # a process of it is ending
            self.path.rmdir()
        return not self.path.exists()


class Throttle(Cgroup):
    """Its processes get a share of one CPU."""

    def __init__(self, pids: Iterable[int]) -> None:
        super().__init__(pids, CPU_V1)

    def _begin(self) -> None:
        self.set(1.0)

    def set(self, share: float) -> None:
        quota = round(PERIOD_US * share)
        if self.is_v1:
            (self.path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.path / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self.path / "cpu.max").write_text(f"{quota} {PERIOD_US}")


class Freezer(Cgroup):
    """`is_v1`: frozen, they cannot be killed."""

    def __init__(self, pids: Iterable[int]) -> None:
        super().__init__(pids, V1)

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


@contextlib.contextmanager
def freezer_of(pids: Iterable[int]) -> Iterator[Freezer]:
    """A freezer with `pids`, which are thawed at the end."""
    freezer = Freezer(pids)
    try:
        yield freezer
    finally:
        freezer.thaw()
        freezer.close()
