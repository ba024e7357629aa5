"""The servers that benches and soaks start, and waiting for them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gms import messages as gms_messages
from gms.client import Reader, Writer, open_session
from hack.gateway_load import Seen
from lockserver import messages as lock_messages
from plumbing.errors import UnderstudyError
from plumbing.pod.cli import ask_status
from plumbing.pod.paths import gms_socket, lockserver_socket
from plumbing.service import procfs
from plumbing.service.process import parent_environment
from understudy.pod.ports import OURS, free_base

T = TypeVar("T")

POLL_S = 0.002
START_S = 30.0
IDENTITY = {"model": "bench", "shards": {"a": "1"}}


def free_ports(count: int) -> range:
    """`count` consecutive ports that are free; raises as `free_base`."""
    first = free_base(OURS[:-count], range(count))
    return range(first, first + count)


class ProcessError(RuntimeError):
    """A program did not do in time what was waited for, or ended."""


def until(predicate: Callable[[], T], what: str, deadline_s: float = START_S) -> T:
    """Poll until `predicate()` is truthy and return its value.

    Raises:
        ProcessError: the deadline passed; it names `what`.
    """
    end = time.monotonic() + deadline_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > end:
            raise ProcessError(f"no {what} within {deadline_s:g} s")
        time.sleep(POLL_S)


class ServerProcess:
    """A server's process, which dies with this one; `answers` tells whether it is up."""

    def __init__(self, command: Sequence[str], answers: Callable[[], bool]) -> None:
        self.command, self._answers = list(command), answers
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def rss_mib(self) -> float:
        return round((procfs.rss_bytes(self.pid) or 0) / 2**20, 1)

    def spawn(self) -> int:
        """Start it without waiting for it; its pid."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self.environment()},
        )
        return self.pid

    def environment(self) -> dict[str, str]:
        return parent_environment()

    def start(self) -> None:
        """Raises:
        ProcessError: it ended, or did not answer in time.
        """
        self.spawn()
        until(self.is_up, f"answer from {self.command[0]}")

    def is_up(self) -> bool:
        assert self.process is not None
        code = self.process.poll()
        if code is not None:
            raise ProcessError(f"{' '.join(self.command[:4])} … ended with code {code}")
        return self._answers()

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def close(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()


class LockServer(ServerProcess):
    """`lockserver serve` on `directory`; `start` again after a kill is a restart."""

    def __init__(self, directory: str, *flags: str) -> None:
        self.directory = directory
        (self.http_port,) = free_ports(1)
        command = [sys.executable, "-m", "lockserver.cli", "serve", "--dir", directory]
        command += ["--http-port", str(self.http_port), *flags]
        super().__init__(command, self._is_ready)

    def _is_ready(self) -> bool:
        with contextlib.suppress(UnderstudyError, OSError):
            socket.create_connection(("127.0.0.1", self.http_port)).close()  # opened last
            return bool(self.status())
        return False

    def status(self) -> dict[str, Any]:
        return ask_status(lockserver_socket(self.directory), lock_messages.CATALOGUE)


class MemoryServer(ServerProcess):
    """The memory server of one device: `HOST-…` on host memory, else the GPU of that UUID."""

    def __init__(self, directory: str, device: str, device_bytes: int) -> None:
        self.directory, self.device = directory, device
        kind = "host" if device.startswith("HOST-") else "cuda"
        command = [sys.executable, "-m", "gms.cli", "serve-device", "--dir", directory]
        command += ["--device", device, "--memory", kind, "--device-bytes", str(device_bytes)]
        super().__init__(command, self._is_ready)

    def environment(self) -> dict[str, str]:
        visible = {} if self.device.startswith("HOST-") else {"CUDA_VISIBLE_DEVICES": self.device}
        return {**parent_environment(), **visible}

    def _is_ready(self) -> bool:
        try:
            return bool(self.status()["pid"] == self.pid)
        except UnderstudyError:
            return False

    def status(self) -> dict[str, Any]:
        path = gms_socket(self.directory, self.device)
        return ask_status(path, gms_messages.CATALOGUE)

    def open(self, mode: str, **more: Any) -> Reader | Writer:
        wanted: dict[str, Any] = {"identity": IDENTITY, "wait_ms": 20_000, "engine": "engine-0"}
        wanted |= {"incarnation": "i-0", "mode": mode, **more}
        request = gms_messages.AttachMsg(**wanted)
        return open_session(self.directory, self.device, request)


@dataclass
class Usage:
    """What a process took while it passed events on: the sum of the times between begin and end."""

    pid: int
    events: int = 0
    wall_ms: float = 0.0
    cpu_ms: float = 0.0  # of the thread that has the loop, to the nanosecond
    waited_ms: float = 0.0  # for a CPU, which others had
    writes: int = 0  # system calls; where a process lags, one passes several events on

    def add(self, sign: int, seen: Seen | None = None) -> None:
        """`sign`: -1 at the begin, 1 at the end."""
        ran, waited, _ = Path(f"/proc/{self.pid}/schedstat").read_text().split()
        text = Path(f"/proc/{self.pid}/io").read_text()
        written = re.search(r"^syscw: (\d+)$", text, re.MULTILINE)  # man 5 proc
        assert written is not None
        self.events += sign * seen.events if seen else 0
        self.wall_ms += sign * time.monotonic() * 1000
        self.cpu_ms += sign * int(ran) / 1e6
        self.waited_ms += sign * int(waited) / 1e6
        self.writes += sign * int(written[1])
