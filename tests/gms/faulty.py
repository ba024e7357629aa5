"""One device's server whose memory fails or blocks when it is told to; it obeys lines on stdin.

    fail CALL NTH KIND   the NTH call of CALL from now on raises: `driver`, `full`, `oserror`, …
    block CALL           the next call of CALL says `blocked CALL` and blocks, in a read of a pipe
    free                 what is blocked goes on

CALL is `create`, `export`, `seal` or `release`. Every line is answered with `ok`. Started by
`FaultyGms`, with the words DIRECTORY DEVICE_BYTES STALL_S [GRANULARITY_BYTES].
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import subprocess
import sys
import threading
from typing import Any

from gms.server.server import WeightsServer
from gms.vmm.host import HostMemory
from plumbing.errors import UnderstudyError
from plumbing.pod.cli import _crash_on_our_fault
from plumbing.service.process import arm_from_environment
from plumbing.service.signals import wait_signals
from tests.gms.bench import DEVICE, GmsProcess
from tests.helpers import until

ERRORS: dict[str, BaseException] = {
    "driver": UnderstudyError("gms.driver_failed", "CUDA_ERROR_UNKNOWN: as told"),
    "full": UnderstudyError("gms.device_full", "CUDA_ERROR_OUT_OF_MEMORY: as told"),
    "oserror": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "memory": MemoryError("as told"),
    "runtime": RuntimeError("as told, by a driver's binding"),
}


def say(line: str) -> None:
    print(line, flush=True)


class Plan:
    """What the next calls do."""

    def __init__(self) -> None:
        self.failures: dict[str, tuple[int, str]] = {}
        self.to_block: set[str] = set()
        self.read_end, self.write_end = os.pipe()

    def obey(self) -> None:
        for line in sys.stdin:
            match line.split():
                case ["fail", call, nth, kind]:
                    self.failures[call] = (int(nth), kind)
                case ["block", call]:
                    self.to_block.add(call)
                case ["free"]:
                    os.write(self.write_end, b"x")
            say("ok")

    def enter(self, call: str) -> None:
        """Called at the start of every driver call."""
        if call in self.to_block:
            self.to_block.discard(call)
            say(f"blocked {call}")
            os.read(self.read_end, 1)
        if call in self.failures:
            nth, kind = self.failures.pop(call)
            if nth > 1:
                self.failures[call] = (nth - 1, kind)
            else:
                raise ERRORS[kind]


class FaultyAllocation:
    """An allocation whose driver calls go by the plan."""

    def __init__(self, plan: Plan, inner: Any) -> None:
        self._plan, self._inner = plan, inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("export", "seal", "release"):
            return found

        @functools.wraps(found)
        def call(*args: Any, **more: Any) -> Any:
            self._plan.enter(name)
            return found(*args, **more)

        return call


class FaultyMemory(HostMemory):
    def __init__(self, plan: Plan, granularity_bytes: int | None) -> None:
        super().__init__()
        self._plan = plan
        if granularity_bytes is not None:
            self.granularity_bytes = granularity_bytes

    def create(self, size_bytes: int, name: str) -> Any:
        self._plan.enter("create")
        return FaultyAllocation(self._plan, super().create(size_bytes, name))

    def adopt(self, *args: Any) -> Any:
        return FaultyAllocation(self._plan, super().adopt(*args))


async def main() -> None:
    directory, device_bytes, stall_s, *granularity = sys.argv[1:]
    asyncio.get_running_loop().set_exception_handler(_crash_on_our_fault)
    plan = Plan()
    memory = FaultyMemory(plan, int(granularity[0]) if granularity else None)
    server = WeightsServer(
        directory, DEVICE, memory, int(device_bytes), stall_ms=float(stall_s) * 1000
    )
    await server.start()
    threading.Thread(target=plan.obey, daemon=True).start()
    try:
        await wait_signals()
    finally:
        os.write(plan.write_end, b"x")
        await server.close()


class FaultyGms(GmsProcess):
    """The other end of its lines."""

    def __init__(self, directory: str, granularity_bytes: int | None = None, **more: Any) -> None:
        super().__init__(directory, **more)
        self.granularity_bytes = granularity_bytes

    def start(self) -> FaultyGms:
        words = [self.directory, self.device_bytes, self.stall_s]
        words += [] if self.granularity_bytes is None else [self.granularity_bytes]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gms.faulty", *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
        )
        until(self.is_up, "the server's hello")
        return self

    def tell(self, command: str) -> None:
        """Give it a command; obeyed when this returns."""
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        self.hear("ok")

    def hear(self, line: str) -> None:
        """Wait for it to say `line`."""
        found = self.process.stdout.readline().decode().strip()
        assert found == line, f"{line!r} was awaited and {found!r} came"

    def stop(self) -> None:
        super().stop()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


if __name__ == "__main__":
    arm_from_environment()
    asyncio.run(main())
