"""Real processes for the engine's tests: a lock server, engines with fake backends, questions."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine import messages as m
from engine.supervisor.supervisor import SAME_ORDER_MS
from lockserver.messages import CATALOGUE as LOCK_CATALOGUE
from plumbing.errors import UnderstudyError
from plumbing.pod.cli import ask_status
from plumbing.pod.paths import engine_http_socket, engine_socket, lockserver_socket
from plumbing.service import procfs
from plumbing.wire.blocking import BlockingClient
from tests.helpers import free_port, http_get, until

FAKE = str(Path(__file__).with_name("fake_backend.py"))
ROOT = str(Path(__file__).parents[2])
QUICK = ("--backoff-first-ms", "20", "--backoff-max-ms", "20", "--yield-ms", "20")


def program(package: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"from {package}.cli import main; main()")


class Engine:
    """One `engine run` with the fake backend."""

    def __init__(
        self,
        directory: Path,
        name: str,
        switches: tuple[str, ...],
        flags: tuple[str, ...],
        wrapper: tuple[str, ...] = (),
        backend: tuple[str, ...] | None = None,
    ):
        """`backend`: its name and its own arguments, instead of the fake one's `switches`."""
        self.directory = directory
        self.name = name
        self.port = free_port()
        self.errors = directory / f"{name}.stderr"
        kind, *arguments = backend or ("command", sys.executable, FAKE, *switches)
        command = [
            *wrapper,
            *program("engine"),
            *("run", "--backend", kind),
            *("--dir", str(directory), "--http-port", str(self.port), *flags),
            *("--", *arguments),
        ]
        with open(self.errors, "ab") as stderr:
            self.process = subprocess.Popen(
                command, env=environment(ENGINE_ID=name), stderr=stderr, cwd=ROOT
            )

    def status(self) -> dict[str, Any] | None:
        """What the engine says of itself, None while it does not answer."""
        try:
            return ask_status(engine_socket(str(self.directory), self.name), m.CONTROL)
        except UnderstudyError:
            return None

    def client(self) -> BlockingClient:
        return BlockingClient(engine_socket(str(self.directory), self.name), m.CONTROL)

    @property
    def state(self) -> str:
        document = self.status()
        return document["engine"]["state"] if document else "unreachable"

    @property
    def reason(self) -> str:
        document = self.status()
        return str(document["engine"]["reason"]) if document else ""

    def until(self, state: str, *, number: int = 0) -> dict[str, Any]:
        """Wait for `state` in launch `number` or a later one; the status then."""

        def reached() -> dict[str, Any] | None:
            document = self.status()
            if document is None:
                assert self.process.poll() is None, self.errors.read_text()
                return None
            engine = document["engine"]
            return document if engine["state"] == state and engine["number"] >= number else None

        try:
            return until(reached, f"{self.name} to be {state}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.status()}\n{self.errors.read_text()}") from None

    def until_death(self, words: str, *causes: str) -> dict[str, Any]:
        """Wait for a death with one of these causes and `words` in its message; a busy machine may
        cause others before."""

        def died() -> dict[str, Any] | None:
            deaths = (self.status() or {}).get("deaths", [])
            found = [
                each for each in deaths if each["cause"] in causes and words in each["message"]
            ]
            return found[0] if found else None

        return until(died, f"a death because {words}")

    def pids(self) -> dict[str, int]:
        document = self.status()
        assert document is not None
        pids: dict[str, int] = document["backend"]["pids"]
        return pids

    def kill(self, target: str) -> m.KillingMsg:
        with self.client() as client:
            reply = client.request(m.KillMsg(target)).message
        assert isinstance(reply, m.KillingMsg)
        return reply

    def get(self, path: str) -> tuple[int, Any]:
        status, body = http_get(self.port, path)
        return status, body if path == "/metrics" else json.loads(body)

    def wait(self) -> int:
        """Its exit code, waiting for it."""
        until(lambda: self.process.poll() is not None, f"{self.name} to end")
        assert self.process.returncode is not None
        return self.process.returncode

    def terminate_at_once(self) -> None:
        """A second SIGTERM, late enough to be another order than the first."""
        time.sleep(SAME_ORDER_MS / 1000)
        self.terminate()
        assert self.wait() == 0

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Pod:
    """A directory, and the processes that a test started in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.chmod(0o700)
        self.engines: list[Engine] = []
        self.lockserver: subprocess.Popen[bytes] | None = None
        self.address = ("127.0.0.1", free_port())
        self._lock_port = free_port()

    def engine(
        self,
        name: str,
        *switches: str,
        flags: tuple[str, ...] = (),
        wrapper: tuple[str, ...] = (),
        backend: tuple[str, ...] | None = None,
    ) -> Engine:
        flags = ("--yield-ms", "300", *flags)
        engine = Engine(self.directory, name, switches, flags, wrapper, backend)
        self.engines.append(engine)
        return engine

    def active(self, name: str, *switches: str, **how: Any) -> Engine:
        """An engine that is active."""
        engine = self.engine(name, *switches, **how)
        engine.until("active")
        return engine

    def start_lock(self) -> None:
        host, port = self.address
        command = [
            *program("lockserver"),
            *("serve", "--dir", str(self.directory)),
            *("--service", f"active={host}:{port}", "--http-port", str(self._lock_port)),
        ]
        with open(self.directory / "lockserver.stderr", "ab") as stderr:
            self.lockserver = subprocess.Popen(command, env=environment(), stderr=stderr, cwd=ROOT)

    def lock(self) -> dict[str, Any]:
        """What the lock server says of `active`."""
        lock: dict[str, Any] = self.lock_status()["locks"]["active"]
        return lock

    def lock_status(self) -> dict[str, Any]:
        """All that the lock server says."""
        return ask_status(lockserver_socket(str(self.directory)), LOCK_CATALOGUE)

    def ask(self) -> tuple[str, int]:
        """Who serves, and under which token: one request, as the gateway sends it, or with a lock
        over TCP to the engine's own address."""
        if self.lockserver is not None:
            return until(self._ask_privately, "an engine to answer")
        with socket.create_connection(self.address, timeout=20) as sock:
            return answer(sock)

    def _ask_privately(self) -> tuple[str, int] | None:
        for engine in self.engines:
            path = engine_http_socket(str(self.directory), engine.name)
            with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(20)
                sock.connect(path)
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return answer(sock)
        return None

    def close(self) -> None:
        trees = [procfs.descendants(engine.process.pid) for engine in self.engines]
        for engine in self.engines:
            engine.stop()
        if self.lockserver is not None:
            self.lockserver.kill()
            self.lockserver.wait()
        for pid in (pid for tree in trees for pid in tree):
            until(
                lambda pid=pid: not procfs.is_alive(pid), f"the backend's process {pid} to be gone"
            )


def answer(sock: socket.socket) -> tuple[str, int]:
    """The fake backend's line."""
    sock.settimeout(20)
    name, token = sock.makefile().readline().split()
    return name, int(token)


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("UNDERSTUDY_", "ENGINE_"))}
    return {**kept, "PYTHONPATH": ROOT, "LOG_FORMAT": "text", "PYTHONWARNINGS": "error", **more}
