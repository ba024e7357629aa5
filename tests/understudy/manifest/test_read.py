"""A manifest in, a pod out: order, defaults, values, ignored fields, errors."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from plumbing.errors import UsageError
from tests.deploy.manifests import IN_ONE_POD, NODES, POOLS, documents
from understudy.kubelet.containers import Kind, Restart
from understudy.manifest.read import read_manifest
from understudy.manifest.spec import Mount, PodManifest, ProbeSpec, Volume

SMALL = """
apiVersion: v1
kind: Pod
metadata: {name: small, namespace: here, labels: {app: small}}
spec:
  containers:
  - name: main
    command: [serve]
    args: [--all]
"""


def read(text: str) -> PodManifest:
    return read_manifest([each for each in yaml.safe_load_all(text) if each])


def small(container: str = "", pod: str = "") -> PodManifest:
    """A pod of one container, with more of its fields and of the pod's, as YAML."""
    document: dict[str, Any] = yaml.safe_load(SMALL)
    document["spec"]["containers"][0] |= yaml.safe_load(container) or {}
    document["spec"] |= yaml.safe_load(pod) or {}
    return read_manifest([document])


def test_smallest_pod_has_kubernetes_defaults():
    """Goal: what is absent. Method: a pod that says next to nothing."""
    manifest = read(SMALL)
    (spec,) = manifest.specs
    assert (manifest.name, manifest.namespace, manifest.labels) == (
        "small",
        "here",
        {"app": "small"},
    )
    assert (spec.name, spec.kind, spec.restart) == ("main", Kind.MAIN, Restart.ALWAYS)
    assert spec.command == ("serve", "--all")
    assert manifest.grace_s == 30
    assert spec.checks == ()
    assert (manifest.ignored, manifest.left_out) == ((), ())


def test_probe_has_kubernetes_defaults_and_what_is_said():
    """Goal: each number. Method: a probe with nothing but its question, and one with everything."""
    bare = small("livenessProbe: {httpGet: {port: 80}}").specs[0].liveness
    assert bare == ProbeSpec("/", 80, "", 10, 1, 3, 1, 0, None)
    full = small(
        """
        readinessProbe:
          httpGet: {path: /ready, port: web, host: 127.0.0.2}
          periodSeconds: 2
          timeoutSeconds: 3
          failureThreshold: 4
          successThreshold: 5
          initialDelaySeconds: 6
          terminationGracePeriodSeconds: 0
        """
    ).specs[0]
    assert full.readiness == ProbeSpec("/ready", "web", "127.0.0.2", 2, 3, 4, 5, 6, 0)


@pytest.mark.parametrize(
    ("policy", "init", "main"),
    [
        ("Always", Restart.ON_FAILURE, Restart.ALWAYS),
        ("OnFailure", Restart.ON_FAILURE, Restart.ON_FAILURE),
        ("Never", Restart.NEVER, Restart.NEVER),
    ],
)
def test_init_containers_end_and_sidecars_stay(policy: str, init: Restart, main: Restart):
    """Goal: who is restarted when. Method: each policy, an init container and a sidecar."""
    manifest = small(
        pod=f"""
        restartPolicy: {policy}
        initContainers:
        - {{name: prepare, command: [make]}}
        - {{name: help, command: [serve], restartPolicy: Always}}
        """
    )
    assert [(each.name, each.kind, each.restart) for each in manifest.specs] == [
        ("prepare", Kind.INIT, init),
        ("help", Kind.SIDECAR, Restart.ALWAYS),
        ("main", Kind.MAIN, main),
    ]


def test_ignored_fields_are_named_once():
    """Goal: nothing is ignored in silence. Method: fields of every depth, twice the same."""
    manifest = small(
        container="""
        image: some:1
        resources: {limits: {memory: 1Gi}}
        livenessProbe: {exec: {command: [x]}, periodSeconds: 1}
        env:
        - {name: KEY, valueFrom: {secretKeyRef: {name: s, key: k}}}
        """,
        pod="""
        hostIPC: true
        initContainers: [{name: first, command: [x], image: other:1, restartPolicy: Always}]
        volumes: [{name: v, emptyDir: {sizeLimit: 1Gi}}]
        """,
    )
    assert manifest.ignored == (
        "emptyDir.sizeLimit",
        "hostIPC",
        "image",
        "livenessProbe.exec",
        "livenessProbe.periodSeconds",
        "resources",
        "valueFrom.secretKeyRef",
    )


def test_kinds_of_volumes_are_distinguished():
    """Goal: what each volume is. Method: one of each kind, and its mounts."""
    manifest = small(
        "volumeMounts: [{name: a, mountPath: /a/}, {name: b, mountPath: /b, subPath: deep}]",
        """
        volumes:
        - {name: a, emptyDir: {}}
        - {name: b, hostPath: {path: /srv}}
        - {name: c, configMap: {name: settings}}
        - {name: d, persistentVolumeClaim: {claimName: model}}
        """,
    )
    assert manifest.volumes == {
        "a": Volume("a", "emptyDir"),
        "b": Volume("b", "hostPath", "/srv"),
        "c": Volume("c", "configMap", "settings"),
        "d": Volume("d", "persistentVolumeClaim"),
    }
    assert manifest.specs[0].mounts == (Mount("a", "/a/", ""), Mount("b", "/b", "deep"))


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("command: serve", r"containers\[0\]\.command must be a list of strings"),
        ("args: [1]", r"args must be a list of strings"),
        ("ports: [{containerPort: http}]", r"ports\[0\]\.containerPort must be an integer"),
        ("ports: 1", r"ports must be a list"),
        ("env: [{value: x}]", r"env\[0\]\.name is required"),
        ("env: [{name: X, value: 1}]", r"are quotes missing"),
        ("livenessProbe: {httpGet: {}}", r"port must be a port number or name"),
        ("livenessProbe: {httpGet: {port: 1}, periodSeconds: 0}", "an integer from 1 to"),
        ("env: [X=1]", r"env\[0\] must be a mapping"),
        ("env: [{name: X=Y, value: z}]", r"name must not contain ="),
        ('env: [{name: X, value: "a\\0b"}]', r"value must be a string"),
        ('command: ["\\ud800"]', r"command must be a list of strings"),
        ("ports: [{name: web}]", r"containerPort is required"),
        ("ports: [{containerPort: 70000}]", r"from 1 to 65535"),
        ("livenessProbe: {httpGet: {port: 70000}}", r"port must be a port number or name"),
        ("livenessProbe: {httpGet: {port: true}}", r"port must be a port number or name"),
        (
            "ports: [{name: a, containerPort: 1}, {name: a, containerPort: 2}]",
            "has the duplicate name a",
        ),
        ("name: ../main", r"name must consist of a-z"),
        (
            "volumeMounts: [{name: v, mountPath: /v, subPath: a/../../b}]",
            "must be a path inside the volume",
        ),
        (
            "volumeMounts: [{name: v, mountPath: /v, subPath: /etc}]",
            "must be a path inside the volume",
        ),
    ],
)
def test_invalid_field_is_refused_with_its_path(container: str, words: str):
    """Goal: one sentence that says where. Method: one thing wrong at a time."""
    with pytest.raises(UsageError, match=words) as caught:
        small(container)
    assert caught.value.code == "manifest.broken"


def test_restart_policy_and_containers_are_checked():
    with pytest.raises(UsageError, match="one of Always, OnFailure, Never"):
        small(pod="restartPolicy: Sometimes")
    with pytest.raises(UsageError, match="must have at least one container"):
        small(pod="containers: []")


@pytest.mark.parametrize("name", ["/somewhere", "../../somewhere", "..", "a/b", ""])
def test_volume_that_would_lie_elsewhere_is_refused(name: str):
    """Goal: making a pod's volumes anew removes nothing of anybody else. Method: names that lead
    out of the pod's directory, of which `/somewhere` would have been removed whole."""
    with pytest.raises(UsageError, match=r"volumes\[0\]\.name (must|is)") as caught:
        small(pod=f"volumes: [{{name: '{name}', emptyDir: {{}}}}]")
    assert caught.value.code == "manifest.broken"


@pytest.mark.parametrize("key", ["../a", "/etc/a", "..", "a/b"])
def test_key_of_a_config_map_is_a_files_name(key: str):
    """Goal: as a volume it writes nothing elsewhere. Method: keys that lead out of it."""
    with pytest.raises(UsageError, match="must not have the key"):
        read(f"{SMALL}---\nkind: ConfigMap\nmetadata: {{name: c}}\ndata: {{{key}: x}}\n")


@pytest.mark.parametrize(
    "pod",
    [
        "containers: [{name: a, command: [x]}, {name: a, command: [y]}]",
        "volumes: [{name: a, emptyDir: {}}, {name: a, hostPath: {path: /etc}}]",
    ],
)
def test_duplicate_names_are_refused(pod: str):
    """Goal: the last one does not win in silence. Method: two containers, two volumes."""
    with pytest.raises(UsageError, match="has the duplicate name a"):
        small(pod=pod)


def test_args_without_a_command_are_not_run():
    """Goal: they are for the image's entry point, and are not run in its place. Method: a
    container with nothing else."""
    assert small("{command: null, args: [--all]}").specs[0].command == ()


@pytest.mark.parametrize(
    "text",
    [
        "kind: Deployment\nspec: x",
        "kind: Deployment\nspec: {template: x}",
        "kind: Deployment\nspec: {template: {spec: x}}",
        "kind: Pod\nmetadata: x\nspec: {}",
        "kind: Pod\nmetadata: {labels: [a]}\nspec: {containers: [{name: a}]}",
    ],
)
def test_pod_that_is_not_a_mapping_is_refused(text: str):
    """Goal: a sentence, no stack trace. Method: a string or a list in place of a mapping."""
    with pytest.raises(UsageError, match="must be a mapping") as caught:
        read(text)
    assert caught.value.code == "manifest.broken"


def test_list_counts_as_the_objects_in_it():
    """Goal: what `kubectl get -o yaml` writes. Method: the same objects, alone and in a List."""
    config_map = "kind: ConfigMap\nmetadata: {name: c}\ndata: {a: b}\n"
    documents = [yaml.safe_load(SMALL), yaml.safe_load(config_map)]
    listed = read_manifest([{"apiVersion": "v1", "kind": "List", "items": documents}])
    assert listed == read_manifest(documents)


@pytest.mark.parametrize("text", ["", SMALL + "---" + SMALL, "kind: ConfigMap"])
def test_manifest_without_exactly_one_pod_is_refused(text: str):
    with pytest.raises(UsageError, match="describe one pod") as caught:
        read(text)
    assert caught.value.code == "manifest.no_pod"


def test_engines_that_span_pods_are_refused_with_what_to_do():
    """Goal: nobody drills half an engine. Method: our own overlay of that kind."""
    with pytest.raises(UsageError) as caught:
        read_manifest(documents(NODES))
    assert caught.value.code == "manifest.no_pod"
    assert "Deployment understudy-lockserver, StatefulSet understudy" in caught.value.message
    assert "engines that span pods" in caught.value.message


@pytest.mark.parametrize("overlay", IN_ONE_POD)
def test_our_own_overlays_are_understood(overlay: str):
    """Goal: every manifest that is shipped. Method: order, probes and ports against the file."""
    manifest = read_manifest(documents(overlay))
    sidecars = [each.name for each in manifest.specs if each.kind is Kind.SIDECAR]
    servers = ["lockserver", "gms", "gateway", *(["pool"] if overlay in POOLS else [])]
    assert sidecars == ([] if overlay == "no-dra" else servers)
    names = ["http", *servers, "engine-0"]
    assert list(manifest.ports())[: len(names)] == names
    assert manifest.grace_s == 45
    for spec in (each for each in manifest.specs if each.kind is not Kind.INIT):
        assert spec.startup is not None
        assert spec.liveness is not None
    known = {"image", "resources", "securityContext"}
    assert known <= set(manifest.ignored)
    read_fields = {"command", "args", "env", "ports", "startupProbe", "livenessProbe"}
    assert not read_fields & set(manifest.ignored)
