"""The server of a device's KV memory and those who borrow from it, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from click.testing import CliRunner

from gms import kv_messages as msg
from gms import names
from gms.cli import main as gms_command
from plumbing.errors import UnderstudyError
from plumbing.wire.blocking import BlockingClient
from tests.gms.bench import ClientProcess
from tests.helpers import until

MIB = 1 << 20
SIZE_BYTES = 4 * MIB
INDEX_BYTES = 4096
ERA = "e" * 16


class KvProcess:
    """`gms serve-kv` of one device, with room for 64 MiB."""

    def __init__(self, directory: str, device: str, device_bytes: int = 64 * MIB) -> None:
        self.directory, self.device = directory, device
        kind = "host" if device.startswith("HOST-") else "cuda"
        flags = ["--dir", directory, "--device", device, "--memory", kind]
        self.words = [sys.executable, "-m", "gms.cli", "serve-kv", *flags]
        self.words += ["--device-bytes", str(device_bytes)]
        self.environ = {
            **os.environ,
            "UNDERSTUDY_PARENT_PID": str(os.getpid()),
            **({"CUDA_VISIBLE_DEVICES": device} if kind == "cuda" else {}),
        }

    def start(self) -> KvProcess:
        self.process = subprocess.Popen(self.words, stderr=subprocess.DEVNULL, env=self.environ)
        try:
            until(self._is_up, "the KV server's hello")
        except BaseException:
            self.stop()
            raise
        return self

    def client(self) -> BlockingClient:
        return BlockingClient(names.kv_socket_path(self.directory, self.device), msg.CATALOGUE)

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            reply = client.request(msg.StatusMsg()).message
        assert isinstance(reply, msg.StatusReplyMsg)
        return reply.document

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def _is_up(self) -> bool:
        assert self.process.poll() is None, "the KV server ended"
        try:
            return bool(self.status()["pid"] == self.process.pid)
        except UnderstudyError:
            return False


class BorrowerProcess(ClientProcess):
    """A process that borrows; see `borrower.py`."""

    def __init__(
        self, kv: KvProcess, token: int, size_bytes: int = SIZE_BYTES, wait_s: float = 60
    ) -> None:
        words = [kv.directory, kv.device, f"engine-{token}", str(token), str(size_bytes)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gms.kv.borrower", *words, str(wait_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
        )
        self._buffer = b""

    def waits(self, *, saying: str) -> None:
        """Read until it says that it waits for this."""
        while True:
            answer = self.line()
            assert answer["is"] == "waiting", answer
            if saying in answer["reason"]:
                return


Borrow = Callable[..., BorrowerProcess]  # the fixture `borrow`


def drop_kv(kv: KvProcess) -> tuple[int, str]:
    """Exit code, and the result or the sentence why not."""
    words = ["drop-kv", "--dir", kv.directory, "--device", kv.device, "--yes", "--json"]
    done = CliRunner().invoke(gms_command, words)
    found = json.loads(done.stdout)
    return done.exit_code, found["devices"][0]["result"] if "devices" in found else str(found)
