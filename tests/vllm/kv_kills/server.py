"""The server of the KV memory of a device on host memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gms import messages, names
from plumbing.errors import UnderstudyError
from plumbing.service.process import parent_environment
from plumbing.wire.blocking import BlockingClient

DEVICE, DEVICE_BYTES = "HOST-0", 1 << 30
START_S, POLL_S = 30.0, 0.01


@contextmanager
def kv_server(directory: Path) -> Iterator[None]:
    """Raises RuntimeError: it ended, or does not answer."""
    command = [sys.executable, "-m", "gms.cli", "serve-device", "--dir", str(directory)]
    command += ["--device", DEVICE, "--memory", "host", "--device-bytes", str(DEVICE_BYTES)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = {**os.environ, **parent_environment()}
    with subprocess.Popen(command, env=env, **quiet) as process:
        try:
            _wait_up(process, names.kv_socket_path(str(directory), DEVICE))
            yield
        finally:
            process.terminate()


def _wait_up(process: subprocess.Popen[bytes], path: str) -> None:
    end_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end_s:
        try:
            with BlockingClient(path, messages.CATALOGUE) as client:
                client.request(messages.StatusMsg())
                return
        except UnderstudyError:
            time.sleep(POLL_S)
    raise RuntimeError(f"no KV server on {path}: exit code {process.poll()}")
