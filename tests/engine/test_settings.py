"""Which settings of `engine run` go together, for a lock on this host and for one over TCP."""

from __future__ import annotations

import pytest

from engine.supervisor.settings import OPTIONS, settle
from plumbing.errors import UsageError
from plumbing.service.config import resolve
from plumbing.wire.tcp_address import TcpAddress
from tests.plumbing.wire.certificates import shared

CERTIFICATES = {
    "lockserver_tls_cert": shared().cert,
    "lockserver_tls_key": shared().key,
    "lockserver_tls_ca": shared().ca,
}
TCP = {"lockserver_socket": "tcp://127.0.0.1:9500", **CERTIFICATES}
SERVES = {**TCP, "service_address": "127.0.0.1:8000"}


def settled(**flags):
    return settle(resolve(OPTIONS, flags, {}), ["backend"], "/run/understudy")


def test_over_tcp_an_engine_serves_on_its_own_address():
    """Goal: it has a numeric host. Method: names that this host knows."""
    settings = settled(**SERVES)
    assert settings.is_remote
    assert settings.service_address == TcpAddress("127.0.0.1", 8000)
    named = settled(**TCP, service_address="localhost:8000").service_address
    assert named in (TcpAddress("127.0.0.1", 8000), TcpAddress("::1", 8000))
    assert settled(**TCP, service_address="[::]:8000").service_address == TcpAddress("::", 8000)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (TCP, "engine.no_service_address"),
        ({"engine_id": "../engine-0"}, "engine.bad_id"),
        ({"service_address": "127.0.0.1:8000"}, "engine.only_over_tcp"),
        ({"lockserver_tls_key": "/key"}, "engine.only_over_tcp"),
        ({**SERVES, "service_address": "8000"}, "engine.bad_service_address"),
        ({**SERVES, "service_address": "127.0.0.1:0"}, "engine.bad_service_address"),
        ({**SERVES, "service_address": "no.such.host.invalid:80"}, "engine.bad_service_address"),
        ({**SERVES, "lockserver_socket": "tcp://nowhere"}, "wire.bad_address"),
        ({**SERVES, "lockserver_tls_key": None}, "wire.incomplete_security"),
        ({**SERVES, "lockserver_tls_key": "/no/such/key"}, "wire.file"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, code):
    """Goal: a wrong combination is found at the start, and the sentence names the way out.
    Method: one at a time."""
    with pytest.raises(UsageError) as refused:
        settled(**flags)
    assert refused.value.code.startswith(code)
    assert len(refused.value.message) > 40
