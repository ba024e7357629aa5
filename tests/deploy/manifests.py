"""The manifests as they are rendered: what `kubectl apply -k` would send."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pool.pool_file import PoolFile, parse, settle

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
RENDERED = DEPLOY / "rendered"
OVERLAYS = tuple(sorted(path.name for path in (DEPLOY / "overlays").iterdir()))
NODES = "multi-node-lock"  # the one whose engines span pods, and whose lock server has its own
FLEETS = ("fleet", "fleet-cpu")  # several pods behind fronts, which have pods of their own
IN_ONE_POD = tuple(name for name in OVERLAYS if name != NODES)
POOLS = ("pool", "pool-cpu")  # many models in one pod
WITH_CLAIM = ("fleet", "single-gpu", "tp2", "tp8", "two-shadows", "pool")
ON_HOST_MEMORY = ("cpu", "fleet-cpu", "pool-cpu", NODES)
LOCK_POD = f"{NODES}:understudy-lockserver"
FRONTS = tuple(f"{name}:understudy-front" for name in FLEETS)
# Each pod that is made; an overlay's own is that of the engines.
PODS = (*OVERLAYS, LOCK_POD, *FRONTS)
OF_PODS = ("Deployment", "StatefulSet")
KUBECTL_MIN = (1, 28)
INIT, REPLACEABLE = "understudy-init", "--replaceable"
POD_INDEX = "apps.kubernetes.io/pod-index"

Document = dict[str, Any]

# Where Prometheus is expected: a namespace, or its operator's pods in our own.
MONITORING: list[Document] = [
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    {
        "podSelector": {
            "matchExpressions": [
                {"key": "app.kubernetes.io/name", "operator": "In", "values": ["prometheus"]}
            ]
        }
    },
]


def documents(pod: str) -> list[Document]:
    """Every object of the overlay that `pod` is of: the caller's own copy."""
    return copy.deepcopy(_parsed(pod.partition(":")[0]))


@cache
def _parsed(overlay: str) -> list[Document]:
    text = (RENDERED / f"{overlay}.yaml").read_text()
    return [document for document in yaml.safe_load_all(text) if document]


def one(pod: str, kind: str, name: str | None = None) -> Document:
    return one_of(documents(pod), kind, name)


def one_of(found: list[Document], kind: str, name: str | None = None) -> Document:
    """The object of this kind, and of this name where there are several."""
    of_kind = (each for each in found if each["kind"] == kind)
    (document,) = (each for each in of_kind if name in (None, each["metadata"]["name"]))
    return document


def workloads(pod: str) -> list[Document]:
    """What makes pods in the overlay that `pod` is of."""
    return [each for each in documents(pod) if each["kind"] in OF_PODS]


def workload(pod: str) -> Document:
    """What makes the pods of `pod`: an overlay, or OVERLAY:NAME."""
    name = pod.partition(":")[2] or "understudy"
    (found,) = (each for each in workloads(pod) if each["metadata"]["name"] == name)
    return found


def labels(made: Document) -> list[dict[str, str]]:
    """Those of every pod that a workload makes."""
    own: dict[str, str] = made["spec"]["template"]["metadata"]["labels"]
    if made["kind"] != "StatefulSet":
        return [own]
    return [own | {POD_INDEX: str(number)} for number in range(made["spec"]["replicas"])]


def selects(spec: Document, pod: str) -> bool:
    """Whether the selector of a Service or of a policy means this pod."""
    selector = spec["podSelector"]["matchLabels"] if "podSelector" in spec else spec["selector"]
    return all(selector.items() <= each.items() for each in labels(workload(pod)))


def pod_spec(pod: str) -> Document:
    spec: Document = workload(pod)["spec"]["template"]["spec"]
    return spec


def every_container(pod: str) -> list[Document]:
    """In the order in which they start; `command` is the program's, without the init above it, of
    which `test_every_program_runs_below_an_init` is."""
    spec = pod_spec(pod)
    found = [*spec.get("initContainers", []), *spec["containers"]]
    for each in found:
        if each["command"][:1] == [INIT]:
            del each["command"][0]
        if each["command"][:1] == [REPLACEABLE]:
            del each["command"][0]
    return found


def containers(pod: str) -> list[Document]:
    """Sidecars and main containers, in the order in which they start."""
    return [each for each in every_container(pod) if each not in init_containers(pod)]


def init_containers(pod: str) -> list[Document]:
    """Those that end before the engines start."""
    found = pod_spec(pod).get("initContainers", [])
    return [each for each in found if "restartPolicy" not in each]


def environment(pod: str, container: Mapping[str, Any], index: int = 0) -> dict[str, str]:
    """What the container finds in its environment of what the manifest says; `index`: its pod's."""
    found: dict[str, str] = {}
    if container.get("envFrom"):
        found |= one(pod, "ConfigMap")["data"]
    for each in container.get("env", []):
        if "valueFrom" in each:
            assert each["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        value = each.get("value", f"understudy-{index}")
        for name, said in found.items():
            value = value.replace(f"$({name})", said)
        found[each["name"]] = value
    return found


def pool_file(pod: str) -> PoolFile:
    """What the pod's processes read where UNDERSTUDY_POOL says."""
    ((name, text),) = one(pod, "ConfigMap")["data"].items()
    return settle(parse(name, text))


def words(pod: str, container: Mapping[str, Any]) -> list[str]:
    """The command line, with $(NAME) filled in as the kubelet does."""
    line = [*container["command"], *container.get("args", [])]
    line = line[1:] if line[0] == INIT else line
    for name, value in environment(pod, container).items():
        line = [word.replace(f"$({name})", value) for word in line]
    return line


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


needs_kubectl = pytest.mark.skipif(kubectl() is None, reason="needs kubectl 1.28 or newer")


def block(page: str, word: str) -> str:
    """The code block of a page that has `word`."""
    text = (DEPLOY.parent / "docs" / page).read_text()
    (found,) = (each for each in re.findall(r"```\n(.*?)```", text, re.DOTALL) if word in each)
    return found


def render(place: Path, kustomization: str) -> list[Document]:
    """What an overlay of a user's own, in the directory `place`, renders to."""
    path = kubectl()
    assert path is not None
    place.mkdir(exist_ok=True)
    (place / "kustomization.yaml").write_text(kustomization)
    said = subprocess.run(
        [path, "kustomize", "--load-restrictor=LoadRestrictionsNone", str(place)],
        capture_output=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr.decode()
    return list(yaml.safe_load_all(said.stdout))


def using(overlay: str, *components: str) -> str:
    """An overlay of a user's own: one of ours with components."""
    names = ", ".join(f"../deploy/components/{each}" for each in components)
    return f"resources: [../deploy/overlays/{overlay}]\ncomponents: [{names}]\n"


def of_program(overlay: str, program: str) -> list[Document]:
    return [each for each in containers(overlay) if each["command"][0] == program]
