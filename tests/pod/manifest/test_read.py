"""A manifest in, a pod out: order, defaults, values, what is not honoured, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.deploy.manifests import OVERLAYS, documents
from understudy.errors import UsageError
from understudy.pod.kubelet.containers import Kind, Restart
from understudy.pod.manifest.read import read_manifest
from understudy.pod.manifest.spec import Check, Manifest, Mount, Volume

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


def read(text: str) -> Manifest:
    return read_manifest([each for each in yaml.safe_load_all(text) if each])


def small(container: str = "", pod: str = "") -> Manifest:
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
    assert (manifest.unhonoured, manifest.left_out) == ((), ())


def test_probe_has_kubernetes_defaults_and_what_is_said():
    """Goal: each number. Method: a probe with nothing but its question, and one with everything."""
    bare = small("livenessProbe: {httpGet: {port: 80}}").specs[0].liveness
    assert bare == Check("/", 80, "", 10, 1, 3, 1, 0, None)
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
    assert full.readiness == Check("/ready", "web", "127.0.0.2", 2, 3, 4, 5, 6, 0)


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


def test_what_is_not_honoured_is_named_once():
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
    assert manifest.unhonoured == (
        "emptyDir.sizeLimit",
        "hostIPC",
        "image",
        "livenessProbe.exec",
        "livenessProbe.periodSeconds",
        "resources",
        "valueFrom.secretKeyRef",
    )


def test_volumes_are_told_apart():
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
        ("command: serve", r"containers\[0\]\.command is to be a list of texts"),
        ("args: [1]", r"args is to be a list of texts"),
        ("ports: [{containerPort: http}]", r"ports\[0\]\.containerPort is to be a whole number"),
        ("ports: 1", r"ports is to be a list"),
        ("env: [{value: x}]", r"env\[0\]\.name is missing"),
        ("env: [{name: X, value: 1}]", r"are quotes missing"),
        ("livenessProbe: {httpGet: {}}", r"port is to be a number or the name"),
        ("livenessProbe: {httpGet: {port: 1}, periodSeconds: 0}", "a whole number from 1 on"),
        ("env: [X=1]", r"env\[0\] is to be a mapping"),
    ],
)
def test_broken_manifest_is_refused_with_the_place(container: str, words: str):
    """Goal: one sentence that says where. Method: one thing wrong at a time."""
    with pytest.raises(UsageError, match=words) as caught:
        small(container)
    assert caught.value.code == "manifest.broken"


def test_restart_policy_and_containers_are_checked():
    with pytest.raises(UsageError, match="one of Always, OnFailure, Never"):
        small(pod="restartPolicy: Sometimes")
    with pytest.raises(UsageError, match="is to have a container"):
        small(pod="containers: []")


@pytest.mark.parametrize("text", ["", SMALL + "---" + SMALL, "kind: ConfigMap"])
def test_manifest_of_no_pod_or_of_two_is_refused(text: str):
    with pytest.raises(UsageError, match="describe one pod") as caught:
        read(text)
    assert caught.value.code == "manifest.no_pod"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_our_own_overlays_are_understood(overlay: str):
    """Goal: every manifest that is shipped. Method: order, probes and ports against the file."""
    manifest = read_manifest(documents(overlay))
    sidecars = [each.name for each in manifest.specs if each.kind is Kind.SIDECAR]
    assert sidecars == ([] if overlay == "no-dra" else ["lockserver", "gms"])
    assert list(manifest.ports())[:4] == ["http", "lockserver", "gms", "engine-0"]
    assert manifest.grace_s == 45
    for spec in manifest.specs:
        assert spec.startup is not None
        assert spec.liveness is not None
    known = {"image", "resources", "securityContext"}
    assert known <= set(manifest.unhonoured)
    read_fields = {"command", "args", "env", "ports", "startupProbe", "livenessProbe"}
    assert not read_fields & set(manifest.unhonoured)
