"""An engine whose lock is over TCP: it serves on an address of its own, and never longer than its
lease allows. A server of the real messages does what each test says."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine import cli
from lockserver import witness
from plumbing.service import procfs
from plumbing.wire.tcp import Security
from tests.engine.pod import Engine, LoopThread, Pod
from tests.engine.test_shortages import NONE, observer
from tests.helpers import descriptors_below, free_witness, is_over, until
from tests.lockserver.lease_server import LeaseServer
from tests.plumbing.wire.certificates import Authority, shared, tls_flags

LEASE_MS = 3000  # a machine with much to do stops a process for a second
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
may_unshare = pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode != 0,
    reason="this machine does not let us make a PID namespace",
)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def server(loop) -> Iterator[LeaseServer]:
    """Grants `active` and `loader` to every engine that wants them."""
    made = LeaseServer(LEASE_MS, auto=("active", "loader"))
    loop.run(made.start())
    yield made
    loop.run(made.stop())


def over_tcp(server: LeaseServer, pod: Pod, tls: tuple[str, ...] = ()) -> tuple[str, ...]:
    host, port = pod.address
    return (
        *("--lockserver-socket", server.address, *(tls or tls_flags(shared(), "lockserver-"))),
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
    made = pod.engine("engine-0", "--grandchild", "joined", flags=over_tcp(server, pod))
    made.until("active")
    return made


def test_serves_on_its_own_address_only_while_it_is_active(pod, server, loop):
    """Goal: without a lent socket an engine binds its address itself, when it is to wake, and
    closes it once it is reaped. Method: look before, while and after it is active."""
    server.auto = ()
    engine = pod.engine("engine-0", flags=over_tcp(server, pod))
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
    assert re.search(
        r"lease +valid for \S+( ms)? of 3s, held; last answer .* \d+ ms ago", text.output
    )
    server.auto = ()
    engine.kill("backend-http")
    again = engine.until("standby", number=2)
    assert not accepts(pod)
    witnesses = [path.name for path in pod.directory.glob("witness_*")]
    assert witnesses == [witness.name_of(again["engine"]["incarnation"])], "its own, and no other"


def test_a_grant_without_descriptors_is_acted_on_once_there_is_one(pod, server, loop):
    """Goal: a shortage costs neither the grant nor the engine. Method: grant the lock to a standby
    whose supervisor can open nothing: it says why it does not serve, then it does."""
    server.auto = ()
    engine = pod.engine("engine-0", flags=over_tcp(server, pod))
    incarnation = engine.until("standby")["engine"]["incarnation"]
    with observer(engine) as watcher:
        with descriptors_below(NONE, engine.process.pid):
            loop.call(server.grant, "active", "engine-0", incarnation)
            watcher.problem("open the listening socket")
            assert watcher.status()["engine"]["state"] == "waking"
        engine.until("active")
        watcher.without_problems()
        assert watcher.status()["engine"]["incarnation"] == incarnation


@pytest.mark.slow
def test_without_answers_it_stops_before_its_lease_has_run_out(pod, server, loop, engine):
    """Goal: an engine that cannot hear the server does not serve on. Method: a server that answers
    nothing; the death's cause, the tree and the address afterwards; then it comes back."""
    old = procfs.descendants(engine.process.pid)
    assert len(old) == 2
    token = engine.until("active")["lock"]["token"]
    server.is_deaf = True
    until(lambda: (engine.status() or {}).get("deaths"), "its death")
    until(lambda: not any(procfs.is_alive(pid) for pid in old), "the tree to be gone")
    until(lambda: not accepts(pod), "the address to be closed")
    server.is_deaf = False
    loop.call(server.hang_up)  # what was said to the deaf is said again
    back = engine.until("active", number=2)
    assert engine.process.poll() is None, "stopped by itself, not by the kernel"
    death = back["deaths"][0]
    assert death["cause"] == "lease_lost"
    assert "has not answered" in death["message"]
    assert back["lock"]["token"] > token
    page = engine.get("/metrics")[1]
    assert 'understudy_engine_lock_lost_total{reason="lease_lost"} 1.0' in page


@pytest.mark.slow
def test_leases_lost_again_and_again_are_no_crash_loop(pod, server, loop):
    """Goal: the network's faults do not end a container. Method: as many losses as deaths would be
    a crash loop, and one more."""
    flags = (*over_tcp(server, pod), "--deaths-max", "2", "--yield-ms", "1")
    engine = pod.engine("engine-0", flags=flags)
    for number in range(1, 4):
        engine.until("active", number=number)
        server.is_deaf = True
        engine.until("standby", number=number + 1)
        server.is_deaf = False
        loop.call(server.hang_up)  # what was said to the deaf is said again
    assert [death["cause"] for death in engine.status()["deaths"]] == ["lease_lost"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [(), pytest.param(NAMESPACE, marks=may_unshare)])
def test_a_stopped_supervisor_is_ended_by_the_kernel_with_its_backend(pod, server, wrapper):
    """Goal: a supervisor that does nothing any more cannot outlive its lease, nor can its tree,
    neither on a host nor as PID 1 of a container. Method: SIGSTOP, sent from outside."""
    flags = over_tcp(server, pod)
    engine = pod.engine("engine-0", "--grandchild", "joined", flags=flags, wrapper=wrapper)
    engine.until("active")
    inside = procfs.descendants(engine.process.pid)
    supervisor = inside[0] if wrapper else engine.process.pid
    tree = [*procfs.descendants(supervisor), supervisor]
    assert len(tree) == 3
    os.kill(supervisor, signal.SIGSTOP)
    code = engine.wait()
    assert wrapper or code == -signal.SIGKILL
    until(lambda: not any(procfs.is_alive(pid) for pid in tree), "the whole tree to be gone")
    assert not accepts(pod)


@pytest.mark.slow
def test_a_stopped_standby_is_left_alone(pod, server):
    """Goal: the kernel's timer runs for holders only. Method: a standby is stopped for longer than
    a lease, and goes on."""
    server.auto = ("loader",)
    engine = pod.engine("engine-0", flags=over_tcp(server, pod))
    engine.until("standby")
    count = server.beats
    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        until(lambda: not server.conns or silent_for(server, 2 * LEASE_MS), "the silence")
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)
    until(lambda: server.beats > count, "the next heartbeat")
    assert engine.until("standby")["engine"]["number"] == 1


def silent_for(server: LeaseServer, ms: float) -> bool:
    before = server.beats
    try:
        until(lambda: server.beats > before, "a heartbeat", ms / 1000)
    except AssertionError:
        return True
    return False


def test_a_restart_of_the_server_costs_nothing(pod, server, loop, engine):
    """Goal: a restart within the lease costs nothing. Method: stop and start the server."""
    before = pod.ask()
    port = server.server.port
    loop.run(server.stop())
    until(lambda: not engine.status()["lock"]["connected"], "the engine to notice")
    until(lambda: engine.status()["lock"]["problem"], "the reason to be said")
    loop.run(server.start(port))
    status = until(
        lambda: engine.status() if engine.status()["lock"]["connected"] else None, "the reconnect"
    )
    assert pod.ask() == before
    assert status["engine"]["number"] == 1


def test_a_reconnect_without_descriptors_is_repeated(pod, server, loop):
    """Goal: a restart of the server ends no standby. Method: restart it while the supervisor can
    open nothing: it says why it is not connected, and the same launch stands by afterwards."""
    server.auto = ()
    engine = pod.engine("engine-0", flags=over_tcp(server, pod))
    before = engine.until("standby")["engine"]
    port = server.server.port
    with observer(engine) as watcher:
        with descriptors_below(NONE, engine.process.pid):
            loop.run(server.stop())
            watcher.problem("open a socket to tcp://")
            loop.run(server.start(port))
        until(lambda: watcher.status()["lock"]["connected"], "the reconnect")
        watcher.without_problems()
        assert watcher.status()["engine"]["incarnation"] == before["incarnation"]


def test_an_address_in_use_is_waited_for_and_said(pod, server):
    """Goal: a service address in use is no crash, and no silent wait. Method: a listener
    of the test's own, closed once status names it."""
    with socket.create_server(pod.address):
        engine = pod.engine("engine-0", flags=over_tcp(server, pod))
        engine.until("waking")
        problem = until(lambda: engine.status()["lock"]["problem"], "the problem to be said")
        assert f"pid {os.getpid()}" in problem
        assert problem in engine.status()["problems"]
    assert engine.until("active")["lock"]["problem"] is None
    assert pod.ask() == ("engine-0", 1)


@pytest.mark.slow
def test_two_members_wake_stop_and_come_back_together(pod, server, loop, tmp_path):
    """Goal: an engine of two members: both wake, the first serves; when one is lost, the other ends
    its tree and both come back with new incarnations. Method: two supervisors in two directories,
    each granted its own incarnation, as the server does for a group."""
    server.auto = ("loader",)
    second = Pod(tmp_path)
    tls = tls_flags(shared(), "lockserver-")
    flags = ("--lockserver-socket", server.address, *tls, "--members", "2")
    first_flags = (*flags, "--service-address", "{}:{}".format(*pod.address))
    try:
        members = (
            pod.engine("engine-0", flags=first_flags),
            second.engine("engine-0", flags=(*flags, "--member", "1")),
        )
        for number in (1, 2):
            ready = [member.until("standby", number=number) for member in members]
            incarnations = [each["engine"]["incarnation"] for each in ready]
            for incarnation in incarnations:
                loop.call(server.grant, "active", "engine-0", incarnation)
            documents = [member.until("active", number=number) for member in members]
            assert [each["engine"]["member"] for each in documents] == [0, 1]
            assert [member.get("/serving")[0] for member in members] == [200, 503]
            assert [bool(each["lock"]["address"]) for each in documents] == [True, False]
            assert pod.ask()[0] == "engine-0"
            if number == 1:
                trees = [procfs.descendants(member.process.pid) for member in members]
                for member, incarnation in enumerate(incarnations):
                    loop.call(server.lose, "engine-0", incarnation, 1 - member)
        assert all(is_over(pid) for tree in trees for pid in tree)
        for document in documents:
            assert document["deaths"][0]["cause"] == "member_lost"
            assert "its lease ran out" in document["deaths"][0]["message"]
    finally:
        second.close()


def test_first_launch_waits_for_processes_of_an_earlier_supervisor(pod, server, tmp_path):
    """Goal: over TCP no lock server sees the witnesses here, so a restarted supervisor looks
    itself. Method: a stray process holds the witness of an earlier launch; another's are not its
    business, and a free one is removed."""
    stray = witness.new_incarnation("engine-0")
    path = free_witness(str(pod.directory), stray)
    free = free_witness(str(pod.directory), witness.new_incarnation("engine-0"))
    others = free_witness(str(pod.directory), witness.new_incarnation("engine-0_1"))
    held = (
        "import sys; from lockserver.witness import join; join(sys.argv[1]);"
        "print(flush=True); import signal; signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", held, path], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        engine = pod.engine("engine-0", flags=over_tcp(server, pod))
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


def test_first_launch_that_cannot_look_for_an_earlier_one_is_repeated(pod, server):
    """Goal: an engine that is not launched yet looks again. Method: it waits for the holder of a
    witness of an earlier launch; then it can open nothing, and meanwhile the holder ends."""
    path = free_witness(str(pod.directory), witness.new_incarnation("engine-0"))
    with open(path) as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        engine = pod.engine("engine-0", flags=over_tcp(server, pod))
        until(lambda: (engine.status() or {}).get("problems"), "the holder to be named")
        with observer(engine) as watcher, descriptors_below(NONE, engine.process.pid):
            watcher.problem("look for processes of an earlier launch")
            fcntl.flock(stream, fcntl.LOCK_UN)
            assert watcher.status()["engine"]["state"] == "dead"
        engine.until("active")


def test_leaving_while_it_waits_for_what_was_left(pod, server):
    """Goal: SIGTERM is obeyed then, too. Method: as above, and SIGTERM."""
    path = free_witness(str(pod.directory), witness.new_incarnation("engine-0"))
    with open(path) as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        engine = pod.engine("engine-0", flags=over_tcp(server, pod))
        until(lambda: (engine.status() or {}).get("problems"), "the stray to be named")
        engine.terminate()
        assert engine.wait() == 0


def test_certificates_let_an_engine_in_and_a_stranger_s_do_not(pod, tmp_path, loop):
    """Goal: mutual TLS by the flags, and no silent wait with the wrong files.
    Method: two engines, one with a certificate of another CA; a server that speaks TLS."""
    (tmp_path / "other").mkdir()
    ours, theirs = Authority(tmp_path), Authority(tmp_path / "other")
    server = LeaseServer(LEASE_MS, auto=("active",))
    loop.run(server.start(security=ours.issue("lockserver")))
    try:
        engines = []
        for number, authority in enumerate((ours, theirs)):
            files = authority.issue(f"engine-{number}")
            flags = tls_flags(Security(files.cert, files.key, ours.path), "lockserver-")
            name = f"engine-{number}"
            engines.append(pod.engine(name, flags=over_tcp(server, pod, flags)))
        engines[0].until("active")
        engines[1].until("standby")
        reason = until(
            lambda: (
                found
                if "cannot be reached: " in (found := engines[1].status()["engine"]["reason"])
                else None
            ),
            "the reason to be said",
        )
        assert server.address in reason
        assert engines[1].status()["lock"]["lease"]["valid_for_ms"] == 0
    finally:
        loop.run(server.stop())
