"""The table of containers: what a user's flags change in it; and the ports of a pod.

`tests/deploy/test_table.py` compares the table with the manifests.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from plumbing.errors import UnderstudyError
from plumbing.service.config import resolve
from understudy.cli.settings import UP_OPTIONS, pod_of
from understudy.drill.clients import inside_target
from understudy.pod.ports import Ports, check_ports, free_offset, free_pod_ports
from understudy.pod.table import LocalPod, starts


def test_pods_of_a_fleet_share_no_port_and_their_front_has_those_of_the_one_pod():
    """Method: the command line and the environment of each container."""
    ports, arguments = Ports().moved(500), ("--seed=1",)
    home = Path("/run/understudy")
    pod = LocalPod(home, None, ports, host="0.0.0.0", backend_args=arguments)
    *pods, front = pod.fleet(3, 500, ("--backend=vllm",))
    assert "--listen=0.0.0.0:8500" in front.command
    assert "--pods=@/run/understudy/pods" in front.command
    flags = [dict(word.split("=", 1) for word in it.command if "=" in word) for it in pods]
    assert [it["--dir"] for it in flags] == [f"/run/understudy/pod-{n}" for n in range(3)]
    assert [it["--port-offset"] for it in flags] == ["600", "700", "800"]
    assert [it["--service-port"] for it in flags] == ["8600", "8700", "8800"]
    assert {it["--host"] for it in flags} == {"127.0.0.1"}
    assert [it.env["UNDERSTUDY_HOP"] for it in pods] == [
        f"127.0.0.1:{8443 + offset}" for offset in (600, 700, 800)
    ]
    assert all(it.command[-3:] == ("--backend=vllm", "--", "--seed=1") for it in pods)
    assert [[it.name for it in group] for group in starts([*pods, front])] == [
        ["pod-0", "pod-1", "pod-2"],
        ["front"],
    ]


def test_addresses_of_ipv6_have_brackets():
    pod = LocalPod(Path("/d"), Path("/m"), host="::1", http_host="::1")
    server, *_ = pod.containers()
    assert "--service=active=[::1]:8000" in server.command
    assert server.startup is not None
    assert server.startup.url == "http://[::1]:9400/live"
    assert inside_target("[::1]:8000").address == "[::1]:8000"


def test_free_ports_are_for_nobody_else():
    """Goal: drills beside a running pod. Method: all ports of one pod are distinct, unused, and
    none that the kernel gives to a client."""
    ports = free_pod_ports(has_pool=True)
    assert len(set(ports.all())) == 7
    check_ports(ports)
    given_away_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports.all()) < given_away_from
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.service))
        taken.listen()
        with pytest.raises(UnderstudyError):
            check_ports(ports)


def test_flags_of_a_fleet_reach_each_pod_as_they_were_given(tmp_path: Path):
    """Goal: `--replicas` beside any other flag. Method: lists, repeated flags, arguments of the
    backend; what the fleet says itself, and what nobody said, is left out."""
    given = {
        "dir": "/elsewhere",
        "replicas": "2",
        "port_offset": str(free_offset(3)),
        "device_bytes": "1GiB,2KiB",
        "tensor_parallel": "2",
        "http_allowed_host": ("a.example", "b.example"),
    }
    config = resolve(UP_OPTIONS, given, {})
    prepare = pod_of(config, ("--seed=1",))
    pod, _, _ = asyncio.run(prepare(tmp_path, lambda line: None)).containers
    flags = [each for each in pod.command if each.startswith("--")]
    assert [it for it in flags if it.startswith(("--device", "--tensor", "--http"))] == [
        *("--device-bytes=1073741824,2048", "--tensor-parallel=2"),
        *("--http-allowed-host=a.example", "--http-allowed-host=b.example"),
    ]
    assert flags[-1] == "--seed=1"
    assert not [each for each in flags if each.startswith("--memory")]
    (model,) = (each for each in flags if each.startswith("--model"))
    assert model == f"--model={tmp_path}/random-model"
    assert len((tmp_path / "pods").read_text().split()) == 2
