"""Goal: whichever container dies, the Service lists an address that answers.

Method: a model of the kubelet's readiness over the rendered manifests. A pod is Ready only while
each of its containers, sidecars included, runs, has passed its startup probe and is ready; one
without a readiness probe is ready only while it runs. A dead container starts again after 0, 10,
20, 40 … 300 s.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.manifests import (
    IN_ONE_POD,
    NODES,
    OVERLAYS,
    Document,
    containers,
    documents,
    needs_kubectl,
    render,
)

DEATHS = 8
START_S = 1.0  # from a container's start to its probes' first success, at least
WITH_REPLICAS = "components: [../deploy/components/replicas]\n"
# Of `kill -9` on a real cluster, with the manifests of before: 0.8 to 2.7 s, 13 to 16 s, 26 s.
AWAY_S = [restart_s + START_S for restart_s in (0, 10, 20, 40, 80, 160, 300, 300)]


class PodModel:
    """One pod as its kubelet sees it."""

    def __init__(self, spec: Document) -> None:
        sidecars = [e for e in spec.get("initContainers", []) if e.get("restartPolicy") == "Always"]
        self._deaths = {each["name"]: 0 for each in (*sidecars, *spec["containers"])}
        self._ready = {*self._deaths}  # those that run, and whose probes, if any, have passed

    @property
    def is_ready(self) -> bool:
        return self._ready == {*self._deaths}

    def die(self, name: str) -> float:
        """The container ends; after how many seconds it runs and answers again."""
        self._ready.remove(name)
        deaths = self._deaths[name]
        self._deaths[name] += 1
        return START_S + (min(10 * 2 ** (deaths - 1), 300) if deaths else 0)

    def start(self, name: str) -> None:
        self._ready.add(name)


def service_of(found: list[Document]) -> Document:
    """The one that balances requests. Headless ones only give names to pods."""
    services = (each["spec"] for each in found if each["kind"] == "Service")
    (service,) = (each for each in services if each.get("ports", [{}])[0].get("name") == "http")
    return service


def workload_of(found: list[Document]) -> Document:
    """What makes the pods that the Service selects."""
    selector = service_of(found)["selector"]
    kinds = ("Deployment", "StatefulSet")
    made = (each["spec"] for each in found if each["kind"] in kinds)
    (spec,) = (e for e in made if e["selector"]["matchLabels"].items() <= selector.items())
    return spec


def is_published(found: list[Document]) -> bool:
    return service_of(found).get("publishNotReadyAddresses", False) is True


def seconds_without_address(found: list[Document], name: str) -> list[float]:
    """For how long the Service lists no pod, at each death of the first pod's container."""
    made = workload_of(found)
    pods = [PodModel(made["template"]["spec"]) for _ in range(made["replicas"])]
    away = []
    for _ in range(DEATHS):
        assert all(pod.is_ready for pod in pods)
        back_s = pods[0].die(name)
        assert not pods[0].is_ready
        listed = [pod for pod in pods if pod.is_ready or is_published(found)]
        away.append(0.0 if listed else back_s)
        pods[0].start(name)
    return away


@pytest.mark.parametrize("overlay", IN_ONE_POD)
def test_death_of_a_container_takes_no_pod_out_of_its_service(overlay: str):
    """With the flag never, and without it at every death of any container, the standby's too."""
    found = documents(overlay)
    names = {each["name"] for each in containers(overlay)}
    assert {name: seconds_without_address(found, name) for name in names} == dict.fromkeys(
        names, [0.0] * DEATHS
    )
    del service_of(found)["publishNotReadyAddresses"]
    assert {name: seconds_without_address(found, name) for name in names} == dict.fromkeys(
        names, AWAY_S
    )


@needs_kubectl
@pytest.mark.parametrize("overlay", IN_ONE_POD)
def test_replicas_list_only_pods_that_are_ready(own: Path, overlay: str):
    """Goal: requests go to a pod that serves, and a pod that ends gets none. Method: the component
    on each overlay, with the same deaths; the flag, and the sleep of each container that drains."""
    found = render(own, f"resources: [../deploy/overlays/{overlay}]\n{WITH_REPLICAS}")
    assert not is_published(found)
    made, alone = workload_of(found), workload_of(documents(overlay))
    spec, grace = made["template"]["spec"], "terminationGracePeriodSeconds"
    assert made["replicas"] == 2
    for container in containers(overlay):
        away = seconds_without_address(found, container["name"])
        assert away == [0.0] * DEATHS
    sleep = {"preStop": {"sleep": {"seconds": 5}}}
    assert [each["lifecycle"] for each in spec["containers"]] == [sleep] * len(spec["containers"])
    assert spec[grace] == alone["template"]["spec"][grace] + 5
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["labelSelector"] == made["selector"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_flag_is_for_a_single_pod_alone(overlay: str):
    """Goal: no request goes to a pod that loads or ends while another serves. Method: the flag
    against the number of pods; only pods without it wait before they end."""
    found = documents(overlay)
    made = workload_of(found)
    assert is_published(found) == (made["replicas"] == 1) == (overlay != NODES)
    waits = ["lifecycle" in each for each in made["template"]["spec"]["containers"]]
    assert waits == [overlay == NODES] * len(waits)
