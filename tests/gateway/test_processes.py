"""Goal: whatever happens to a process of the gateway, no client is refused, nothing is forgotten.

Method: real processes, killed, stopped, and out of descriptors; children that only answer with
their pid.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.messages import CONTROL, StatusMsg, StatusReplyMsg
from plumbing.errors import GivenUpError
from plumbing.pod.paths import gateway_socket
from plumbing.wire.blocking import BlockingClient
from tests.gateway.gateways import READ_S, GatewayProcess, LockServer, Stream, ended, refusing, who
from tests.gateway.stub_child import FAULT_ENV
from tests.helpers import descriptors_below, until
from tests.lockserver.processes import settled_fds

LOST = "understudy_gateway_lost_requests_total"
RESTARTS = "understudy_gateway_child_restarts_total"
WHOLE = 'understudy_gateway_requests_total{continuation="exact",outcome="whole"}'
PAUSES = "understudy_gateway_pause_seconds_count"


def test_a_killed_child_is_replaced_by_the_spare_and_counters_do_not_fall(gateway: GatewayProcess):
    """Goal: a death costs its own streams alone. Method: SIGKILL, twice, with a stream in each
    victim and a request at once behind it. No descriptor is left of them."""
    before = {name: gateway.metric(name) for name in (LOST, RESTARTS, WHOLE, PAUSES)}
    open_before = settled_fds(gateway.pid)
    for count in (1, 2):
        until(gateway.has_spare, "a spare")
        victim, spare = gateway.child(), gateway.spare()
        cut = Stream(gateway.port, "/stream?/nowhere")
        assert cut.pid() == victim
        until(lambda: gateway.status()["load"]["in_flight"] == 1, "the stream to be counted")
        os.kill(victim, signal.SIGKILL)
        answered = Stream(gateway.port)
        assert answered.pid() == spare
        assert answered.rest() == b"end\n"
        assert cut.rest() == b""
        whole = before[WHOLE] + count
        until(functools.partial(gateway.counts, WHOLE, whole), "the answer to be counted")
    for name, value in before.items():
        assert gateway.metric(name) == value + 2
    until(gateway.has_spare, "a spare")
    assert settled_fds(gateway.pid) == open_before
    assert gateway.metric('understudy_gateway_pause_seconds_bucket{le="0.02"}') == 0
    assert gateway.metric('understudy_gateway_pause_seconds_bucket{le="0.05"}') > 0


@pytest.mark.slow
def test_a_stopped_child_is_killed_and_its_newcomers_are_answered(gateway: GatewayProcess):
    """Goal: a hang is no worse than a death. Method: SIGSTOP; the limit is 3 s."""
    before = gateway.status()
    victim = before["child"]["pid"]
    os.kill(victim, signal.SIGSTOP)
    waiting = Stream(gateway.port)
    assert waiting.pid() == before["spare"]["pid"]
    until(lambda: ended(victim), "the stopped child to be reaped")
    assert "gateway.child_silent" in gateway.events()
    assert "(stopped); it is killed" in gateway.log()
    waiting.close()


def test_children_die_with_a_killed_parent_and_connections_wait_for_the_next(
    gateway: GatewayProcess,
):
    """Goal: nothing runs unwatched, and the port refuses nobody. Method: SIGKILL of the parent,
    requests while there is none, then another parent."""
    pids = [gateway.child(), gateway.spare()]
    gateway.ends(signal.SIGKILL)
    until(lambda: all(ended(pid) for pid in pids), "the children to be gone")
    waiting = [Stream(gateway.port) for _ in range(3)]
    gateway.start()
    assert {each.pid() for each in waiting} == {gateway.child()}
    for each in waiting:
        each.close()


def test_without_descriptors_the_spare_still_accepts_and_status_says_what_to_raise(
    gateway: GatewayProcess,
):
    """Goal: a shortage stops no takeover, is shown, and ends by itself. Method: the parent may open
    nothing more while its child is killed; the one who asks was connected before."""
    before = gateway.status()
    with BlockingClient(gateway_socket(gateway.directory), CONTROL) as client:

        def problems() -> list[str]:
            reply = client.request(StatusMsg(), timeout_s=READ_S).message
            assert isinstance(reply, StatusReplyMsg)
            return list(reply.document["problems"])

        assert problems() == []
        with descriptors_below(3, gateway.pid):
            os.kill(before["child"]["pid"], signal.SIGKILL)
            assert who(gateway.port) == before["spare"]["pid"]
            shown = "no process of the gateway can be started: this process is at its limit of 3 op"
            until(lambda: any(each.startswith(shown) for each in problems()), "the problem")
            shown = "the socket cannot be copied for the next process that accepts"
            until(lambda: any(each.startswith(shown) for each in problems()), "the other one")
        until(gateway.has_spare, "another spare")
        until(lambda: problems() == [], "the problems to be over")


def test_a_second_gateway_is_refused_and_the_first_serves_on(
    gateway: GatewayProcess, make_gateway: Callable[..., GatewayProcess]
):
    """Goal: two never share a directory. Method: start another."""
    second = make_gateway()
    second.log_path += ".second"
    second.spawn()
    assert second.wait() == 1
    assert f"pid {gateway.pid} holds" in second.log()
    assert who(gateway.port) == gateway.child()


@pytest.fixture
def end(tmp_path: Path) -> Path:
    """A stream ends once this file is there."""
    return tmp_path / "end"


def test_sigterm_accepts_no_more_and_ends_once_the_streams_have(gateway: GatewayProcess, end: Path):
    """Goal: a drain. Method: SIGTERM during a stream; a newcomer waits in the backlog meanwhile and
    is answered by the next gateway."""
    stream = Stream(gateway.port, f"/stream?{end}")
    assert stream.pid() == gateway.child()
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    until(lambda: gateway.status()["stopping"], "the stop to begin")
    until(lambda: not gateway.status()["accepting"], "the child to accept no more")
    assert gateway.get("ready") == (503, {"ok": False, "reason": "stopping"})
    assert gateway.get("live")[0] == 200
    newcomer = Stream(gateway.port)
    end.touch()
    assert stream.rest() == b"end\n"
    assert gateway.wait() == 0
    gateway.start()
    assert newcomer.pid() == gateway.child()
    newcomer.close()


def test_sighup_replaces_the_child_and_loses_no_stream(gateway: GatewayProcess, end: Path):
    """Goal: a restart that nobody sees. Method: SIGHUP during a stream; the fresh child answers
    newcomers while the old one finishes."""
    old, restarts = gateway.child(), gateway.status()["restarts_total"]
    stream = Stream(gateway.port, f"/stream?{end}")
    assert stream.pid() == old
    until(lambda: gateway.status()["load"]["in_flight"] == 1, "the stream to be counted")
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGHUP)
    until(lambda: gateway.has_spare() and gateway.child() != old, "a fresh child")
    (retiring,) = gateway.status()["retiring"]
    assert (retiring["pid"], retiring["in_flight"]) == (old, 1)
    assert who(gateway.port) == gateway.child()
    end.touch()
    assert stream.rest() == b"end\n"
    until(lambda: ended(old), "the old child to exit")
    until(lambda: gateway.status()["retiring"] == [], "its end to be seen")
    assert gateway.status()["restarts_total"] == restarts


def command(gateway: GatewayProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *words, "--dir", gateway.directory],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_restart_child_answers_once_the_fresh_one_accepts_or_says_why_it_cannot(
    gateway: GatewayProcess,
):
    """Goal: a command that tells the truth. Method: once with settings that work, once with a file
    that the fresh child refuses; the one that serves goes on."""
    old = gateway.child()
    done = command(gateway, "restart-child", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["old_pid"], document["new_pid"]) == (old, gateway.child())
    with refusing(gateway.directory):
        failed = command(gateway, "restart-child")
    assert failed.returncode == 1
    assert "the stub refuses its settings" in failed.stderr
    assert f"pid {document['new_pid']}" in failed.stderr
    assert gateway.child() == document["new_pid"]


Make = Callable[..., GatewayProcess]


@pytest.mark.slow
def test_children_that_die_at_their_start_end_the_gateway_for_good(
    make_gateway: Make, lasting: GatewayProcess
):
    """Goal: a reason instead of a loop. Method: a child that exits with 7 before it says a word;
    an init does not start the gateway again."""
    lasting.close()
    gateway = make_gateway()
    gateway.environ[FAULT_ENV] = "exit"
    gateway.spawn()
    assert gateway.wait() == GivenUpError.exit_code
    assert "giving up after 5 attempts in a row" in gateway.log()


def test_settings_that_a_child_refuses_end_the_gateway_at_once(
    make_gateway: Make, lock_server: LockServer, lasting: GatewayProcess
):
    """Goal: one sentence, exit code 2. Method: a child that refuses its settings."""
    lasting.close()
    gateway = make_gateway()
    with refusing(lock_server.directory):
        gateway.spawn()
        assert gateway.wait() == 2
    assert "ended with code 2: the stub refuses its settings; giving up" in gateway.log()
