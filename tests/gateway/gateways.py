"""A gateway in its own process, by default with `stub_child` in place of its doors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from gateway.messages import CONTROL
from plumbing.errors import UnderstudyError
from plumbing.pod.cli import ask_status
from plumbing.pod.paths import gateway_socket
from plumbing.service import procfs
from tests.helpers import free_port, until
from tests.lockserver.processes import ServerProcess

STUB = "tests.gateway.stub_gateway"
READ_S = 60.0
HOLD_MS = 600_000


class Stream:
    """A request that has been sent; `pid` of the child that answers it."""

    def __init__(self, port: int, path: str = "/") -> None:
        """Connect, which must work at any moment, and ask."""
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=READ_S)
        self._sock.sendall(f"GET {path} HTTP/1.1\r\nHost: pod\r\n\r\n".encode())
        self._file = self._sock.makefile("rb")

    def pid(self) -> int:
        """Whose answer it is, once it has begun."""
        while self._file.readline().strip():
            pass
        return int(self._file.readline())

    def rest(self) -> bytes:
        """What is left of the answer; "" if its child is gone."""
        try:
            return self._file.read()
        except ConnectionError:
            return b""
        finally:
            self.close()

    def close(self) -> None:
        self._file.close()
        self._sock.close()


def who(port: int) -> int:
    """The pid of the child that answers there now."""
    stream = Stream(port)
    try:
        return stream.pid()
    finally:
        stream.close()


class LockServer(ServerProcess):
    """With a service address. Where nobody accepts it waits for longer than any test: a gateway
    that is started may take its time."""

    def __init__(self, directory: str, *flags: str) -> None:
        self.port = free_port()
        service = ("--service", f"active=127.0.0.1:{self.port}")
        super().__init__(directory, *service, "--hold-ms", str(HOLD_MS), *flags)


class GatewayProcess:
    """`gateway serve` beside `lock_server`; `start` after its end is a restart. `port`: of the
    service address."""

    def __init__(self, lock_server: LockServer, *flags: str, module: str = STUB) -> None:
        self.directory, self.port = lock_server.directory, lock_server.port
        self.flags, self.module = flags, module
        self.http_port = free_port()
        self.environ: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.log_path = os.path.join(self.directory, "gateway.txt")

    def spawn(self) -> int:
        with open(self.log_path, "ab") as log:
            words = [sys.executable, "-m", self.module, "serve", "--dir", self.directory]
            self.process = subprocess.Popen(
                [*words, "--http-port", str(self.http_port), *self.flags],
                stderr=log,
                stdout=log,
                env={**os.environ, **self.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
            )
        return self.process.pid

    def start(self) -> GatewayProcess:
        """Start it unless it runs; a child accepts and a spare is ready."""
        if self.process is None or self.process.poll() is not None:
            self.spawn()
        until(self.has_spare, "the gateway to accept, with a spare")
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def status(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        return ask_status(gateway_socket(self.directory), CONTROL)

    def has_spare(self) -> bool:
        try:
            found = self.status()
        except UnderstudyError:
            return False
        return bool(found["accepting"] and found["spare"])

    def child(self) -> int:
        return int(self.status()["child"]["pid"])

    def spare(self) -> int:
        return int(self.status()["spare"]["pid"])

    def get(self, path: str) -> tuple[int, Any]:
        """The status and the JSON of an answer of its HTTP port; the text of `/metrics`."""
        url = f"http://127.0.0.1:{self.http_port}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=READ_S) as reply:
                code, body = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                code, body = error.code, error.read()
        return code, body.decode() if path == "metrics" else json.loads(body)

    def metric(self, line: str) -> float:
        text = self.get("metrics")[1]
        (found,) = [each for each in text.splitlines() if each.startswith(f"{line} ")]
        return float(found.rpartition(" ")[2])

    def counts(self, line: str, value: float) -> bool:
        return self.metric(line) == value

    def log(self) -> str:
        with open(self.log_path, encoding="utf-8") as stream:
            return stream.read()

    def events(self) -> list[str]:
        """The types of what it has recorded, oldest first."""
        whole = self.log().rpartition("\n")[0]  # the last line may be under way
        lines = [json.loads(each) for each in whole.splitlines() if each.startswith("{")]
        return [each["event"] for each in lines if "event" in each]

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


def ended(pid: int) -> bool:
    return not procfs.is_alive(pid)


@contextlib.contextmanager
def refusing(directory: str) -> Iterator[None]:
    """Within this block, children of the stub refuse their settings."""
    path = os.path.join(directory, "refuse")
    with open(path, "w"):
        pass
    try:
        yield
    finally:
        os.unlink(path)
