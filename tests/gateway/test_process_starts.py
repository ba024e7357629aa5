"""Goal: a gateway that cannot start says why, and one that must end ends.

Method: real processes whose children fail, or never finish.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from plumbing.errors import GivenUpError
from tests.gateway.gateways import GatewayProcess, LockServer, Stream, refusing
from tests.gateway.stub_child import FAULT_ENV

Make = Callable[..., GatewayProcess]


@pytest.mark.slow
def test_children_that_die_at_their_start_end_the_gateway_for_good(make_gateway: Make):
    """Goal: a reason instead of a loop. Method: a child that exits with 7 before it says a word;
    an init does not start the gateway again."""
    gateway = make_gateway()
    gateway.environ[FAULT_ENV] = "exit"
    gateway.spawn()
    assert gateway.wait() == GivenUpError.exit_code
    assert "giving up after 5 attempts in a row" in gateway.log()


def test_settings_that_a_child_refuses_end_the_gateway_at_once(
    make_gateway: Make, lock_server: LockServer
):
    """Goal: one sentence, exit code 2. Method: a child that refuses its settings."""
    gateway = make_gateway()
    with refusing(lock_server.directory):
        gateway.spawn()
        assert gateway.wait() == 2
    assert "ended with code 2: the stub refuses its settings; giving up" in gateway.log()


def test_a_stream_that_outlasts_the_budget_is_cut(make_gateway: Make):
    """Goal: an end in any case. Method: no time to drain."""
    gateway = make_gateway("--drain-timeout", "0s").start()
    stream = Stream(gateway.port, "/stream?/nowhere")
    assert stream.pid() == gateway.child()
    assert gateway.ends(signal.SIGTERM) == 0
    assert stream.rest() == b""
