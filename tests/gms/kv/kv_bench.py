"""Those who borrow KV memory, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

from click.testing import CliRunner

from gms.cli import main as gms_command
from tests.gms.bench import ClientProcess, GmsProcess

MIB = 1 << 20
SIZE_BYTES = 4 * MIB
INDEX_BYTES = 4096
ERA = "e" * 16


class BorrowerProcess(ClientProcess):
    """A process that borrows; see `borrower.py`."""

    def __init__(
        self, gms: GmsProcess, token: int, size_bytes: int = SIZE_BYTES, wait_s: float = 60
    ) -> None:
        words = [gms.directory, gms.device, f"engine-{token}", str(token), str(size_bytes)]
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


def drop_kv(gms: GmsProcess) -> tuple[int, str]:
    """Exit code, and the result or the sentence why not."""
    words = ["drop-kv", "--dir", gms.directory, "--device", gms.device, "--yes", "--json"]
    done = CliRunner().invoke(gms_command, words)
    found = json.loads(done.stdout)
    return done.exit_code, found["devices"][0]["result"] if "devices" in found else str(found)
