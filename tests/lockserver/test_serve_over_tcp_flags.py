"""`lockserver serve --listen`: the flags it refuses, and what it reports while it runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import free_port
from tests.plumbing.wire.certificates import shared, tls_flags


def refused(pod_dir: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "lockserver.cli",
        "serve",
        "--dir",
        pod_dir,
        "--http-port",
        "0",
    ]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("code", "flags"),
    [
        ("wire.incomplete_security", ("--listen", "tcp://0.0.0.0:9402")),
        ("wire.incomplete_security", ("--listen", "tcp://127.0.0.1:9402")),
        ("wire.incomplete_security", ("--listen", "tcp://localhost:9402")),
        ("wire.bad_address", ("--listen", "0.0.0.0:9402")),
        ("wire.incomplete_security", ("--listen", "tcp://0.0.0.0:9402", "--tls-cert", "x")),
        (
            "lock.service_over_tcp",
            ("--listen", "tcp://127.0.0.1:9402", "--service", "active=127.0.0.1:8000"),
        ),
        ("config.bad_value", ("--lease-ms", "5")),
    ],
)
def test_serve_refuses_conflicting_flags_with_one_clear_error(pod_dir, code, flags):
    """Goal: a lock is never left open to the network by mistake. Method: each flag or pair of flags
    that is refused."""
    ran = refused(pod_dir, *flags)
    assert ran.returncode == 2, ran.stderr
    assert code in ran.stderr
    assert "Traceback" not in ran.stderr


def test_serve_over_tcp_status_shows_address_and_security(start_server, pod_dir):
    """Goal: operators can read what to configure on members. Method: the document and the text."""
    address = f"tcp://127.0.0.1:{free_port()}"
    server = start_server("--listen", address, *tls_flags(shared()), "--lease-ms", "7000")
    tcp = server.status()["tcp"]
    assert (tcp["address"], tcp["secured"], tcp["lease_ms"]) == (address, True, 7000)
    command = [sys.executable, "-m", "lockserver.cli", "status", "--dir", pod_dir]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert f"{address}  secured  0 connections" in text
