"""Goal: what a careful administrator would ask of the manifests, and no schema does.

Method: the rendered files as data. Each of these tests was written for a change to a rendered file
that everything else had let through: a name that nothing has, a probe that is not there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.supervisor import settings as engine_settings
from tests.deploy.manifests import (
    IN_ONE_POD,
    MONITORING,
    ON_HOST_MEMORY,
    OVERLAYS,
    PODS,
    Document,
    containers,
    documents,
    environment,
    every_container,
    init_containers,
    labels,
    one,
    pod_spec,
    workload,
    workloads,
)

HUNG_GRACE_S = 2.0  # what hangs does not heed SIGTERM
SIDECAR_START_S = 60.0  # imports on a busy node; there is nothing to load
ROLLOUT_MARGIN_S = 60.0
NAME, INSTANCE = "app.kubernetes.io/name", "app.kubernetes.io/instance"


def mounts(container: Document) -> dict[str, Document]:
    """Where each volume is seen, by path."""
    return {each["mountPath"]: each for each in container.get("volumeMounts", [])}


def patience_s(probe: Document) -> float:
    return float(probe["periodSeconds"]) * int(probe["failureThreshold"])


@pytest.mark.parametrize("overlay", PODS)
def test_objects_find_each_other(overlay: str):
    """Goal: no name and no label that nothing has. Method: selectors against the pod's labels,
    references against the objects of the same file."""
    made = [each for workload in workloads(overlay) for each in labels(workload)]
    for document in documents(overlay):
        for selector in selectors(document):
            assert selector.keys() >= {NAME, INSTANCE}
            assert [each for each in made if selector.items() <= each.items()], document["kind"]
    found = {(each["kind"], each["metadata"]["name"]) for each in documents(overlay)}
    assert references(pod_spec(overlay)) <= found
    annotations = workload(overlay)["spec"]["template"]["metadata"].get("annotations", {})
    default = annotations.get("kubectl.kubernetes.io/default-container")
    assert default in {each["name"] for each in containers(overlay)} | (
        {None} if len(containers(overlay)) == 1 else set()
    )


def references(spec: Document) -> set[tuple[str, str]]:
    """The objects that a pod needs, but for the model's volume."""
    found = set()
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for source in container.get("envFrom", []):
            found.add(("ConfigMap", source["configMapRef"]["name"]))
    for claim in spec.get("resourceClaims", []):
        found.add(("ResourceClaimTemplate", claim["resourceClaimTemplateName"]))
    for volume in spec["volumes"]:
        if "secret" in volume:
            found.add(("Secret", volume["secret"]["secretName"]))
        if "configMap" in volume:
            found.add(("ConfigMap", volume["configMap"]["name"]))
        if "persistentVolumeClaim" in volume:
            found.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
    return found - {("PersistentVolumeClaim", "model")}


def selectors(document: Document) -> list[dict[str, str]]:
    """What a document says of the pods that it means."""
    spec = document.get("spec", {})
    found = [spec[name] for name in ("selector", "podSelector") if name in spec]
    rules = [each for rule in spec.get("ingress", []) for each in rule.get("from", [])]
    found += [each["podSelector"] for each in rules if each not in MONITORING]
    return [each.get("matchLabels", each) for each in found]


@pytest.mark.parametrize("overlay", PODS)
def test_every_volume_is_there_and_used(overlay: str):
    """Goal: nothing is mounted that is not there. Method: the names on both sides."""
    mounted = {each["name"] for c in every_container(overlay) for each in mounts(c).values()}
    assert mounted == {each["name"] for each in pod_spec(overlay)["volumes"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_strangers_reach_the_service_port_and_no_other(overlay: str):
    """Goal: probe ports, which the kubelet must reach, are not open to a whole cluster. Method: the
    policy's rules, and that it is about this pod."""
    policy = one(overlay, "NetworkPolicy", "understudy")["spec"]
    made = labels(workload(overlay))
    assert all(policy["podSelector"]["matchLabels"].items() <= each.items() for each in made)
    assert policy["policyTypes"] == ["Ingress"]
    clients, monitoring = policy["ingress"]
    assert clients == {"ports": [{"port": "http"}]}
    assert monitoring == {"from": MONITORING}  # every port: of all parts, and of the model
    ports = {port["name"] for each in containers(overlay) for port in each.get("ports", [])}
    assert "http" in ports


@pytest.mark.parametrize("overlay", PODS)
def test_every_container_is_looked_after(overlay: str):
    """Goal: whatever hangs is restarted, and nothing is restarted that still starts. Method: the
    probes of all containers, a spare engine's too, and the grace of what does not heed SIGTERM."""
    for container in containers(overlay):
        startup, liveness = container["startupProbe"], container["livenessProbe"]
        assert liveness["httpGet"]["path"] == "/live"
        if container["command"][0] == "engine":
            assert patience_s(startup) >= engine_settings.INIT_MS / 1000
        elif overlay != "no-dra":
            assert patience_s(startup) >= SIDECAR_START_S
            assert liveness["terminationGracePeriodSeconds"] <= HUNG_GRACE_S


@pytest.mark.parametrize("overlay", IN_ONE_POD)
def test_a_first_load_is_no_failed_rollout(overlay: str):
    """Goal: `kubectl rollout status` waits as long as an engine may load. Method: the Deployment's
    patience, ten minutes unless given, against the startup probes'."""
    deadline_s = workload(overlay)["spec"]["progressDeadlineSeconds"]
    longest_s = max(patience_s(each["startupProbe"]) for each in containers(overlay))
    assert deadline_s >= longest_s + ROLLOUT_MARGIN_S


@pytest.mark.parametrize("overlay", PODS)
def test_services_are_not_told_of_in_our_variables(overlay: str):
    """Goal: Kubernetes' variable for the port of a Service of our name, UNDERSTUDY_SERVICE_PORT,
    is a setting of ours, and must not be set. Method: the field that leaves such variables out."""
    assert pod_spec(overlay)["enableServiceLinks"] is False


@pytest.mark.parametrize("overlay", PODS)
def test_one_user_without_rights_has_what_it_must_write(overlay: str):
    """Goal: a read-only root that works, for one user who is not root. Method: ids, and what is
    mounted where an engine writes and reads."""
    context = pod_spec(overlay)["securityContext"]
    ids = {context[name] for name in ("runAsUser", "runAsGroup", "fsGroup")}
    assert len(ids) == 1
    assert min(ids) >= 10000
    volumes = {each["name"]: each for each in pod_spec(overlay)["volumes"]}
    for container in containers(overlay):
        if container["command"][0] not in ("engine", "understudy"):
            continue
        mounted = mounts(container)
        assert environment(overlay, container)["HOME"] == "/tmp"
        assert "emptyDir" in volumes[mounted["/tmp"]["name"]]
        assert volumes[mounted["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
        assert mounted["/model"]["readOnly"] is True
        model = volumes[mounted["/model"]["name"]]
        if overlay in ON_HOST_MEMORY:
            assert model["emptyDir"] == {}
        else:
            claim = model["persistentVolumeClaim"]
            assert claim == {"claimName": "model", "readOnly": True}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_to_try_out_writes_its_model_itself(overlay: str, tmp_path: Path):
    """Goal: `kubectl apply -k` and nothing else. Method: the init container's command, run here,
    twice, since a node that restarts runs it again on the same volume."""
    found = init_containers(overlay)
    assert len(found) == (overlay in ON_HOST_MEMORY)
    for container in found:
        *command, place = container["command"]
        (mount,) = mounts(container)
        assert place == mount == "/model"
        assert command[0] == "python3"
        for _ in range(2):
            subprocess.run([sys.executable, *command[1:], str(tmp_path)], check=True)
        assert (tmp_path / "config.json").exists()
