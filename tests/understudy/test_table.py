"""The table of containers: what a user's flags change in it; and the ports of a pod.

`tests/deploy/test_table.py` compares the table with the manifests.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from plumbing.errors import UnderstudyError
from understudy.pod.ports import Ports, check_ports, free_pod_ports, free_ports
from understudy.pod.table import LocalPod


def test_pod_on_gpus_takes_those_that_are_there_and_all_of_their_memory():
    """Goal: `--memory cuda`. Method: the memory service's command line, with and without a limit;
    and where probes listen, of all parts."""
    pod = LocalPod(Path("/run/understudy"), Path("/m"), memory="cuda", http_host="0.0.0.0")
    lock, gms, gateway, *engines = pod.containers()
    assert "--memory=cuda" in gms.command
    assert not [word for word in gms.command if word.startswith("--device")]
    for container in (lock, gms, gateway, *engines):
        assert container.env["UNDERSTUDY_HTTP_HOST"] == "0.0.0.0"
        assert container.startup is not None
        assert container.startup.url.startswith("http://127.0.0.1:")
    limited = replace(pod, device_bytes="8GiB").containers()[1]
    assert "--device-bytes=8GiB" in limited.command


def test_free_ports_are_for_nobody_else():
    """Goal: drills beside a running pod. Method: all ports of one pod are distinct, unused, and
    none that the kernel gives to a client."""
    ports = free_pod_ports(engines=3)
    assert len(set(ports.all())) == 7
    check_ports(ports)
    given_away_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports.all()) < given_away_from
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.service))
        taken.listen()
        assert ports.service not in free_ports(2)


def test_check_ports_names_the_one_that_is_taken():
    """Goal: cause and fix in one sentence. Method: a real listener on one of them."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnderstudyError, match=rf"port {port} .*--service-port") as caught:
            check_ports(Ports(service=port))
        assert caught.value.code == "pod.port_in_use"
