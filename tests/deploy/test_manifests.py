"""Goal: the manifests are valid, are what their sources render to, and keep the pod's promises.

Method: the rendered files as data, against Kubernetes' own schemas and against our code: its flags,
its environment, its ports, its probes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

import engine.cli
import gateway.cli
import gms.cli
import lockserver.cli
import pool.cli
import understudy.cli.main
from engine.core import probes
from engine.core.events import State
from engine.supervisor import settings as engine_settings
from engine.supervisor.pool_place import place_in_pool, placed
from engine.supervisor.settings import OPTIONS, settle
from gateway.supervisor.settings import OPTIONS as GATEWAY_OPTIONS
from plumbing.errors import UsageError
from plumbing.part.device_names import write_device_names
from plumbing.service.config import resolve, size_bytes
from tests.deploy.manifests import (
    DEPLOY,
    IN_MANY_CONTAINERS,
    IN_ONE_POD,
    NODES,
    ON_HOST_MEMORY,
    OVERLAYS,
    PODS,
    POOLS,
    RENDERED,
    WITH_CLAIM,
    WITH_ONE_MODEL,
    Document,
    containers,
    documents,
    engines_in_order,
    environment,
    one,
    pod_spec,
    pool_file,
    words,
    workload,
)

KUBECTL_MIN = (1, 28)
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
PORTS = {8000: "http", 9400: "lockserver", 9401: "gms", 9402: "lock", 9403: "gateway", 9404: "pool"}
GATEWAY_IDLE_BYTES = 192 << 20  # a parent, the child that serves and its spare
HANG_FOUND_S = 6.0  # its backend serves meanwhile; a busy machine's supervisor answers late
HOLD_S = 10.0
# Of Kubernetes' and of the system, not ours.
OTHER_ENVIRONMENT = {"HOME"}


def kubectl() -> str | None:
    """A kubectl that renders as ours did, if this machine has one."""
    path = shutil.which("kubectl")
    if path is None:
        return None
    said = subprocess.run(
        [path, "version", "--client", "--output=json"], capture_output=True, check=False
    ).stdout
    version = json.loads(said or b"{}").get("clientVersion", {})
    numbers = (version.get("major", "0"), version.get("minor", "0"))
    major, minor = (int(re.sub(r"\D", "", number) or 0) for number in numbers)
    return path if (major, minor) >= KUBECTL_MIN else None


def of_program(overlay: str, program: str) -> list[Document]:
    return [each for each in containers(overlay) if each["command"][0] == program]


def seconds_until_restart(probe: Document) -> float:
    """From a hang to SIGKILL at the latest: looks, the wait for an answer, the grace."""
    looks = int(probe["failureThreshold"]) * float(probe["periodSeconds"])
    return looks + float(probe["timeoutSeconds"]) + float(probe["terminationGracePeriodSeconds"])


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


def test_overlays_are_those_that_are_promised():
    one_pod = {"single-gpu", "tp2", "tp8", "two-shadows", "no-dra", "cpu"}
    assert set(OVERLAYS) == one_pod | {"multi-node-lock", "pool", "pool-cpu"}


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
def test_every_variable_is_read_by_somebody(overlay: str):
    """By the command itself, or by the container's own flags."""
    for container in containers(overlay):
        program, verb, *_ = container["command"]
        known = {
            name.strip("[]$ ")
            for option in PROGRAMS[program].commands[verb].params
            for name in re.findall(r"[A-Z][A-Z_]+", getattr(option, "help", "") or "")
        }
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container.get("args", []))))
        for name in (each["name"] for each in container.get("env", [])):
            assert name in known | used | OTHER_ENVIRONMENT, (container["name"], name)
        if container.get("envFrom"):
            assert used, f"{container['name']} has a ConfigMap and uses nothing of it"


@pytest.mark.parametrize("overlay", WITH_ONE_MODEL)
def test_every_value_of_the_config_map_is_used(overlay: str):
    text = json.dumps([each.get("args", []) for each in containers(overlay)])
    for name in one(overlay, "ConfigMap")["data"]:
        if overlay not in ON_HOST_MEMORY or name != "KV_CACHE_BYTES":  # not the reference backend's
            assert f"$({name})" in text


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


@pytest.mark.parametrize("overlay", PODS)
def test_ports_are_those_of_the_code(overlay: str):
    seen: list[int] = []
    for container in containers(overlay):
        for port in container["ports"]:
            number, name = port["containerPort"], port["name"]
            seen.append(number)
            if name.startswith("engine-"):
                assert number == engine_settings.PORT_FIRST + int(name.removeprefix("engine-"))
            else:
                assert PORTS[number] == name
    assert len(seen) == len(set(seen))
    assert one(overlay, "Service", "understudy")["spec"]["ports"][0]["targetPort"] == "http"


@pytest.mark.parametrize("overlay", IN_MANY_CONTAINERS)
def test_each_engine_has_its_own_name_port_and_files(overlay: str):
    """In a pool names are the models', and ports are not: whoever scrapes them knows no models."""
    engines = of_program(overlay, "engine")
    count = 3 if overlay == "two-shadows" else 2
    names = [f"engine-{number}" for number in range(count)]
    if overlay in POOLS:
        names = [engine for engine, _ in engines_in_order(overlay)]
    assert [each["name"] for each in engines] == names
    for number, (name, container) in enumerate(zip(names, engines, strict=True)):
        port = f"engine-{number}"
        assert environment(overlay, container)["ENGINE_ID"] == name
        assert container["ports"][0] == {"name": port, "containerPort": 9410 + number}
        assert container["startupProbe"]["httpGet"]["port"] == port
        assert container["livenessProbe"]["httpGet"]["port"] == port
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert mounted["/tmp"] == f"tmp-{name}"


# ------------------------------------------------------------------ a pool


@pytest.mark.parametrize("overlay", POOLS)
def test_every_part_is_told_the_pool_files_models(overlay: str):
    """Goal: no model is in one place and missing in another. Method: the pool file of the ConfigMap
    against the flags of those who do not read it, and the path at which the others do."""
    (lock_server,), (memory,) = (of_program(overlay, each) for each in ("lockserver", "gms"))
    models = list(pool_file(overlay).models)
    assert len(models) == 3
    for container in (lock_server, memory):
        told = [each for each in container["args"] if each.startswith("--model=")]
        assert told == [f"--model={name}" for name in models]
    copies = [each for each in memory["args"] if each.startswith("--host-memory=")]
    sizes = [size_bytes(each.removeprefix("--host-memory=")) for each in copies]
    host_bytes = int(pool_file(overlay).host_memory)
    assert sizes == ([host_bytes] if host_bytes else [])
    limit = size_bytes(f"{memory['resources']['limits']['memory']}B")
    assert host_bytes < limit  # which makes the copies
    (volume,) = (each for each in pod_spec(overlay)["volumes"] if "configMap" in each)
    for program in ("gateway", "pool", "engine"):
        for container in of_program(overlay, program):
            mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
            (name,) = one(overlay, "ConfigMap")["data"]
            path = environment(overlay, container)["UNDERSTUDY_POOL"]
            assert path == f"{mounted[volume['name']]}/{name}"


@pytest.mark.parametrize("overlay", POOLS)
def test_engines_of_a_pool_start_as_the_pool_file_says(overlay: str, tmp_path: Path):
    """Goal: each container is an engine of the file, with its own port. Method: what the engine
    itself makes of the file and of its environment."""
    path = tmp_path / "pool.yaml"
    path.write_text(one(overlay, "ConfigMap")["data"]["pool.yaml"])
    write_device_names(str(tmp_path), ("GPU-0", "GPU-1"))
    for (name, model), container in zip(
        engines_in_order(overlay), of_program(overlay, "engine"), strict=True
    ):
        place = place_in_pool(str(path), name, str(tmp_path))
        config = placed(resolve(OPTIONS, {}, environment(overlay, container)), place, 9410)
        settings = settle(config, [], str(tmp_path))
        assert (settings.engine, settings.model) == (name, model)
        assert settings.http_port == container["ports"][0]["containerPort"]
        # A model below the volume that is mounted for it.
        assert [each for each in place.arguments if each == "/model" or each.startswith("/model/")]


@pytest.mark.parametrize("overlay", POOLS)
def test_pools_state_outlives_its_container(overlay: str):
    (container,) = of_program(overlay, "pool")
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    directory = environment(overlay, container)["UNDERSTUDY_DIR"]
    (shared,) = (name for path, name in mounts.items() if directory.startswith(path + "/"))
    volumes = {each["name"]: each for each in pod_spec(overlay)["volumes"]}
    assert "emptyDir" in volumes[shared]
    assert "readinessProbe" not in container  # without it models that are awake serve on


# ------------------------------------------------------------------ the pod's promises


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


@pytest.mark.parametrize("overlay", ["no-dra", *ON_HOST_MEMORY])
def test_without_a_claim_nobody_asks_for_one(overlay: str):
    assert "claim" not in json.dumps(pod_spec(overlay)).replace(
        "persistentVolumeClaim", ""
    ).replace("claimName", "")
    assert not [each for each in documents(overlay) if each["kind"] == "ResourceClaimTemplate"]


@pytest.mark.parametrize("overlay", IN_ONE_POD)
def test_nothing_takes_a_serving_pod_out_of_its_service(overlay: str):
    """Readiness is the word of the lock server and of the gateway, never of an engine, and both are
    asked with the patience that requests have. Of one container, the gateway's is enough: it is not
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


@pytest.mark.skipif(kubectl() is None, reason="needs kubectl 1.28 or newer, to render")
@pytest.mark.parametrize("overlay", ["cpu", "single-gpu"])
def test_component_without_a_gateway_leaves_the_rest_as_it_is(overlay: str, tmp_path: Path):
    """Goal: today's direct mode for whoever needs it. Method: render an overlay with the component
    and without it."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    own = tmp_path / "own"
    own.mkdir()
    base = f"resources: [../deploy/overlays/{overlay}]\n"
    (own / "kustomization.yaml").write_text(f"{base}components: [../deploy/components/direct]\n")
    path = kubectl()
    assert path is not None
    said = subprocess.run([path, "kustomize", str(own)], capture_output=True, check=True).stdout
    found = list(yaml.safe_load_all(said))
    expected = documents(overlay)
    (made,) = (each for each in expected if each["kind"] == "Deployment")
    lock, gms_server, _ = made["spec"]["template"]["spec"]["initContainers"]
    lock["env"].insert(0, {"name": "UNDERSTUDY_DIRECT", "value": "yes"})
    made["spec"]["template"]["spec"]["initContainers"] = [lock, gms_server]
    assert found == expected


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


@pytest.mark.parametrize("overlay", IN_MANY_CONTAINERS)
def test_hung_supervisor_is_killed_in_time(overlay: str):
    for container in of_program(overlay, "engine"):
        assert seconds_until_restart(container["livenessProbe"]) < HANG_FOUND_S


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_first_load_may_take_as_long_as_the_supervisor_lets_it(overlay: str):
    for container in containers(overlay):
        if any(port["name"] == "engine-0" for port in container["ports"]):
            probe = container["startupProbe"]
            budget_s = engine_settings.INIT_MS / 1000
            assert probe["periodSeconds"] * probe["failureThreshold"] >= budget_s


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_is_given_time_to_drain(overlay: str):
    needed_s = (engine_settings.DRAIN_MS + engine_settings.REAP_MS) / 1000
    assert pod_spec(overlay)["terminationGracePeriodSeconds"] > needed_s
    assert not [each for each in containers(overlay) if "lifecycle" in each]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_order_of_the_pod(overlay: str):
    """Sidecars start before the engines and stop after them."""
    sidecars = pod_spec(overlay).get("initContainers", [])
    names = [each["name"] for each in sidecars]
    usual = ["lockserver", "gms", "gateway", *(["pool"] if overlay in POOLS else [])]
    assert names == {"no-dra": [], NODES: ["gms"]}.get(overlay, usual)
    for container in sidecars:
        assert container["restartPolicy"] == "Always"
        assert "startupProbe" in container


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
    for container in containers(overlay):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"]["memory"]
        assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_shared_memory_has_a_size(overlay: str):
    volumes: dict[str, Any] = {each["name"]: each for each in pod_spec(overlay)["volumes"]}
    for name in ("shared", "shm"):
        assert volumes[name]["emptyDir"]["medium"] == "Memory"
        assert volumes[name]["emptyDir"]["sizeLimit"]


def test_flags_that_nobody_takes_are_found():
    """The check itself: a command with a flag that it does not have is refused."""
    with pytest.raises((click.UsageError, UsageError)):
        PROGRAMS["gms"].commands["serve"].make_context("serve", ["--no-such-flag"])
