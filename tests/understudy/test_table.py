"""The table of containers: what a user's flags change in it; and the ports of a pod.

`tests/deploy/test_table.py` compares the table with the manifests.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.config import resolve
from plumbing.service.hosts import ALLOWED_HOST
from understudy.cli.pods import local_pod
from understudy.cli.settings import UP_OPTIONS
from understudy.pod.ports import Ports, check_port, check_ports, free_pod_ports, free_ports
from understudy.pod.table import LocalPod, program


def test_direct_pod_has_no_gateway_and_everybody_knows():
    """Goal: a pod as before there was a gateway. Method: the containers, and what they are told."""
    gateway_pod = LocalPod(Path("/run/understudy"), Path("/models/m"))
    pod = replace(gateway_pod, is_direct=True)
    names = [each.name for each in gateway_pod.containers()]
    assert [each.name for each in pod.containers()] == [n for n in names if n != "gateway"]
    assert {each.env["UNDERSTUDY_DIRECT"] for each in pod.containers()} == {"yes"}
    assert {each.env["UNDERSTUDY_DIRECT"] for each in gateway_pod.containers()} == {"no"}
    flags = {"direct": True, "model": "/tmp"}
    assert local_pod(resolve(UP_OPTIONS, flags, {}), UP_OPTIONS, ()).is_direct


def test_gateways_port_is_not_looked_at_in_direct_mode():
    """Goal: a direct pod starts beside another pod's gateway. Method: a listener on that port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = replace(free_pod_ports(), gateway=taken.getsockname()[1])
        check_ports(ports, is_direct=True)
        with pytest.raises(UnderstudyError, match="--gateway-port"):
            check_ports(ports)


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


def test_ports_that_swap_places_are_not_confused():
    """Goal: each part gets its own port. Method: requests on the lock server's usual port."""
    ports = Ports(service=9400, lockserver=8000)
    lock = LocalPod(Path("/run/understudy"), Path("/m"), ports).containers()[0]
    assert "--service=active=127.0.0.1:9400" in lock.command
    assert lock.env["UNDERSTUDY_HTTP_PORT"] == "8000"


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


def test_no_free_ports_are_a_sentence(monkeypatch):
    """Goal: no endless search. Method: a range of which every port is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr("understudy.pod.ports.OURS", range(port, port + 2))
        with pytest.raises(UnderstudyError, match=f"found no 1 consecutive free ports from {port}"):
            free_ports(1)


def test_check_ports_names_the_one_that_is_taken():
    """Goal: cause and fix in one sentence. Method: a real listener on one of them."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnderstudyError, match=rf"port {port} .*--service-port") as caught:
            check_ports(Ports(service=port))
        assert caught.value.code == "pod.port_in_use"


@pytest.mark.parametrize("address", ["192.0.2.1", "::1"])
def test_address_that_is_not_of_this_machine_is_no_taken_port(address: str):
    """Goal: nobody looks for a second pod in vain. Method: an address of no machine (RFC 5737), and
    one that is not IPv4."""
    with pytest.raises(UnderstudyError, match=r"IPv4 address .* with --host"):
        check_port(free_ports(1)[0], address, "--service-port")


def test_program_that_is_not_installed_is_named():
    """Goal: a sentence instead of FileNotFoundError. Method: a name nobody has."""
    with pytest.raises(UsageError, match="no-such-program"):
        program("no-such-program")


def test_names_of_clients_reach_every_part(tmp_path):
    """Goal: `understudy up` behind a DNS name. Method: the option, each container's environment."""
    flags = {"http_allowed_host": ("a.example", "b.example"), "model": str(tmp_path)}
    pod = local_pod(resolve(UP_OPTIONS, flags, {}), UP_OPTIONS, ())
    for container in pod.containers():
        allowed = resolve((ALLOWED_HOST,), {}, container.env)["http_allowed_host"]
        assert allowed == ("a.example", "b.example")
