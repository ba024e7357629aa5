"""Which names a client may use: a page of a foreign name that resolves to the pod reads nothing."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from plumbing.service.hosts import KnownHosts
from tests.plumbing.service.test_http import serving


async def ask(port: int, path: str, **headers: str) -> tuple[str, bytes]:
    """One request with `headers`: the first line of the answer, and the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head.decode().splitlines()[0], body


FOREIGN = (
    "attacker.example",
    "attacker.example.:9400",
    "svc.attacker.example",
    "cluster.local.org",
)
OURS = (
    *("127.0.0.1", "10.1.2.3:9400", "127.1", "[::1]:9400", "[fd00::7]"),
    *("localhost", "LOCALHOST:9400", "localhost.", "pod.localhost"),
    *(
        "understudy-lockserver:9400",
        "understudy.models.svc",
        "understudy.models.svc.cluster.local.",
    ),
)


@pytest.mark.parametrize("host", FOREIGN)
def test_name_that_an_attacker_may_own_reads_nothing_but_probes(host):
    """Goal: DNS rebinding shows nothing of a pod. Method: every path as a rebound page asks for it,
    with the page's own origin, which equals Host, and without."""

    async def main():
        async with serving() as http:
            for path in ("/status", "/metrics", "/events", "/", "/nothing"):
                for origin in ({}, {"Origin": f"http://{host}"}):
                    first, body = await ask(http.port, path, Host=host, **origin)
                    assert " 421 " in first
                    error = json.loads(body)["error"]
                    assert error["code"] == "service.unknown_host"
                    assert "--http-allowed-host" in error["message"]
            first, _ = await ask(http.port, "/live", Host=host)
            assert " 200 " in first

    asyncio.run(main())


@pytest.mark.parametrize("host", OURS)
def test_addresses_and_private_names_are_answered(host):
    """Goal: kubelets, Prometheus, port-forward and curl in a cluster work. Method: their names."""

    async def main():
        async with serving() as http:
            first, _ = await ask(http.port, "/status", Host=host)
            assert " 200 " in first

    asyncio.run(main())


def test_names_given_by_an_option_and_the_machines_own_are_answered(monkeypatch):
    """Goal: an Ingress, and a host's full name. Method: both, in other letters and with a dot."""
    monkeypatch.setattr(socket, "gethostname", lambda: "Node-7.cluster.example.org")

    async def main():
        async with serving(allowed_hosts=["Status.Example.com"]) as http:
            for host in (
                "status.example.COM",
                "status.example.com.:80",
                "node-7.cluster.example.org",
            ):
                first, _ = await ask(http.port, "/status", Host=host)
                assert " 200 " in first
            first, _ = await ask(http.port, "/status", Host="other.example.com")
            assert " 421 " in first

    asyncio.run(main())


def test_request_without_a_host_is_no_browsers():
    assert KnownHosts().has(None)


@pytest.mark.parametrize(
    "host", ["", "a b", "a:b", "attacker.example/", "1.2.3.4.attacker.example"]
)
def test_host_that_is_no_name_or_not_ours_is_refused(host):
    assert not KnownHosts().has(host)
