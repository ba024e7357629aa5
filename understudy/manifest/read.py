"""Reads a pod's manifest by Kubernetes' rules: documents in, one `Manifest` out.

Pure. Owns which objects and fields have a meaning on one machine, and their defaults in Kubernetes;
all others end up in `ignored`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from plumbing.errors import UsageError
from understudy.kubelet.containers import Kind, Restart
from understudy.manifest.fields import Fields, Reading, broken
from understudy.manifest.spec import (
    ConfigMapEnv,
    ContainerSpec,
    Mount,
    PodManifest,
    ProbeSpec,
    Variable,
    Volume,
)

GRACE_S = 30  # Kubernetes' terminationGracePeriodSeconds
PORT_MAX = 65535
KEY = re.compile(r"(?!\.\.)[-._a-zA-Z0-9]+")  # of a ConfigMap: a file name in a volume
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job")
RESTARTS = {"Always": Restart.ALWAYS, "OnFailure": Restart.ON_FAILURE, "Never": Restart.NEVER}

Document = Mapping[str, Any]


def read_manifest(documents: Sequence[Document]) -> PodManifest:
    """The one pod that `documents` describe, with the ConfigMaps beside it.

    Raises:
        UsageError: `manifest.broken`, `manifest.no_pod`.
    """
    reading = Reading()
    kinds = [(str(each.get("kind")), each) for each in _one_by_one(documents)]
    pods = [each for kind, each in kinds if kind == "Pod" or kind in WORKLOADS]
    if len(pods) != 1:
        found = ", ".join(_title(each) for each in pods) or "none"
        raise UsageError(
            "manifest.no_pod",
            f"a manifest must describe one pod, as a Pod or a {', '.join(WORKLOADS)}; this one "
            f"has {found}"
            + ("; use a file with one: engines that span pods need a cluster" if pods else ""),
        )
    config_maps = {
        str(_metadata(each).get("name")): _settings(reading.fields(each, _title(each)))
        for kind, each in kinds
        if kind == "ConfigMap"
    }
    reading = Reading()  # from here on, unread fields are reported
    metadata, spec = _pod(reading, pods[0])
    grace_s = spec.number("terminationGracePeriodSeconds", GRACE_S)
    shares_processes = spec.flag("shareProcessNamespace")
    restart = _restart(spec)
    specs = [
        *(_container(each, Kind.INIT, restart) for each in spec.list("initContainers", "")),
        *(_container(each, Kind.MAIN, restart) for each in spec.list("containers", "")),
    ]
    if not any(each.kind is Kind.MAIN for each in specs):
        raise broken(f"{spec.path}.containers", "must have at least one container")
    volumes = [_volume(each) for each in spec.list("volumes")]
    _refuse_duplicates(f"{spec.path}.containers", (each.name for each in specs))
    _refuse_duplicates(f"{spec.path}.volumes", (each.name for each in volumes))
    # Kubernetes allows one name in two containers, but --set finds ports by name.
    names = (name for each in specs for name in each.ports if not name.isdecimal())
    _refuse_duplicates("the list of all ports", names)
    return PodManifest(
        name=str(_metadata(pods[0]).get("name") or "pod"),
        namespace=str(_metadata(pods[0]).get("namespace") or "default"),
        labels=metadata.mapping("labels"),
        annotations=metadata.mapping("annotations"),
        specs=tuple(specs),
        volumes={volume.name: volume for volume in volumes},
        config_maps=config_maps,
        grace_s=grace_s,
        shares_processes=shares_processes,
        ignored=reading.unread(),
        left_out=tuple(
            _title(each) for kind, each in kinds if each is not pods[0] and kind != "ConfigMap"
        ),
    )


def _one_by_one(documents: Iterable[Document]) -> Iterator[Document]:
    """The objects of `documents`, and of Lists among them, as `kubectl get` writes them."""
    for document in documents:
        items = document.get("items")
        if str(document.get("kind")).endswith("List") and isinstance(items, list):
            yield from (each for each in items if isinstance(each, dict))
        else:
            yield document


def _pod(reading: Reading, document: Document) -> tuple[Fields, Fields]:
    """The metadata and spec of the pod, or of a workload's pod template."""
    aside = Reading()  # other fields of workloads and metadata are not reported
    whole, path = aside.fields(document, "the pod"), ""
    if document.get("kind") != "Pod":
        workload, path = aside.fields(document.get("spec"), "spec"), "spec.template."
        whole = aside.fields(workload.take("template"), "spec.template")
    metadata = aside.fields(whole.take("metadata") or {}, f"{path}metadata")
    return metadata, reading.fields(whole.take("spec"), f"{path}spec")


def _settings(config_map: Fields) -> dict[str, str]:
    found = config_map.mapping("data")
    for key in found:
        if not KEY.fullmatch(key):
            raise broken(f"{config_map.path}.data", f"must not have the key {key!r}")
    return found


def _refuse_duplicates(path: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise broken(path, f"has the duplicate name {name}")


def _restart(spec: Fields) -> Restart:
    policy = spec.string("restartPolicy", "Always")
    if policy not in RESTARTS:
        raise broken(f"{spec.path}.restartPolicy", f"must be one of {', '.join(RESTARTS)}")
    return RESTARTS[policy]


def _container(fields: Fields, kind: Kind, restart: Restart) -> ContainerSpec:
    name = fields.name()
    if kind is Kind.INIT:
        is_sidecar = fields.string("restartPolicy") == "Always"
        kind = Kind.SIDECAR if is_sidecar else Kind.INIT
        # An init container that succeeded is not run again, whatever the pod's policy.
        again = Restart.NEVER if restart is Restart.NEVER else Restart.ON_FAILURE
        restart = Restart.ALWAYS if is_sidecar else again
    ports = [(each.string("name"), _port_number(each)) for each in fields.list("ports")]
    _refuse_duplicates(f"{fields.path}.ports", (port_name for port_name, _ in ports if port_name))
    command, args = fields.strings("command"), fields.strings("args")
    return ContainerSpec(
        name,
        kind,
        restart,
        (*command, *args) if command else (),  # args alone are for the image's entry point
        tuple(_variable(each) for each in fields.list("env")),
        tuple(_source(each) for each in fields.list("envFrom") if each.has("configMapRef")),
        {port_name or str(number): number for port_name, number in ports},
        tuple(_mount(each) for each in fields.list("volumeMounts")),
        _check(fields.fields("startupProbe")),
        _check(fields.fields("livenessProbe")),
        _check(fields.fields("readinessProbe")),
    )


def _port_number(fields: Fields) -> int:
    number = fields.number("containerPort", 0, 1, PORT_MAX)
    if not number:
        raise broken(f"{fields.path}.containerPort", "is required")
    return number


def _mount(fields: Fields) -> Mount:
    sub_path = fields.string("subPath")
    if sub_path.startswith("/") or ".." in sub_path.split("/"):
        raise broken(f"{fields.path}.subPath", "must be a path inside the volume")
    return Mount(fields.required("name"), fields.required("mountPath"), sub_path)


def _check(fields: Fields | None) -> ProbeSpec | None:
    """An HTTP probe; None for other kinds, whose fields stay unread."""
    if fields is None or not fields.has("httpGet"):
        return None
    http_get = fields.fields("httpGet")
    assert http_get is not None
    port = http_get.take("port")
    is_number = type(port) is int and 1 <= port <= PORT_MAX
    if not is_number and not (isinstance(port, str) and port):
        raise broken(f"{http_get.path}.port", "must be a port number or name")
    grace = fields.number("terminationGracePeriodSeconds", -1)
    return ProbeSpec(
        http_get.string("path", "/"),
        port,
        http_get.string("host"),
        fields.number("periodSeconds", 10, 1),
        fields.number("timeoutSeconds", 1, 1),
        fields.number("failureThreshold", 3, 1),
        fields.number("successThreshold", 1, 1),
        fields.number("initialDelaySeconds", 0),
        grace if grace >= 0 else None,
    )


def _variable(fields: Fields) -> Variable:
    name, origin = fields.required("name"), fields.fields("valueFrom")
    if "=" in name:
        raise broken(f"{fields.path}.name", "must not contain =")
    if origin is None:
        return Variable(name, fields.string("value"))
    chosen = origin.fields("configMapKeyRef")
    if chosen is not None:
        key, is_optional = chosen.required("key"), chosen.flag("optional")
        return Variable(name, config_map=chosen.required("name"), key=key, is_optional=is_optional)
    chosen = origin.fields("fieldRef")
    if chosen is not None:
        chosen.take("apiVersion")
        return Variable(name, field_path=chosen.required("fieldPath"))
    return Variable(name, is_optional=True)  # from a secret or a resource: reported as ignored


def _source(fields: Fields) -> ConfigMapEnv:
    chosen = fields.fields("configMapRef")
    assert chosen is not None
    return ConfigMapEnv(chosen.required("name"), fields.string("prefix"), chosen.flag("optional"))


def _volume(fields: Fields) -> Volume:
    name = fields.name()
    if fields.has("emptyDir"):
        fields.fields("emptyDir")
        return Volume(name, "emptyDir")
    path = fields.fields("hostPath")
    if path is not None:
        return Volume(name, "hostPath", path.required("path"))
    config_map = fields.fields("configMap")
    if config_map is not None:
        return Volume(name, "configMap", config_map.required("name"))
    kind = next(iter(fields.unread()), "volume of unknown kind").rpartition(".")[2]
    fields.take(kind)  # the user names a directory for it
    return Volume(name, kind)


def _metadata(document: Document) -> Document:
    found = document.get("metadata")
    return found if isinstance(found, dict) else {}


def _title(document: Document) -> str:
    return f"{document.get('kind')} {_metadata(document).get('name')}"
