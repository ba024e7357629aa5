"""Engines whose lock is over TCP: each serves on an address of its own, never longer than its lease
allows, and a lost one is replaced once it is over.

The lock server speaks the real messages and does what each test says. When a real one grants is
`tests/lockserver/test_over_tcp.py`, the loss of a whole node `tests/e2e/test_lock_over_nodes.py`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine import cli
from lockserver import witness
from plumbing.service import procfs
from tests.engine.pod import Engine, Pod
from tests.helpers import LoopThread, free_witness, until
from tests.lockserver.engines import spawn_backend
from tests.lockserver.lease_server import LeaseServer
from tests.plumbing.wire.certificates import shared, tls_flags

LEASE_MS = 3000  # a machine with much to do stops a process for a second


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def server(loop) -> Iterator[LeaseServer]:
    """Grants `active` to every engine that wants it."""
    made = LeaseServer(LEASE_MS, auto=("active",))
    loop.run(made.start())
    yield made
    loop.run(made.stop())


def over_tcp(address: str, pod: Pod) -> tuple[str, ...]:
    """Flags of an engine that finds its lock server at `address`."""
    host, port = pod.address
    return (
        *("--lockserver-socket", address, *tls_flags(shared(), "lockserver-")),
        *("--service-address", f"{host}:{port}"),
    )


def accepts(pod: Pod) -> bool:
    try:
        socket.create_connection(pod.address).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def engine(pod, server) -> Engine:
    """engine-0, active, with two processes."""
    return pod.active("engine-0", "--grandchild", "joined", flags=over_tcp(server.address, pod))


def test_serves_on_its_own_address_only_while_it_is_active(pod, server, loop):
    """Goal: without a lent socket an engine binds its address itself, when it is to wake, and
    closes it once it is reaped. Method: look before, while and after it is active."""
    server.auto = ()
    engine = pod.engine("engine-0", flags=over_tcp(server.address, pod))
    status = engine.until("standby")
    assert not accepts(pod)
    assert status["lock"]["address"] == "{}:{}".format(*pod.address)
    assert status["lock"]["lease"]["valid_for_ms"] > 0
    assert not status["lock"]["lease"]["is_held"]
    server.auto = ("active",)
    loop.call(server.hang_up)
    status = engine.until("active")
    assert pod.ask() == ("engine-0", status["lock"]["token"])
    assert status["lock"]["lease"]["is_held"]
    assert "understudy_engine_lease_valid_seconds" in engine.get("/metrics")[1]
    text = CliRunner().invoke(
        cli.main, ["status", "--dir", str(pod.directory), "--engine-id", "engine-0"]
    )
    assert re.search(r"lease +valid for \S+( ms)?, held\n", text.output)
    server.auto = ()
    engine.kill("backend-http")
    again = engine.until("standby", number=2)
    assert not accepts(pod)
    witnesses = [path.name for path in pod.directory.glob("witness_*")]
    assert witnesses == [witness.name_of(again["engine"]["incarnation"])], "its own, and no other"


@pytest.mark.slow
def test_a_stopped_supervisor_is_ended_by_the_kernel_with_its_backend(pod, server, engine):
    """Goal: a supervisor that does nothing any more cannot outlive its lease, nor can its tree.
    Method: SIGSTOP, sent from outside."""
    tree = [*procfs.descendants(engine.process.pid), engine.process.pid]
    assert len(tree) == 3
    os.kill(engine.process.pid, signal.SIGSTOP)
    assert engine.wait() == -signal.SIGKILL
    until(lambda: not any(procfs.is_alive(pid) for pid in tree), "the whole tree to be gone")
    assert not accepts(pod)


def test_an_address_in_use_is_waited_for_and_said(pod, server):
    """Goal: a service address in use is no crash, and no silent wait. Method: a listener
    of the test's own, closed once status names it."""
    with socket.create_server(pod.address):
        engine = pod.engine("engine-0", flags=over_tcp(server.address, pod))
        engine.until("waking")
        problem = until(lambda: engine.status()["lock"]["problem"], "the problem to be said")
        assert f"pid {os.getpid()}" in problem
        assert problem in engine.status()["problems"]
    assert engine.until("active")["lock"]["problem"] is None
    assert pod.ask() == ("engine-0", 1)


def test_first_launch_waits_for_processes_of_an_earlier_supervisor(pod, server, tmp_path):
    """Goal: over TCP no lock server sees the witnesses here, so a restarted supervisor looks
    itself. Method: a stray process holds the witness of an earlier launch; another's are not its
    business, and a free one is removed."""
    stray = witness.new_incarnation("engine-0")
    path = free_witness(str(pod.directory), stray)
    free = free_witness(str(pod.directory), witness.new_incarnation("engine-0"))
    others = free_witness(str(pod.directory), witness.new_incarnation("engine-0_1"))
    process = spawn_backend(path)
    try:
        engine = pod.engine("engine-0", flags=over_tcp(server.address, pod))
        problem = until(lambda: (engine.status() or {}).get("problems"), "the stray to be named")
        assert f"pid {process.pid}" in problem[0]
        assert engine.state == "dead"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    engine.until("active")
    assert not Path(path).exists()
    assert not Path(free).exists()
    assert Path(others).exists()


@pytest.mark.slow
def test_a_partitioned_holder_has_stopped_before_its_lease_is_over(pod, server, engine):
    """Goal: one owner, whichever links are cut. Method: a deaf server; the tree is gone before
    another engine could be granted the lock. Then the server hears again: it is a standby."""
    tree = procfs.descendants(engine.process.pid)
    cut_s = time.monotonic()
    server.is_deaf, server.auto = True, ()
    until(lambda: not any(map(procfs.is_alive, tree)), "the whole tree to be gone")
    assert time.monotonic() - cut_s < LEASE_MS / 1000
    assert not accepts(pod)
    server.is_deaf = False
    assert engine.until("standby", number=2)["deaths"][-1]["cause"] == "lease_lost"
