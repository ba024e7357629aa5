"""Goal: whatever happens to a process of the gateway, no client is refused, nothing is forgotten.

Method: real processes, killed, stopped, and out of descriptors; children that only answer with
their pid.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable

import pytest

from gateway.messages import CONTROL, StatusMsg, StatusReplyMsg
from plumbing.pod.paths import gateway_socket
from plumbing.wire.blocking import BlockingClient
from tests.gateway.gateways import READ_S, GatewayProcess, LockServer, Stream, ended, who
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


def test_a_killed_spare_is_replaced_and_nobody_notices(gateway: GatewayProcess):
    """Goal: the next death finds a spare. Method: SIGKILL of the one that waits."""
    serving, spare = gateway.child(), gateway.spare()
    os.kill(spare, signal.SIGKILL)
    until(lambda: (gateway.status()["spare"] or {}).get("pid", spare) != spare, "another spare")
    until(gateway.has_spare, "it to be ready")
    assert gateway.child() == serving


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


def test_a_restarted_lock_server_gets_its_socket_back_while_requests_are_answered(
    gateway: GatewayProcess, lock_server: LockServer
):
    """Goal: the lock server may be away for long. Method: SIGKILL of it, requests in between, and
    another one on the same address."""
    serving = gateway.child()
    lock_server.kill()
    until(lambda: gateway.status()["lock_server"]["connected"] is False, "the loss to be seen")
    assert "no lock server" in gateway.status()["problems"][0]
    assert gateway.get("ready")[1]["reason"] == "no_engine"  # accepting is not what is missing
    assert who(gateway.port) == serving
    lock_server.start()
    until(lambda: gateway.status()["lock_server"]["connected"], "the new one")
    until(lambda: gateway.status()["problems"] == [], "the problem to be over")
    assert who(gateway.port) == serving
    until(lambda: lock_server.status()["service"]["active"]["state"] == "lent", "the hand-back")


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
