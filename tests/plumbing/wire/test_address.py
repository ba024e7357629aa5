"""Addresses: what is one, and that they are shown as they are read."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plumbing.errors import UsageError
from plumbing.wire.tcp_address import TcpAddress

HOSTS = ("127.0.0.1", "localhost", "::1", "fe80::1%eth0", "lock_server.prod.svc")


@pytest.mark.parametrize("host", HOSTS)
def test_address_round_trips(host: str):
    address = TcpAddress(host, 7443)
    assert TcpAddress.parse(str(address)) == address


@given(st.text(max_size=40))
@example("[::1]:1")
@example("user@lock:1")
@example("lock:1/path")
@example("lock:1 ")
@example("a,b:1")
@example(f"{'x' * 64}:1")
def test_any_string_is_an_address_or_refused(text: str):
    """Goal: no string raises anything but a usage error, and an address is all that it says."""
    with contextlib.suppress(UsageError):
        address = TcpAddress.parse(f"tcp://{text}")
        assert str(address) == f"tcp://{text}".lower()
        assert TcpAddress.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", "localhost:7443", "tcp://localhost", "udp://localhost:1"])
def test_without_scheme_or_port_it_is_no_address(text: str):
    with pytest.raises(UsageError, match="tcp://HOST:PORT"):
        TcpAddress.parse(text)
