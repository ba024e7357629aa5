"""How an engine ends, what it says then, and what it answers while it lives."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from engine import messages as m
from plumbing.errors import GivenUpError, RemoteError
from plumbing.pod.paths import engine_http_socket, engine_socket
from plumbing.service import procfs
from plumbing.wire.blocking import BlockingClient
from tests.engine.pod import QUICK, Engine, environment, program
from tests.helpers import run_command, until

# Hung after a second, although no standby is ready; less would kill healthy ones on a busy machine.
HASTY = ("--answer-ms", "500", "--hang-ms", "1000", "--hang-alone-ms", "1000")


def errors_of(engine: Engine) -> str:
    text = engine.errors.read_text()
    assert "Traceback" not in text
    return text


def test_permanent_fault_ends_with_its_sentence(pod, lock):
    """A backend whose checkpoint is broken: exit code 2, and one sentence."""
    engine = pod.engine("e-0", "--fault", "model.safetensors is cut short", "--permanent")
    assert engine.wait() == 2
    assert errors_of(engine).endswith("error: model.safetensors is cut short [fake.fault]\n")


@pytest.mark.slow
def test_crash_loop_ends_with_a_verdict(pod, lock):
    """Five deaths in a row: exit code 69, and the verdict is the last line on stderr, which a
    kubelet shows as the container's message."""
    engine = pod.engine("e-0", "--crash-at", "launch", flags=QUICK)
    assert engine.wait() == GivenUpError.exit_code
    verdict = errors_of(engine).splitlines()[-1]
    assert "crash loop: 5 deaths within 10 minutes" in verdict
    assert "exited with code 13" in verdict


def test_second_signal_kills_at_once(pod, lock):
    """A backend that never finishes draining: nobody can connect any more; the first SIGTERM waits,
    the second does not. One that comes in the same second is the first one again, from somebody
    else."""
    engine = pod.active("e-0", "--hang-at", "drain")
    pid = engine.pids()["http"]
    engine.terminate()
    engine.until("draining")
    assert engine.get("/ready")[0] == 503
    assert not os.path.exists(engine_http_socket(str(pod.directory), "e-0"))
    engine.terminate()
    assert procfs.is_alive(pid)
    engine.terminate_at_once()
    assert not procfs.is_alive(pid)


def test_engine_ends_after_the_command_that_asked_for_it(pod, lock, directory):
    """Goal: `kubectl exec … engine drain` exits with 0, although the end of the container kills it.
    Method: a client in its place, that stays; a second one, that never leaves."""
    for number in (1, 2):
        engine = pod.active("e-0")
        with BlockingClient(engine_socket(str(directory), "e-0"), m.CONTROL) as client:
            client.request(m.LeaveMsg())
            assert client.receive(timeout_s=60).message == m.OkMsg("exited")
            if number == 2:
                assert engine.wait() == 0
            else:
                assert engine.process.poll() is None
        assert engine.wait() == 0


@pytest.mark.slow
def test_status_command_also_offline(pod, lock):
    """`engine status` asks the engine, then its state file, also of one that a signal has stopped,
    then reports that neither exists, and which engines there are."""
    engine = pod.active("e-0")

    def ask(name: str) -> subprocess.CompletedProcess[str]:
        command = [*program("engine"), "status", "--dir", str(pod.directory), "--engine-id", name]
        return run_command(command, env=environment())

    assert "engine e-0   active since" in ask("e-0").stdout
    engine.process.send_signal(signal.SIGSTOP)
    stopped = ask("e-0")
    engine.process.send_signal(signal.SIGCONT)
    assert (stopped.returncode, "offline view" in stopped.stdout) == (3, True)
    assert f"pid {engine.process.pid}" in stopped.stderr
    engine.terminate()
    engine.wait()
    offline = ask("e-0")
    assert offline.returncode == 3
    assert "dead since" in offline.stdout
    assert "offline view" in offline.stdout
    nobody = ask("nobody")
    assert (nobody.returncode, "engines: e-0" in nobody.stderr) == (3, True)


@pytest.mark.slow
def test_probes_of_a_first_and_of_a_later_life(pod, directory, lock):
    """Before the first standby startup is 503; after a restart of the supervisor it is 200 again
    although the engine is still in init, because the state file remembers."""
    slow = ("--hang-at", "prepare")
    lock.auto = ()
    engine = pod.engine("e-0", *slow)
    engine.until("init")
    assert [engine.get(path)[0] for path in ("/startup", "/live", "/ready")] == [503] * 3
    body = engine.get("/startup")[1]
    assert (body["reason"], body["message"]) == ("never_standby_yet", "loading the model")
    engine.terminate()
    assert engine.wait() == 0

    engine = pod.engine("e-0")
    engine.until("standby")
    assert [engine.get(path)[0] for path in ("/startup", "/live", "/ready")] == [200] * 3
    status, body = engine.get("/serving")
    assert (status, body["reason"]) == (503, "is_standby")
    assert body["message"].startswith("waiting for the lock")
    engine.terminate()
    assert engine.wait() == 0

    engine = pod.engine("e-0", *slow)
    document = engine.until("init")
    assert document["engine"]["number"] == 3
    assert [engine.get(path)[0] for path in ("/startup", "/live")] == [200, 200]
    assert [engine.get(path)[0] for path in ("/ready", "/serving")] == [503, 503]


def test_broken_state_file_is_started_over(pod, lock, directory):
    """Half a state file: the engine starts without memory, says so, and writes a good one."""
    path = directory / "engine_e-0.json"
    path.write_text('{"schema": 1, "memo')
    engine = pod.active("e-0")
    assert "starting without the saved state" in engine.errors.read_text()
    until(lambda: '"active"' in path.read_text(), "a good state file")


def test_control_socket_refuses_strangers(pod, lock):
    """A process that is not of the tree, an old incarnation, an unknown target: each
    gets its code and nothing changes."""
    engine = pod.engine("e-0")
    incarnation = engine.until("active")["engine"]["incarnation"]

    def code_of(message: m.Message) -> str:
        with engine.client() as client, pytest.raises(RemoteError) as caught:
            client.request(message)
        return caught.value.code

    assert code_of(m.RegisterMsg(incarnation, "x", os.getpid())) == "engine.not_of_this_tree"
    assert code_of(m.RegisterMsg("e-0-gone", "x", os.getpid())) == "engine.stale_incarnation"
    assert code_of(m.KillMsg("backend-nobody")) == "engine.unknown_target"
    assert code_of(m.OkMsg()) == "engine.not_a_request"
    assert engine.state == "active"


def test_rehearsed_hang_is_detected_and_never_counts(pod, lock):
    """`stop` in place of `kill`: no process is dead, so the health checks must detect it."""
    engine = pod.engine("e-0", flags=(*QUICK, *HASTY))
    pid = engine.until("active")["backend"]["pids"]["http"]
    with engine.client() as client:
        reply = client.request(m.KillMsg("backend-http", is_stop=True)).message
        assert isinstance(reply, m.KillingMsg)
        assert reply.pid == pid
        with pytest.raises(RemoteError) as caught:
            client.request(m.KillMsg("supervisor", is_stop=True))
    assert caught.value.code == "engine.no_such_rehearsal"
    death = until(lambda: engine.status()["deaths"], "the death")[-1]
    assert (death["cause"], death["is_rehearsed"]) == ("unhealthy", True)
    engine.until("active", number=2)
