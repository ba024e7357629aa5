"""Goal: the manifests are valid, are what their sources render to, and keep the pod's promises.

Method: the rendered files as data, against Kubernetes' own schemas and against our code: its flags,
its environment, its probes, its limits. Many of these tests were written for a change to a rendered
file that everything else had let through: a name that nothing has, a probe that is not there.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import click
import kubernetes_validate
import pytest

import engine.cli
import gateway.cli
import gms.cli
import lockserver.cli
import pool.cli
import understudy.cli.main
from engine.core import probes
from engine.supervisor import settings as engine_settings
from gateway.server.settings import OPTIONS as GATEWAY_OPTIONS
from plumbing.service import init
from plumbing.service.config import resolve, size_bytes
from tests.deploy.manifests import (
    DEPLOY,
    FLEETS,
    IN_ONE_POD,
    INIT,
    MONITORING,
    ON_HOST_MEMORY,
    OVERLAYS,
    PODS,
    POOLS,
    RENDERED,
    WITH_CLAIM,
    Document,
    containers,
    documents,
    environment,
    every_container,
    init_containers,
    kubectl,
    labels,
    of_program,
    one,
    pod_spec,
    pool_file,
    selects,
    words,
    workload,
    workloads,
)

PROGRAMS: dict[str, click.Group] = {
    "lockserver": lockserver.cli.main,
    "gms": gms.cli.main,
    "gateway": gateway.cli.main,
    "pool": pool.cli.main,
    "engine": engine.cli.main,
    "understudy": understudy.cli.main.main,
}
PROBES = {
    "lockserver": {"live", "ready"},
    "gms": {"startup", "live", "ready"},
    "gateway": {"startup", "live", "ready"},
    "pool": {"startup", "live", "ready"},
    "engine": set(probes.TABLE),
}
# ------------------------------------------------------------------ they are what they claim to be


@pytest.mark.skipif(kubectl() is None, reason="needs kubectl 1.28 or newer, to render")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rendered_file_is_what_its_sources_render_to(overlay: str):
    """`make manifests` writes them; somebody forgot it where this fails."""
    path = kubectl()
    assert path is not None
    said = subprocess.run(
        [path, "kustomize", str(DEPLOY / "overlays" / overlay)], capture_output=True, check=True
    ).stdout
    assert said.decode() == (RENDERED / f"{overlay}.yaml").read_text()


@pytest.mark.parametrize("version", ["1.34", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str, version: str):
    for document in documents(overlay):
        kubernetes_validate.validate(document, version, strict=True)


# ------------------------------------------------------------------ our code knows what they say


@pytest.mark.parametrize("overlay", PODS)
def test_every_flag_is_taken_by_its_command(overlay: str):
    for container in containers(overlay):
        program, verb, *rest = words(overlay, container)
        assert not [word for word in rest if "$(" in word]
        command = PROGRAMS[program].commands[verb]
        ours = rest[: rest.index("--")] if "--" in rest else rest
        command.make_context(verb, [*ours], resilient_parsing=False)


@pytest.mark.parametrize("overlay", PODS)
def test_every_probe_is_answered_by_the_code(overlay: str):
    for container in containers(overlay):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "httpGet" in container.get(kind, {}):
                asked = container[kind]["httpGet"]
                owner = "engine" if asked["port"].startswith("engine-") else asked["port"]
                assert asked["path"].removeprefix("/") in PROBES[owner]
                assert asked["port"] in ports


HUNG_GRACE_S = 2.0  # what hangs does not heed SIGTERM
SIDECAR_START_S = 60.0  # imports on a busy node; there is nothing to load
ROLLOUT_MARGIN_S = 60.0
GATEWAY_IDLE_BYTES = 192 << 20  # two gateways while one replaces the other, and their init
HANG_FOUND_S = 4.0  # its backend serves meanwhile
STALL_S = 30.0  # a machine that does nothing for so long has other problems
HOLD_S = 10.0
NAME, INSTANCE = "app.kubernetes.io/name", "app.kubernetes.io/instance"


def mounts(container: Document) -> dict[str, Document]:
    """Where each volume is seen, by path."""
    return {each["mountPath"]: each for each in container.get("volumeMounts", [])}


def patience_s(probe: Document) -> float:
    """From a hang to the kubelet's SIGTERM."""
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


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_strangers_reach_the_service_port_and_no_other(overlay: str):
    """Goal: probe ports, which the kubelet must reach, are not open to a whole cluster. Method: the
    rules of the policy that is about the pods which clients reach."""
    serving = f"{overlay}:understudy-front" if overlay in FLEETS else overlay
    name = serving.partition(":")[2] or "understudy"
    policy = one(overlay, "NetworkPolicy", name)["spec"]
    assert selects(policy, serving)
    assert policy["policyTypes"] == ["Ingress"]
    clients, monitoring = policy["ingress"]
    assert clients == {"ports": [{"port": "http"}]}
    assert monitoring == {"from": MONITORING}  # every port: of all parts, and of the model
    ports = {port["name"] for each in containers(serving) for port in each.get("ports", [])}
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


@pytest.mark.parametrize("overlay", WITH_CLAIM)
def test_whoever_opens_a_device_is_in_the_claim(overlay: str):
    """All but the lock server and the gateway; one claim, so that all see the same devices."""
    spec = pod_spec(overlay)
    assert [each["name"] for each in spec["resourceClaims"]] == ["gpus"]
    for container in containers(overlay):
        claims = [each["name"] for each in container["resources"].get("claims", [])]
        opens_none = container["name"] in ("lockserver", "gateway", "pool")
        assert claims == ([] if opens_none else ["gpus"])
    request = one(overlay, "ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"][0]
    count = request["exactly"]["count"]
    if overlay in POOLS:
        assert pool_file(overlay).devices == tuple(map(str, range(count)))
    else:
        assert one(overlay, "ConfigMap")["data"]["TENSOR_PARALLEL"] == str(count)


@pytest.mark.parametrize("overlay", IN_ONE_POD)
def test_readiness_probes_are_as_patient_as_requests(overlay: str):
    """Lock server and gateway say whether the pod serves; a failover makes neither of them not
    ready, as requests wait for longer. Of one container, the gateway's probe is enough: it is not
    ready without an engine. So it is in a pool, where all models may rest."""
    probes = [each["readinessProbe"] for each in containers(overlay) if "readinessProbe" in each]
    asked = [probe["httpGet"] for probe in probes]
    words = [{"path": "/ready", "port": name} for name in ("lockserver", "gateway")]
    assert asked == (words[1:] if overlay in ("no-dra", *POOLS) else words)
    for probe in probes:
        assert patience_s(probe) >= HOLD_S
    for options in (lockserver.cli.SERVE, GATEWAY_OPTIONS):
        assert resolve(options, {}, {})["hold_ms"] == 1000 * HOLD_S


@pytest.mark.parametrize("overlay", [each for each in IN_ONE_POD if each != "no-dra"])
def test_gateway_has_the_memory_that_it_may_hold(overlay: str):
    """Goal: the kernel never kills it for what its own limit allows. Method: the flag against the
    container's limit, with what its processes need when idle."""
    (container,) = of_program(overlay, "gateway")
    (word,) = container["args"]  # of a pool, too: its file is in the environment
    held = size_bytes(word.removeprefix("--memory-bytes="))
    limit, request = (container["resources"][each]["memory"] for each in ("limits", "requests"))
    assert held + GATEWAY_IDLE_BYTES <= size_bytes(f"{limit}B")
    assert size_bytes(f"{request}B") >= GATEWAY_IDLE_BYTES
    assert container["command"] == ["gateway", "serve"]


@pytest.mark.parametrize("pod", PODS)
def test_every_program_runs_below_an_init(pod: str):
    """Goal: no program is PID 1, so no death of one takes the pod out of its Service, and one that
    hangs is restarted in time."""
    spec = pod_spec(pod)
    made = [*spec.get("initContainers", []), *spec["containers"]]
    lasting = [each for each in made if each in spec["containers"] or "restartPolicy" in each]
    assert {each["command"][0] for each in lasting} == {INIT}
    assert init.TICK_S * init.SILENT_TICKS < HANG_FOUND_S


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_stall_of_the_machine_does_not_end_every_container(overlay: str):
    """Goal: liveness probes are the last resort: patient, and no two engines' end at once."""
    for each in containers(overlay):
        assert patience_s(each["livenessProbe"]) >= STALL_S
    engines = [each["livenessProbe"] for each in of_program(overlay, "engine")]
    patience = sorted(map(patience_s, engines))
    assert all(b - a >= STALL_S for a, b in pairwise(patience))


@pytest.mark.parametrize("overlay", IN_ONE_POD)
def test_new_pod_waits_for_the_old_ones_devices(overlay: str):
    spec = workload(overlay)["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert one(overlay, "PodDisruptionBudget", "understudy")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("overlay", PODS)
def test_containers_may_do_little(overlay: str):
    spec = pod_spec(overlay)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # UNDERSTUDY_SERVICE_PORT is a setting of ours
    # Of a pod with one container there is nothing to share.
    assert spec.get("shareProcessNamespace", len(containers(overlay)) > 1) is False
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in every_container(overlay):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"]["memory"]
        assert container["resources"]["limits"]["memory"]
