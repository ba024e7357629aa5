"""The files of a manifest's pod: the manifest itself, and the pod's volumes.

A manifest is a rendered file, or a Kustomize directory that `kubectl` renders; for our own overlays
deploy/rendered replaces kubectl. YAML is read as Kubernetes reads it: duplicate keys are refused. A
new pod starts with empty volumes, as in Kubernetes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plumbing.errors import UsageError
from understudy.host import output_of
from understudy.manifest.read import Document, read_manifest
from understudy.manifest.spec import PodManifest
from understudy.manifest.values import Choices, replace_paths_within

KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml", "Kustomization")
RENDER_DEADLINE_S = 60.0  # usually 0.1 s; longer if a base is downloaded
MANIFEST_MAX_BYTES = 4 * 2**20  # etcd allows 1.5 MiB per object; ours have 20 KiB


async def load_manifest(path: Path) -> PodManifest:
    """The pod that `path` describes.

    Raises:
        UsageError: it cannot be read or rendered, or is not valid.
    """
    if not path.is_dir():
        return read_manifest_file(path)
    return read_manifest(_documents(path, await _render(path)))


def read_manifest_file(path: Path) -> PodManifest:
    """The pod that the rendered file `path` describes.

    Raises:
        UsageError: it cannot be read, or is not valid.
    """
    return read_manifest(_documents(path, _read(path)))


def make_volumes(
    manifest: PodManifest,
    volumes: Mapping[str, Path],
    choices: Choices,
    places: Mapping[str, str] | None = None,
) -> None:
    """Recreate the pod's own volumes, and check that the others exist. `places`: the directories of
    mount paths, which the files of ConfigMaps get instead.

    Raises:
        UsageError: `manifest.no_volume`, a directory does not exist or cannot be created.
    """
    for name, path in volumes.items():
        volume = manifest.volumes[name]
        if name in choices.volume or not volume.is_of_pod:
            if not path.exists():
                raise UsageError(
                    "manifest.no_volume",
                    f"volume {name} is {path}, which does not exist; choose another directory with "
                    f"--set volume.{name}=PATH",
                )
            continue
        data = manifest.config_maps.get(volume.source, {}) if volume.kind == "configMap" else {}
        try:
            if path.exists():
                shutil.rmtree(path)
            path.mkdir(mode=0o700, parents=True)
            for key, value in data.items():
                text = replace_paths_within(choices.config.get(key, value), places or {})
                (path / key).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                "manifest.no_volume",
                f"cannot recreate volume {name} at {path}: {error.strerror}; remove it, or choose "
                "another directory with --dir",
            ) from error


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MANIFEST_MAX_BYTES:
            raise UsageError(
                "manifest.too_long",
                f"{path} is larger than {MANIFEST_MAX_BYTES} bytes and is not a pod's manifest",
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            "manifest.unreadable", f"cannot read the manifest {path}: {reason}", path=str(path)
        ) from error


async def _render(directory: Path) -> str:
    if not any((directory / name).exists() for name in KUSTOMIZATIONS):
        raise UsageError(
            "manifest.no_kustomization",
            f"{directory} has no {KUSTOMIZATIONS[0]}; pass a Kustomize directory or a rendered "
            "file",
        )
    kubectl = shutil.which("kubectl")
    rendered = directory.absolute().parent.parent / "rendered" / f"{directory.absolute().name}.yaml"
    if kubectl is not None:
        return await _ask_kubectl(kubectl, directory)
    if rendered.exists():
        return _read(rendered)
    raise UsageError(
        "manifest.no_kubectl",
        f"rendering {directory} requires kubectl, which is not installed; install it, or pass a "
        "file rendered by `kubectl kustomize`",
    )


async def _ask_kubectl(kubectl: str, directory: Path) -> str:
    command = f"kubectl kustomize {directory}"
    try:
        code, text, errors = await output_of(
            kubectl, "kustomize", str(directory), timeout_s=RENDER_DEADLINE_S
        )
    except TimeoutError as error:
        raise UsageError(
            "manifest.not_rendered",
            f"`{command}` timed out after {RENDER_DEADLINE_S:g} s; pass a rendered file",
        ) from error
    if code:
        why = (errors.strip().splitlines() or ["no error message"])[-1]
        raise UsageError("manifest.not_rendered", f"`{command}` failed: {why}")
    return text


def _documents(path: Path, text: str) -> list[Document]:
    import yaml  # most commands do not need it

    class StrictLoader(yaml.SafeLoader):
        """Refuses a duplicate key, of which PyYAML would take the last one."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                    continue
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise yaml.YAMLError(f"duplicate key {key.value!r} at line {line}")
                seen.add(key.value)
            return node

    try:
        found = [each for each in yaml.load_all(text, StrictLoader) if each is not None]
    except RecursionError as error:
        raise UsageError("manifest.broken", f"{path} is nested too deeply") from error
    # The others come from invalid dates, booleans and numbers.
    except (yaml.YAMLError, ValueError, KeyError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise UsageError("manifest.broken", f"{path} is not valid YAML: {why}") from error
    if not all(isinstance(each, dict) for each in found):
        raise UsageError("manifest.broken", f"{path} has a document that is not a mapping")
    return found
