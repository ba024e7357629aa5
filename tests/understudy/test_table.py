"""The table of containers: what a user's flags change in it; and the ports of a pod.

`tests/deploy/test_table.py` compares the table with the manifests.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from understudy.pod.ports import check_ports, free_pod_ports, free_ports
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
