"""Reads a pod's manifest by Kubernetes' rules: documents in, one `Manifest` out.

Pure. Owns which objects and fields mean something here, and Kubernetes' defaults for those that are
absent; everything else ends in `unhonoured`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from understudy.errors import UsageError
from understudy.pod.kubelet.containers import Kind, Restart
from understudy.pod.manifest.fields import Fields, Reading, broken
from understudy.pod.manifest.spec import Check, Manifest, Mount, Source, Spec, Variable, Volume

GRACE_S = 30  # Kubernetes' terminationGracePeriodSeconds
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job")
RESTARTS = {
    "Always": Restart.ALWAYS,
    "OnFailure": Restart.ON_FAILURE,
    "Never": Restart.NEVER,
}

Document = Mapping[str, Any]


def read_manifest(documents: Sequence[Document]) -> Manifest:
    """The one pod that `documents` describe, with the ConfigMaps beside it.

    Raises:
        UsageError: `manifest.broken`, `manifest.no_pod`.
    """
    reading = Reading()
    kinds = [(str(each.get("kind")), each) for each in documents]
    pods = [each for kind, each in kinds if kind == "Pod" or kind in WORKLOADS]
    if len(pods) != 1:
        found = ", ".join(_title(each) for each in pods) or "none"
        raise UsageError(
            "manifest.no_pod",
            f"a manifest is to describe one pod, alone or in a {', '.join(WORKLOADS)}; this one "
            f"has {found}",
        )
    config_maps = {
        str(_metadata(each).get("name")): reading.fields(each, _title(each)).mapping("data")
        for kind, each in kinds
        if kind == "ConfigMap"
    }
    reading = Reading()  # from here on, what nobody reads is worth a word
    metadata, spec = _pod(reading, pods[0])
    grace_s = spec.number("terminationGracePeriodSeconds", GRACE_S)
    shares_processes = spec.flag("shareProcessNamespace")
    restart = _restart(spec)
    specs = [
        *(_container(each, Kind.INIT, restart) for each in spec.list("initContainers", "")),
        *(_container(each, Kind.MAIN, restart) for each in spec.list("containers", "")),
    ]
    if not any(each.kind is Kind.MAIN for each in specs):
        raise broken(f"{spec.path}.containers", "is to have a container")
    volumes = [_volume(each) for each in spec.list("volumes")]
    return Manifest(
        name=str(_metadata(pods[0]).get("name") or "pod"),
        namespace=str(_metadata(pods[0]).get("namespace") or "default"),
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
        specs=tuple(specs),
        volumes={volume.name: volume for volume in volumes},
        config_maps=config_maps,
        grace_s=grace_s,
        shares_processes=shares_processes,
        unhonoured=reading.unread(),
        left_out=tuple(
            _title(each) for kind, each in kinds if each is not pods[0] and kind != "ConfigMap"
        ),
    )


def _pod(reading: Reading, document: Document) -> tuple[Document, Fields]:
    """The pod's metadata and its spec, of a pod or of what makes pods."""
    if document.get("kind") == "Pod":
        return _metadata(document), reading.fields(document.get("spec"), "spec")
    template = (document.get("spec") or {}).get("template") or {}
    return _metadata(template), reading.fields(template.get("spec"), "spec.template.spec")


def _restart(spec: Fields) -> Restart:
    policy = spec.text("restartPolicy", "Always")
    if policy not in RESTARTS:
        raise broken(f"{spec.path}.restartPolicy", f"is to be one of {', '.join(RESTARTS)}")
    return RESTARTS[policy]


def _container(fields: Fields, kind: Kind, restart: Restart) -> Spec:
    name = fields.required("name")
    if kind is Kind.INIT:
        is_sidecar = fields.text("restartPolicy") == "Always"
        kind = Kind.SIDECAR if is_sidecar else Kind.INIT
        # One that has ended well is not run again, whatever the pod's policy.
        again = Restart.NEVER if restart is Restart.NEVER else Restart.ON_FAILURE
        restart = Restart.ALWAYS if is_sidecar else again
    ports = [
        (each.text("name"), each.number("containerPort", 0, 1)) for each in fields.list("ports")
    ]
    return Spec(
        name,
        kind,
        restart,
        (*fields.texts("command"), *fields.texts("args")),
        tuple(_variable(each) for each in fields.list("env")),
        tuple(_source(each) for each in fields.list("envFrom") if each.has("configMapRef")),
        {port_name or str(number): number for port_name, number in ports},
        tuple(
            Mount(each.required("name"), each.required("mountPath"), each.text("subPath"))
            for each in fields.list("volumeMounts")
        ),
        _check(fields.fields("startupProbe")),
        _check(fields.fields("livenessProbe")),
        _check(fields.fields("readinessProbe")),
    )


def _check(fields: Fields | None) -> Check | None:
    """A probe; None for one of a kind that is not honoured, whose fields then stay unread."""
    if fields is None or not fields.has("httpGet"):
        return None
    asked = fields.fields("httpGet")
    assert asked is not None
    port = asked.take("port")
    if not isinstance(port, (int, str)):
        raise broken(f"{asked.path}.port", "is to be a number or the name of a port")
    grace = fields.number("terminationGracePeriodSeconds", -1)
    return Check(
        asked.text("path", "/"),
        port,
        asked.text("host"),
        fields.number("periodSeconds", 10, 1),
        fields.number("timeoutSeconds", 1, 1),
        fields.number("failureThreshold", 3, 1),
        fields.number("successThreshold", 1, 1),
        fields.number("initialDelaySeconds", 0),
        grace if grace >= 0 else None,
    )


def _variable(fields: Fields) -> Variable:
    name, origin = fields.required("name"), fields.fields("valueFrom")
    if origin is None:
        return Variable(name, fields.text("value"))
    chosen = origin.fields("configMapKeyRef")
    if chosen is not None:
        key, is_optional = chosen.required("key"), chosen.flag("optional")
        return Variable(name, config_map=chosen.required("name"), key=key, is_optional=is_optional)
    chosen = origin.fields("fieldRef")
    if chosen is not None:
        chosen.take("apiVersion")
        return Variable(name, field_path=chosen.required("fieldPath"))
    return Variable(name, is_optional=True)  # of a secret, of a resource: named as unhonoured


def _source(fields: Fields) -> Source:
    chosen = fields.fields("configMapRef")
    assert chosen is not None
    return Source(chosen.required("name"), fields.text("prefix"), chosen.flag("optional"))


def _volume(fields: Fields) -> Volume:
    name = fields.required("name")
    if fields.has("emptyDir"):
        fields.fields("emptyDir")
        return Volume(name, "emptyDir")
    path = fields.fields("hostPath")
    if path is not None:
        return Volume(name, "hostPath", path.required("path"))
    config_map = fields.fields("configMap")
    if config_map is not None:
        return Volume(name, "configMap", config_map.required("name"))
    kind = next(iter(fields.unread()), "volume of no kind").rpartition(".")[2]
    fields.take(kind)  # a directory is named for it
    return Volume(name, kind)


def _metadata(document: Document) -> Document:
    return document.get("metadata") or {}


def _title(document: Document) -> str:
    return f"{document.get('kind')} {_metadata(document).get('name')}"
