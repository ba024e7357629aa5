"""A gateway in its own process below an init, a lock server, and a stand-in for an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from contextlib import AsyncExitStack
from typing import Any

from gateway.messages import CONTROL
from lockserver.messages import CATALOGUE as LOCK
from plumbing.errors import UnderstudyError
from plumbing.pod.cli import ask_status
from plumbing.pod.paths import engine_http_socket, gateway_socket, lockserver_socket
from plumbing.service import procfs
from plumbing.service.init import FIRST_START_ENV
from tests.gateway.stub_engine import StubEngine
from tests.helpers import auntil, free_port, http_get, run_command, until
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess
from understudy.pod.table import REPLACING_INIT

HOLD_MS = 600_000
FINAL = {FIRST_START_ENV: "final"}  # an exit before it is ready ends its init, too


class LockServer(ServerProcess):
    """With a service address. Where nobody accepts it waits for longer than any test: a gateway
    that is started may take its time."""

    def __init__(self, directory: str, *flags: str) -> None:
        self.port = free_port()
        service = ("--service", f"active=127.0.0.1:{self.port}")
        super().__init__(directory, *service, "--hold-ms", str(HOLD_MS), *flags)


class GatewayProcess:
    """`gateway serve` beside `lock_server`, below an init unless `has_init` is False; `start` after
    its end is a restart. `port`: of the service address."""

    def __init__(self, lock_server: LockServer, *flags: str, has_init: bool = True) -> None:
        self.directory, self.port = lock_server.directory, lock_server.port
        self.flags, self.has_init = flags, has_init
        self.http_port = free_port()
        self.environ: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None  # the init, if it has one
        self.log_path = os.path.join(self.directory, "gateway.txt")

    def spawn(self) -> int:
        with open(self.log_path, "ab") as log:
            words = [*(REPLACING_INIT if self.has_init else ()), sys.executable, "-m"]
            words += ["gateway.cli", "serve", "--dir", self.directory]
            self.process = subprocess.Popen(
                [*words, "--http-port", str(self.http_port), *self.flags],
                stderr=log,
                stdout=log,
                env={**os.environ, **self.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
            )
        return self.process.pid

    def start(self) -> GatewayProcess:
        """Start it unless it runs; it accepts."""
        if self.process is None or self.process.poll() is not None:
            self.spawn()
        until(self.accepts, "the gateway to accept")
        return self

    @property
    def pid(self) -> int:
        """The gateway's own, of the newest one that answers."""
        return int(self.status()["pid"])

    def status(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        return ask_status(gateway_socket(self.directory), CONTROL)

    def accepts(self, but: int = 0) -> bool:
        """Whether a gateway accepts, and is not the process `but`."""
        try:
            found = self.status()
        except UnderstudyError:
            return False
        return bool(found["accepting"] and found["pid"] != but)

    def is_alone(self) -> bool:
        """Whether it accepts, and the one that it has replaced is gone."""
        try:
            found = self.status()
        except UnderstudyError:
            return False
        return bool(found["accepting"] and found["predecessor"] is None)

    def get(self, path: str) -> tuple[int, Any]:
        """The status and the JSON of an answer of its HTTP port; the text of `/metrics`."""
        code, body = http_get(self.http_port, f"/{path}")
        return code, body if path == "metrics" else json.loads(body)

    def metric(self, line: str) -> float:
        text = self.get("metrics")[1]
        (found,) = [each for each in text.splitlines() if each.startswith(f"{line} ")]
        return float(found.rpartition(" ")[2])

    def log(self) -> str:
        with open(self.log_path, encoding="utf-8") as stream:
            return stream.read()

    def ends(self, signum: int) -> int:
        """Send this signal; its exit code."""
        assert self.process is not None
        self.process.send_signal(signum)
        return self.wait()

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(timeout=60)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def command(directory: str, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """It exits with `code`."""
    done = run_command([sys.executable, "-m", "gateway.cli", *words, "--dir", directory])
    assert done.returncode == code, done.stderr
    return done


def ended(pid: int) -> bool:
    return not procfs.is_alive(pid)


class StandInEngine:
    """An engine on the loop of the test: it takes a lock, and a stub serves while it is awake."""

    def __init__(self, directory: str, name: str = "engine-0") -> None:
        self.directory, self.token = directory, 0
        self.http = StubEngine(engine_http_socket(directory, name), name)
        # The same supervisor in each test: its process, the test's, lives on, and counts on.
        self.engine = Engine(directory, name, f"{zlib.crc32(name.encode()):016x}")
        self.engine.client._progress = time.monotonic_ns()
        self.engine.on_granted = self._granted

    def _granted(self, incarnation: str, token: int) -> None:
        if incarnation == self.engine.incarnation:  # else another engine's
            self.token = self.http.token = token

    async def enter(self, stack: AsyncExitStack) -> None:
        """It holds its lock, and serves."""
        await stack.enter_async_context(self.engine)
        stack.push_async_callback(self._leave)
        stack.callback(self.http.die)
        self.engine.launch()
        self.engine.want("active")
        await auntil(lambda: self.token, "the grant")
        await self.http.start()

    async def _leave(self) -> None:
        """Its death would not be seen."""
        self.engine.reap()
        self.engine.relent()
        await auntil(self._is_free, "the lock to be free")

    def _is_free(self) -> bool:
        path = lockserver_socket(self.directory)
        return bool(ask_status(path, LOCK)["locks"]["active"]["state"] == "free")
