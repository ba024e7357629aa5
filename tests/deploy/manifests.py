"""The manifests as they are rendered: what `kubectl apply -k` would send."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
RENDERED = DEPLOY / "rendered"
OVERLAYS = tuple(sorted(path.name for path in (DEPLOY / "overlays").iterdir()))
WITH_CLAIM = ("single-gpu", "tp2", "tp8", "two-shadows")
IN_MANY_CONTAINERS = tuple(name for name in OVERLAYS if name != "no-dra")

Document = dict[str, Any]


def documents(overlay: str) -> list[Document]:
    """Every object of `overlay`."""
    text = (RENDERED / f"{overlay}.yaml").read_text()
    return [document for document in yaml.safe_load_all(text) if document]


def one(overlay: str, kind: str) -> Document:
    (found,) = (each for each in documents(overlay) if each["kind"] == kind)
    return found


def pod_spec(overlay: str) -> Document:
    spec: Document = one(overlay, "Deployment")["spec"]["template"]["spec"]
    return spec


def containers(overlay: str) -> list[Document]:
    """Sidecars and main containers, in the order in which they start."""
    spec = pod_spec(overlay)
    return [*spec.get("initContainers", []), *spec["containers"]]


def environment(overlay: str, container: Mapping[str, Any]) -> dict[str, str]:
    """What the container finds in its environment of what the manifest says."""
    found: dict[str, str] = {}
    if container.get("envFrom"):
        found |= one(overlay, "ConfigMap")["data"]
    return found | {each["name"]: each["value"] for each in container.get("env", [])}


def words(overlay: str, container: Mapping[str, Any]) -> list[str]:
    """The command line, with $(NAME) filled in as the kubelet does."""
    line = [*container["command"], *container.get("args", [])]
    for name, value in environment(overlay, container).items():
        line = [word.replace(f"$({name})", value) for word in line]
    return line
