"""Misbehaving clients: too many, too quiet, too late, or duplicate."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest

from tests.helpers import until
from tests.lockserver.processes import ServerProcess

WAITERS = 1000
# Memory allowed for a thousand waiters: 24 KiB each is twice what was measured.


@contextlib.contextmanager
def crowd(directory: str, count: int):
    """`count` waiters in one process, and what became of them."""
    command = [sys.executable, "-m", "tests.lockserver.crowd", directory, str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def in_line(server: ServerProcess) -> int:
    return server.lock()["waiters_total"]


@pytest.mark.slow
def test_thousand_waiters_cost_the_holder_nothing(pod_dir, start_server, start_engine):
    """Goal: a crowd is slower to serve, and nothing worse. Method: a holder and a thousand waiters;
    the holder dies and the first waiter is granted the lock; the crowd dies, and an engine is
    granted it."""
    server = start_server("--silent-ms", "60000")  # these waiters send no heartbeats
    holder = start_engine("engine-0")
    assert holder.granted() == 1
    with crowd(pod_dir, WAITERS) as found:
        assert found == {"waiting": WAITERS, "refused": {}}
        assert in_line(server) == WAITERS
        assert server.lock()["holder"]["token"] == 1
        holder.close()
        until(lambda: server.status()["token"] == 2, "the next grant")
        assert server.lock()["holder"]["engine"] == "crowd-0"
        assert in_line(server) == WAITERS - 1
        start_engine("engine-1")
        until(lambda: in_line(server) == WAITERS, "one more to wait")
    until(lambda: server.lock()["holder"]["engine"] == "engine-1", "the engine to be granted")
    document = server.status()
    assert (in_line(server), document["supervisors_total"]) == (0, 1)
