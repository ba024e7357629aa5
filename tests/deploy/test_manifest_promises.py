"""Goal: the manifests keep the pod's promises: its devices, its memory, its probes' patience.

Method: the rendered files as data, against the limits of our code.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

import lockserver.cli
from engine.core import probes
from engine.core.events import State
from gateway.supervisor.settings import OPTIONS as GATEWAY_OPTIONS
from plumbing.service import init
from plumbing.service.config import resolve, size_bytes
from tests.deploy.manifests import (
    IN_MANY_CONTAINERS,
    IN_ONE_POD,
    INIT,
    OVERLAYS,
    PODS,
    POOLS,
    WITH_CLAIM,
    Document,
    containers,
    environment,
    every_container,
    of_program,
    one,
    pod_spec,
    pool_file,
    workload,
)

GATEWAY_IDLE_BYTES = 192 << 20  # a parent, the child that serves and its spare
HANG_FOUND_S = 4.0  # its backend serves meanwhile
STALL_S = 30.0  # a machine that does nothing for so long has other problems
HOLD_S = 10.0


def seconds_without_grace(probe: Document) -> float:
    """From a hang to the kubelet's SIGTERM."""
    return int(probe["failureThreshold"]) * float(probe["periodSeconds"])


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
        assert probe["periodSeconds"] * probe["failureThreshold"] >= HOLD_S
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


@pytest.mark.parametrize("overlay", IN_MANY_CONTAINERS)
def test_restarted_engine_is_started_at_its_first_probe(overlay: str):
    """Or its startup probe would hold its liveness probe back for as long as it loads: the answer
    is in a state file, on a volume that outlives the container."""
    for state in (State.INIT, State.DEAD):
        view = probes.View(
            state=state,
            was_started=True,
            is_budget_spent=False,
            is_healthy=True,
            is_crash_loop=False,
        )
        assert probes.answer("startup", view).ok
    volumes = {each["name"]: each for each in pod_spec(overlay)["volumes"]}
    for container in of_program(overlay, "engine"):
        probe = container["startupProbe"]
        assert probe["httpGet"]["path"] == "/startup"
        assert "initialDelaySeconds" not in probe
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        directory = environment(overlay, container)["UNDERSTUDY_DIR"]
        (shared,) = (name for path, name in mounts.items() if directory.startswith(path + "/"))
        assert volumes[shared]["emptyDir"]["medium"] == "Memory"


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
        assert seconds_without_grace(each["livenessProbe"]) >= STALL_S
    engines = [each["livenessProbe"] for each in of_program(overlay, "engine")]
    patience = sorted(map(seconds_without_grace, engines))
    assert all(b - a >= STALL_S for a, b in pairwise(patience))


@pytest.mark.parametrize("overlay", IN_ONE_POD)
def test_new_pod_waits_for_the_old_ones_devices(overlay: str):
    spec = workload(overlay)["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert one(overlay, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("overlay", PODS)
def test_containers_may_do_little(overlay: str):
    spec = pod_spec(overlay)
    assert spec["automountServiceAccountToken"] is False
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
