"""Goal: the overlays of a fleet say what fronts and pods need of each other.

Method: the rendered files as data, against our own programs and Kubernetes' rules.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.server.pods import PodNames
from plumbing.service.config import duration_s
from tests.deploy.manifests import (
    FLEETS,
    Document,
    containers,
    environment,
    needs_kubectl,
    of_program,
    one,
    one_of,
    pod_spec,
    render,
    selects,
    using,
    words,
    workload,
)
from tests.deploy.test_manifest_nodes import settings
from tests.deploy.test_manifests import PROGRAMS

ENDING_S = 30  # what an engine has, after its pod has left
SERVICE_S = 5  # nodes have forgotten an endpoint by then
each_fleet = pytest.mark.parametrize("fleet", FLEETS)


def front_of(fleet: str) -> str:
    return f"{fleet}:understudy-front"


def gateway_of(pod: str) -> Document:
    (found,) = of_program(pod, "gateway")
    return found


def ports(container: Document) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container["ports"]}


@each_fleet
def test_clients_reach_fronts_and_fronts_reach_pods_ready_or_not(fleet: str):
    """Goal: the restart of a standby takes no pod away. Method: whom the Services select, and where
    the name that a front looks up leads."""
    clients, names = (one(fleet, "Service", f"understudy{end}")["spec"] for end in ("", "-pods"))
    assert selects(clients, front_of(fleet))
    assert not selects(clients, fleet)
    assert "publishNotReadyAddresses" not in clients
    assert selects(names, fleet)
    assert not selects(names, front_of(fleet))
    assert (names["clusterIP"], names["publishNotReadyAddresses"]) == ("None", True)

    front, pod = gateway_of(front_of(fleet)), gateway_of(fleet)
    said = settings(front_of(fleet), front)
    hop = ports(pod)["hop"]
    assert PodNames(said["pods"])._names == [("understudy-pods", hop)]
    assert said["listen"] == f"0.0.0.0:{ports(front)['http']}"
    assert settings(fleet, pod)["hop"] == f"0.0.0.0:{hop}"


@each_fleet
def test_nobody_but_fronts_reaches_a_pod(fleet: str):
    """And Prometheus, as everywhere."""
    policy = one(fleet, "NetworkPolicy", "understudy")["spec"]
    assert selects(policy, fleet)
    rule, _ = policy["ingress"]
    assert rule["ports"] == [{"port": "hop"}]
    ((source, allowed),) = rule["from"][0].items()
    assert source == "podSelector"
    assert len(rule["from"]) == 1
    assert selects({"podSelector": allowed}, front_of(fleet))
    assert not selects({"podSelector": allowed}, fleet)


@each_fleet
def test_pod_leaves_before_anything_of_it_ends(fleet: str):
    """Goal: its streams have moved when the first container stops, and it does not leave for a
    liveness probe that ends one engine. Method: the time of the hook of the gateway and of each
    engine against the grace periods; which is a command of ours."""
    pod, *engines = lasting = [gateway_of(fleet), *of_program(fleet, "engine")]
    assert len(engines) == 2
    for container in lasting:
        assert environment(fleet, container)["UNDERSTUDY_DIR"]
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        slept_s = 0
        if container is not pod:
            said = re.fullmatch(r"sleep (\d+) && exec (.*)", command[2])
            assert said is not None
            assert command[:2] == ["sh", "-c"]
            slept_s, command = int(said[1]), said[2].split()
            assert slept_s > container["livenessProbe"]["terminationGracePeriodSeconds"]
        program, verb, *rest = command
        within = PROGRAMS[program].commands[verb].make_context(verb, rest).params["within"]
        assert (
            slept_s + duration_s(within) + ENDING_S
            == pod_spec(fleet)["terminationGracePeriodSeconds"]
        )
    others = [each for each in containers(fleet) if each not in lasting]
    assert not [each["name"] for each in others if "lifecycle" in each]


@each_fleet
def test_front_is_forgotten_before_it_refuses_and_finishes_its_streams(fleet: str):
    """Goal: a rollout of fronts loses nothing. Method: the sleep, the grace period against what the
    gateway takes, and that one front is there at all times."""
    (front,) = containers(front_of(fleet))
    assert front["lifecycle"] == {"preStop": {"sleep": {"seconds": SERVICE_S}}}
    spec = pod_spec(front_of(fleet))
    drain_s = settings(front_of(fleet), front)["drain_timeout"]
    assert SERVICE_S + drain_s + 2 <= spec["terminationGracePeriodSeconds"] == 3600
    made = workload(front_of(fleet))["spec"]
    assert made["replicas"] == 2
    assert made["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    budget = one(fleet, "PodDisruptionBudget", "understudy-front")["spec"]
    assert budget["maxUnavailable"] == 1
    for pod in (fleet, front_of(fleet)):
        (spread,) = pod_spec(pod)["topologySpreadConstraints"]
        assert spread["labelSelector"] == workload(pod)["spec"]["selector"]


# ------------------------------------------------------------------ what people make of it


@needs_kubectl
def test_front_of_an_instance_asks_the_pods_of_that_instance(own: Path):
    """Goal: a name prefix reaches the front's arguments, which Kustomize does not know."""
    found = render(own, "resources: [../deploy/overlays/fleet]\nnamePrefix: chat-\n")
    made = one_of(found, "Deployment", "chat-understudy-front")
    (front,) = made["spec"]["template"]["spec"]["containers"]
    assert {"name": "PODS", "value": "chat-understudy-pods"} in front["env"]
    assert "chat-understudy-pods" in {each["metadata"]["name"] for each in found}
    assert "--pods=$(PODS):8443" in words("fleet:understudy-front", front | {"env": []})


@needs_kubectl
@pytest.mark.parametrize("overlay", ["pool", "tp8"])
def test_component_makes_a_fleet_of_other_pods(own: Path, overlay: str):
    """Every engine leaves with its pod, however many there are."""
    made = one_of(render(own, using(overlay, "fleet")), "Deployment", "understudy")["spec"]
    assert made["replicas"] == 2
    leaving = of_program("fleet", "engine")[0]["lifecycle"]
    engines = made["template"]["spec"]["containers"]
    assert [each.get("lifecycle") for each in engines] == [leaving] * len(engines)
