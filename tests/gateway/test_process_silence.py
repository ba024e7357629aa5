"""A gateway whose parent process is stopped, as the lock server sees it and as clients do."""

from __future__ import annotations

import http.client
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.gateways import READ_S, GatewayProcess, LockServer, Stream, who
from tests.helpers import until

HOLD_MS = 1000  # a child that serves accepts sooner, also on a busy machine


@pytest.mark.slow
def test_stopped_parent_costs_no_request_while_its_child_serves_and_no_answer_afterwards():
    """Goal: the lock server never answers in place of a child that serves, and does as soon as
    nobody does. Method: SIGSTOP of the parent: it is reported, and its child answers for longer
    than `--hold-ms`; SIGSTOP of the child; then both continue."""
    with tempfile.TemporaryDirectory(prefix="gw-") as directory:
        server = LockServer(directory, "--silent-ms", "1500", "--hold-ms", str(HOLD_MS))
        server.start()
        gateway = GatewayProcess(server)
        try:
            gateway.start()
            child = gateway.child()

            def seen() -> dict[str, Any]:
                (found,) = server.status()["gateways"]
                return dict(found)

            def state() -> str:
                return str(server.status()["service"]["active"]["state"])

            assert not seen()["silent"]
            os.kill(gateway.pid, signal.SIGSTOP)
            answered = Stream(gateway.port, f"/stream?{directory}/end")
            assert answered.pid() == child
            until(lambda: seen()["silent"], "the silence to be seen")
            waits = server.lock()["waits"]
            (wait,) = [each for each in waits if each["reason"] == "gateway_silent"]
            assert f"kill -CONT {gateway.pid}" in wait["fix"]
            assert "no connection waits for it" in wait["evidence"]
            begun_ms = wait["for_ms"]
            until(lambda: _silent_ms(server) > begun_ms + 2 * HOLD_MS, "more than --hold-ms")
            assert who(gateway.port) == child
            assert state() == "lent"
            assert seen()["accepting"]
            os.kill(child, signal.SIGSTOP)
            asked = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=READ_S)
            asked.request("GET", "/")
            with asked.getresponse() as refusal:
                assert refusal.status == 503
            asked.close()
            assert seen()["accepting"] is None
            os.kill(child, signal.SIGCONT)
            os.kill(gateway.pid, signal.SIGCONT)
            until(lambda: seen()["accepting"] and not seen()["silent"], "it to be heard")
            until(lambda: server.status()["problem"] is None, "the problem to be over")
            until(lambda: state() == "lent", "the socket to be left to the gateway")
            assert who(gateway.port)
            Path(directory, "end").touch()
            assert answered.rest() == b"end\n"
        finally:
            gateway.close()
            server.close()


def _silent_ms(server: LockServer) -> int:
    waits = server.lock()["waits"]
    return next(int(each["for_ms"]) for each in waits if each["reason"] == "gateway_silent")
