"""Goal: the overlay of engines on two nodes says what lock server and engines need of each other.

Method: the rendered file as data, against our own programs: their option parser, the files that the
key and the certificates are, a lock server for the probe.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from gateway.server.hop import FRONT, POD
from plumbing.errors import UsageError
from plumbing.service.config import resolve
from plumbing.wire import certificates
from plumbing.wire.tcp import Security
from plumbing.wire.tcp_address import TcpAddress
from tests.deploy.manifests import (
    FLEETS,
    FRONTS,
    LOCK_POD,
    MONITORING,
    NODES,
    OF_PODS,
    OVERLAYS,
    Document,
    block,
    containers,
    documents,
    environment,
    needs_kubectl,
    of_program,
    one,
    pod_spec,
    render,
    selects,
    using,
    words,
    workload,
)
from tests.deploy.test_manifests import PROGRAMS

FILES = ("tls.crt", "tls.key", "ca.crt")


class Settled(Exception):
    """What a command would run with."""


def settings(pod: str, container: Document, index: int = 0) -> dict[str, Any]:
    """What the container's program makes of its flags and its environment, by setting."""
    program, verb, *rest = words(pod, container)
    rest = rest[: rest.index("--")] if "--" in rest else rest
    command, env = PROGRAMS[program].commands[verb], environment(pod, container, index)

    def settle(declared: Any, flags: Any) -> None:
        raise Settled(resolve(declared, flags))

    with mock.patch("plumbing.pod.cli.resolve", settle):
        said = CliRunner(env=env).invoke(command, rest)
    assert isinstance(said.exception, Settled), f"{container['name']}: {said.output}"
    found: dict[str, Any] = said.exception.args[0]
    return found


def test_only_one_lock_server_and_its_state_outlives_its_pod():
    """Goal: never two at once, and no token twice. Method: the strategy, the volume's mode, and
    that the directory is on it."""
    spec = workload(LOCK_POD)["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    volumes = {each["name"]: each for each in spec["template"]["spec"]["volumes"]}
    (container,) = containers(LOCK_POD)
    directory = settings(LOCK_POD, container)["dir"]
    (name,) = (m["name"] for m in container["volumeMounts"] if directory.startswith(m["mountPath"]))
    claim = one(NODES, "PersistentVolumeClaim", volumes[name]["persistentVolumeClaim"]["claimName"])
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    # Engines could not reach it if it were to be Ready only when one of them is active.
    assert container["readinessProbe"]["httpGet"]["path"] == "/live"


def test_only_engines_reach_the_port_of_the_lock():
    """Goal: strangers are kept out twice. Method: the policy's rules, and the port that each is
    about."""
    policy = one(NODES, "NetworkPolicy", "understudy-lockserver")["spec"]
    assert selects(policy, LOCK_POD)
    assert policy["policyTypes"] == ["Ingress"]
    about_lock = [
        rule
        for rule in policy["ingress"]
        if {"port": "lock"} in rule.get("ports", [{"port": "lock"}])
    ]
    (rule,) = about_lock
    assert [port["port"] for port in rule["ports"]] == ["lock"]
    (source,) = rule["from"]
    assert set(source) == {"podSelector"}
    assert selects(source, NODES)
    assert not selects(source, LOCK_POD)
    (other,) = (rule for rule in policy["ingress"] if rule not in about_lock)
    assert other["from"] == MONITORING
    assert [port["port"] for port in other["ports"]] == ["lockserver"]


def key_files(pod: str) -> list[tuple[Document, Document]]:
    """Of each container that has a key: where its volume comes from, and how it is mounted."""
    volumes = {each["name"]: each for each in pod_spec(pod)["volumes"]}
    return [
        (volumes[mount["name"]]["secret"], mount)
        for container in containers(pod)
        for mount in container["volumeMounts"]
        if "secret" in volumes[mount["name"]]
    ]


PAIR = ("tls_cert", "tls_key", "tls_ca")


@pytest.mark.parametrize(
    ("pod", "program", "secret_name", "names"),
    [
        (NODES, "engine", "understudy-lock-engine", [f"lockserver_{each}" for each in PAIR]),
        (LOCK_POD, "lockserver", "understudy-lock-server", PAIR),
        *((fleet, "gateway", "understudy-fleet-pod", ["fleet_tls"]) for fleet in FLEETS),
        *((front, "gateway", "understudy-fleet-front", ["fleet_tls"]) for front in FRONTS),
    ],
)
def test_certificates_are_where_the_program_looks_and_nobody_else_can_read_them(
    pod: str, program: str, secret_name: str, names: Sequence[str]
):
    """Goal: each end finds its own pair. Method: the settings, files or a directory; the mount, the
    Secret's name and mode."""
    having, secrets = of_program(pod, program), key_files(pod)
    assert len(secrets) == len(having)
    for container, (secret, mount) in zip(having, secrets, strict=True):
        assert secret == {"secretName": secret_name, "defaultMode": 0o400}
        assert mount["readOnly"] is True
        place, config = mount["mountPath"], settings(pod, container)
        files = [f"{place}/{file}" for file in FILES] if len(names) > 1 else [place]
        assert [config[name] for name in names] == files
        assert sorted(one(pod, "Secret", secret_name)["data"]) == sorted(FILES)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_usable_key_is_in_the_repository(overlay: str, tmp_path: Path):
    """Goal: who forgets to make certificates has a lock server that does not start, not one whose
    key is public. Method: what the rendered file has, to the code that reads certificates."""
    secrets = [each for each in documents(overlay) if each["kind"] == "Secret"]
    assert len(secrets) == (2 if overlay in (NODES, *FLEETS) else 0)
    for secret in secrets:
        for name, value in secret["data"].items():
            path = tmp_path / name
            path.touch(0o600)
            path.write_bytes(base64.b64decode(value))
        with pytest.raises(UsageError, match=r"wire\.bad_certificate"):
            Security(*(str(tmp_path / name) for name in FILES)).server_context()


def test_requests_go_to_the_pod_whose_engine_is_active():
    """Goal: engines on several nodes are one service. Method: the one probe of readiness is about
    the address on which every engine listens while it is active; ids differ between pods."""
    (probe,) = (e["readinessProbe"] for e in containers(NODES) if "readinessProbe" in e)
    port = probe["tcpSocket"]["port"]
    ids = []
    for index in range(workload(NODES)["spec"]["replicas"]):
        for container in of_program(NODES, "engine"):
            config = settings(NODES, container, index)
            assert config["service_address"] == f"0.0.0.0:{port}"
            ids.append(config["engine_id"])
    assert len(set(ids)) == len(ids) == 4


# ------------------------------------------------------------------ what people make of it


@needs_kubectl
@pytest.mark.parametrize(
    ("page", "folder", "made", "ends"),
    [
        ("kubernetes.md", "lock", (["understudy-lockserver"],), ("lockserver", "engine")),
        ("fleet.md", "fleet", ([POD], "pod", "front"), ("pod", "front")),
    ],
)
def test_certificates_of_ones_own_replace_ours_as_the_page_says(
    own: Path, page: str, folder: str, made: tuple[Any, ...], ends: tuple[str, ...]
):
    """Goal: the ways that docs/kubernetes.md and docs/fleet.md show work. Method: the function of
    their commands, and their overlays."""
    certificates.create(str(own / folder), *made)
    text = block(page, "behavior: replace").replace("../", "../deploy/overlays/")
    found = {e["metadata"]["name"]: e["data"] for e in render(own, text) if e["kind"] == "Secret"}
    assert len(found) == len(ends)
    for end in ends:
        data = found[f"understudy-{folder}-{end.removeprefix('lock')}"]
        assert {file: base64.b64decode(value) for file, value in data.items()} == {
            file: (own / folder / end / file).read_bytes() for file in FILES
        }


@needs_kubectl
@pytest.mark.parametrize(
    ("overlay", "component", "names"),
    [
        (NODES, "lock-tls", {"lock-server": "server auth", "lock-engine": "client auth"}),
        ("fleet", "fleet-tls", {"fleet-pod": "server auth", "fleet-front": "client auth"}),
    ],
)
def test_certificates_of_a_manager_in_place_of_ones_own(
    own: Path, overlay: str, component: str, names: dict[str, str]
):
    """Goal: the component leaves no Secret, and what is in its place fits. Method: render it with
    ours; each pod's volume is of a certificate that the manager issues, for the names that are
    checked."""
    found = render(own, using(overlay, component))
    assert not [each for each in found if each["kind"] == "Secret"]
    made = [each["spec"] for each in found if each["kind"] == "Certificate"]
    issued = {each["secretName"].removeprefix("understudy-"): each for each in made}
    assert {name: ", ".join(issued[name]["usages"]) for name in names} == names
    volumes = [
        volume["secret"]
        for each in found
        if each["kind"] in OF_PODS
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    ]
    assert {each["secretName"].removeprefix("understudy-") for each in volumes} == {*names}
    assert {each["defaultMode"] for each in volumes} == {0o400}
    if overlay == NODES:
        engine, _ = of_program(NODES, "engine")
        address = TcpAddress.parse(settings(NODES, engine)["lockserver_socket"])
        assert address.host in issued["lock-server"]["dnsNames"]
    else:
        assert issued["fleet-pod"]["dnsNames"] == [POD]
        assert issued["fleet-front"]["dnsNames"] == [FRONT]
