"""Reads a pod's manifest by Kubernetes' rules: documents in, one `Manifest` out.

Pure. Owns which objects and fields mean something here, and Kubernetes' defaults for those that are
absent; everything else ends in `unhonoured`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from plumbing.errors import UsageError
from understudy.kubelet.containers import Kind, Restart
from understudy.manifest.fields import Fields, Reading, broken
from understudy.manifest.spec import Check, Manifest, Mount, Source, Spec, Variable, Volume

GRACE_S = 30  # Kubernetes' terminationGracePeriodSeconds
PORT_MAX = 65535
KEY = re.compile(r"(?!\.\.)[-._a-zA-Z0-9]+")  # of a ConfigMap: a file's name where it is a volume
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
    kinds = [(str(each.get("kind")), each) for each in _one_by_one(documents)]
    pods = [each for kind, each in kinds if kind == "Pod" or kind in WORKLOADS]
    if len(pods) != 1:
        found = ", ".join(_title(each) for each in pods) or "none"
        raise UsageError(
            "manifest.no_pod",
            f"a manifest is to describe one pod, alone or in a {', '.join(WORKLOADS)}; this one "
            f"has {found}"
            + ("; name a file with one: engines that span pods need a cluster" if pods else ""),
        )
    config_maps = {
        str(_metadata(each).get("name")): _settings(reading.fields(each, _title(each)))
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
    _refuse_twins(f"{spec.path}.containers", (each.name for each in specs))
    _refuse_twins(f"{spec.path}.volumes", (each.name for each in volumes))
    # Kubernetes takes the same name in two containers, but --set knows ports by their names.
    names = (name for each in specs for name in each.ports if not name.isdecimal())
    _refuse_twins("the containers' ports", names)
    return Manifest(
        name=str(_metadata(pods[0]).get("name") or "pod"),
        namespace=str(_metadata(pods[0]).get("namespace") or "default"),
        labels=metadata.mapping("labels"),
        annotations=metadata.mapping("annotations"),
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


def _one_by_one(documents: Iterable[Document]) -> Iterator[Document]:
    """The objects of `documents`, and of the lists among them: `kubectl get` writes such."""
    for document in documents:
        items = document.get("items")
        if str(document.get("kind")).endswith("List") and isinstance(items, list):
            yield from (each for each in items if isinstance(each, dict))
        else:
            yield document


def _pod(reading: Reading, document: Document) -> tuple[Fields, Fields]:
    """The pod's metadata and its spec, of a pod or of what makes pods."""
    aside = Reading()  # what else a workload or metadata say is nothing to honour
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
            raise broken(f"{config_map.path}.data", f"is to have no key like {key!r}")
    return found


def _refuse_twins(path: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise broken(path, f"are to have names of their own, and {count} are named {name}")


def _restart(spec: Fields) -> Restart:
    policy = spec.text("restartPolicy", "Always")
    if policy not in RESTARTS:
        raise broken(f"{spec.path}.restartPolicy", f"is to be one of {', '.join(RESTARTS)}")
    return RESTARTS[policy]


def _container(fields: Fields, kind: Kind, restart: Restart) -> Spec:
    name = fields.name()
    if kind is Kind.INIT:
        is_sidecar = fields.text("restartPolicy") == "Always"
        kind = Kind.SIDECAR if is_sidecar else Kind.INIT
        # One that has ended well is not run again, whatever the pod's policy.
        again = Restart.NEVER if restart is Restart.NEVER else Restart.ON_FAILURE
        restart = Restart.ALWAYS if is_sidecar else again
    ports = [(each.text("name"), _port_number(each)) for each in fields.list("ports")]
    _refuse_twins(f"{fields.path}.ports", (port_name for port_name, _ in ports if port_name))
    command, args = fields.texts("command"), fields.texts("args")
    return Spec(
        name,
        kind,
        restart,
        (*command, *args) if command else (),  # the args alone are for what the image has
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
        raise broken(f"{fields.path}.containerPort", "is missing")
    return number


def _mount(fields: Fields) -> Mount:
    sub_path = fields.text("subPath")
    if sub_path.startswith("/") or ".." in sub_path.split("/"):
        raise broken(f"{fields.path}.subPath", "is to be a path that stays in its volume")
    return Mount(fields.required("name"), fields.required("mountPath"), sub_path)


def _check(fields: Fields | None) -> Check | None:
    """A probe; None for one of a kind that is not honoured, whose fields then stay unread."""
    if fields is None or not fields.has("httpGet"):
        return None
    asked = fields.fields("httpGet")
    assert asked is not None
    port = asked.take("port")
    is_number = type(port) is int and 1 <= port <= PORT_MAX
    if not is_number and not (isinstance(port, str) and port):
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
    if "=" in name:
        raise broken(f"{fields.path}.name", "is to have no = in it")
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
    kind = next(iter(fields.unread()), "volume of no kind").rpartition(".")[2]
    fields.take(kind)  # a directory is named for it
    return Volume(name, kind)


def _metadata(document: Document) -> Document:
    found = document.get("metadata")
    return found if isinstance(found, dict) else {}


def _title(document: Document) -> str:
    return f"{document.get('kind')} {_metadata(document).get('name')}"
