"""A lock server in gateway mode, and gateways, in a directory that a module of tests shares."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests.gateway.gateways import GatewayProcess, LockServer


@pytest.fixture(scope="module")
def lock_server() -> Iterator[LockServer]:
    with tempfile.TemporaryDirectory(prefix="gw-") as directory:
        server = LockServer(directory)
        server.start()
        yield server
        server.close()


@pytest.fixture(scope="module")
def lasting(lock_server: LockServer) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(lock_server)
    yield gateway
    gateway.close()


@pytest.fixture
def gateway(lasting: GatewayProcess) -> GatewayProcess:
    """One that accepts. A test may do anything to it: it heals, or is started again."""
    return lasting.start()


@pytest.fixture
def make_gateway(lock_server: LockServer) -> Iterator[Callable[..., GatewayProcess]]:
    """`make_gateway(*flags)`: one that is not started yet."""
    with contextlib.ExitStack() as stack:

        def make(*flags: str) -> GatewayProcess:
            gateway = GatewayProcess(lock_server, *flags)
            stack.callback(gateway.close)
            return gateway

        yield make
