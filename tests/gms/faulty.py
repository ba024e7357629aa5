"""A server of weights on a thread of this process; its memory fails or blocks when it is told to.

The calls are `create`, `export`, `seal` and `release`.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from typing import Any

from gms.server.server import a_place
from gms.vmm.host import HostMemory
from plumbing.errors import UnderstudyError
from tests.gms.bench import ANSWER_S, DEVICE, GmsProcess
from tests.helpers import LoopThread

ERRORS: dict[str, BaseException] = {
    "driver": UnderstudyError("gms.driver_failed", "CUDA_ERROR_UNKNOWN: as told"),
    "oserror": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "memory": MemoryError("as told"),
    "runtime": RuntimeError("as told, by a driver's binding"),
}


class FaultyAllocation:
    """An allocation whose driver calls go by the plan."""

    def __init__(self, memory: FaultyMemory, inner: Any) -> None:
        self._memory, self._inner = memory, inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("export", "seal", "release"):
            return found

        @functools.wraps(found)
        def call(*args: Any, **more: Any) -> Any:
            self._memory.enter(name)
            return found(*args, **more)

        return call


class FaultyMemory(HostMemory):
    def __init__(self, granularity_bytes: int | None) -> None:
        super().__init__()
        self.granularity_bytes = granularity_bytes or self.granularity_bytes
        self._failures: dict[str, tuple[int, str]] = {}
        self._to_block = ""
        self.is_blocked, self.may_go_on = threading.Event(), threading.Event()

    def fail(self, call: str, nth: int, kind: str) -> None:
        """The `nth` call from now on raises one of ERRORS."""
        self._failures[call] = nth, kind

    def block(self, call: str) -> None:
        """The next call blocks until `may_go_on` is set."""
        self._to_block = call

    def wait_until_blocked(self) -> None:
        assert self.is_blocked.wait(ANSWER_S), "the call did not come"

    def enter(self, call: str) -> None:
        """Called at the start of every driver call."""
        if call == self._to_block:
            self._to_block = ""
            self.is_blocked.set()
            self.may_go_on.wait(ANSWER_S)
        if call in self._failures:
            nth, kind = self._failures.pop(call)
            if nth == 1:
                raise ERRORS[kind]
            self._failures[call] = nth - 1, kind

    def create(self, size_bytes: int, name: str) -> Any:
        self.enter("create")
        return FaultyAllocation(self, super().create(size_bytes, name))

    def adopt(self, *args: Any) -> Any:
        return FaultyAllocation(self, super().adopt(*args))


class FaultyGms(GmsProcess):
    pid = os.getpid()

    def __init__(self, directory: str, granularity_bytes: int | None = None) -> None:
        super().__init__(directory)
        self.memory = FaultyMemory(granularity_bytes)
        self._thread = LoopThread()
        self._server = a_place(directory, DEVICE, self.memory, self.device_bytes)

    def start(self) -> FaultyGms:
        self._thread.run(self._server.start())
        return self

    def stop(self) -> None:
        self.memory.may_go_on.set()
        self._thread.run(self._server.close())
        self._thread.close()
