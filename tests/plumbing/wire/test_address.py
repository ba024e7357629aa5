"""Addresses: what is one, and that they are shown as they are read."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plumbing.errors import UsageError
from plumbing.wire.tcp_address import TcpAddress


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:7443", "127.0.0.1", 7443),
        ("tcp://localhost:0", "localhost", 0),
        ("tcp://[::1]:65535", "::1", 65535),
        ("tcp://[fe80::1%eth0]:7443", "fe80::1%eth0", 7443),
        ("tcp://lock_server.prod.svc:7443", "lock_server.prod.svc", 7443),
    ],
)
def test_address_round_trips(text: str, host: str, port: int):
    address = TcpAddress.parse(text)
    assert address == TcpAddress(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "tcp://", "localhost:7443", "tcp://localhost", "tcp://:7443", "udp://localhost:1"),
        *("tcp://localhost:65536", "tcp://localhost:-1", "tcp://localhost:x", "tcp://[]:1"),
        *("tcp://::1:7443", "tcp://[lock]:1", "tcp://user@lock:1", "tcp://lock:1/path"),
        *(
            "tcp://lock:1 ",
            "tcp://a,b:1",
            "tcp://lock..local:1",
            f"tcp://{'x' * 64}:1",
            "tcp://lock:1\n",
        ),
    ],
)
def test_malformed_address_is_refused_with_the_right_form(text: str):
    with pytest.raises(UsageError, match="tcp://HOST:PORT") as caught:
        TcpAddress.parse(text)
    assert caught.value.code == "wire.bad_address"


@given(st.text(max_size=40))
@example("[::1]:1")
def test_any_string_is_an_address_or_refused(text: str):
    """Goal: no string raises anything but a usage error."""
    try:
        address = TcpAddress.parse(f"tcp://{text}")
    except UsageError:
        return
    assert TcpAddress.parse(str(address)) == address
